"""The compiled loop that finds the distinct events of a batch and the place of each sample's history among them."""

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.dlrmv4.data.compiled import compiled
from dlrm_bench.dlrm.dlrmv4.data.limits import POOLS

NO_ROOM = -(1 << 62)
NO_POOL, TWO_POOLS = -1, -2


@compiled
def collect(
    anchors: NDArray[np.int64],
    uid: NDArray[np.int64],
    user_start: NDArray[np.int64],
    is_listen_plus: NDArray[np.bool_],
    is_like: NDArray[np.bool_],
    is_skip: NDArray[np.bool_],
    limit: int,
    scan: int,
    events: NDArray[np.int64],
    actions: NDArray[np.uint8],
    samples: NDArray[np.int32],
) -> tuple[int, int]:
    """Returns E, the number of distinct events, and Packed.candidates.

    Fills events [E], in order of time within a user, actions [E], and samples [5, B]: the first event of each pool,
    the end, and the length of each history. limit: events of a pool in a history; scan: events before an anchor that
    may be in it. E is NO_ROOM where `events` is too short, and -event - 1 where an event is of two pools.
    """
    count, candidates = 0, 0
    first = np.zeros(POOLS, dtype=np.int64)  # of each pool, the place in `events` of the oldest in the history
    held = np.zeros(POOLS, dtype=np.int64)  # of each pool, how many are in the history
    previous = -1  # the anchor before, of the same user
    for i in range(len(anchors)):
        anchor = anchors[i]
        start = max(user_start[uid[anchor]], anchor - scan)
        if previous < 0 or uid[previous] != uid[anchor] or anchor < previous:
            if count + POOLS * limit > len(events):
                return NO_ROOM, 0
            kept = _walk_back(
                start, anchor, is_listen_plus, is_like, is_skip, limit, events[count:], actions[count:], held
            )
            if kept < 0:
                return kept, 0
            for pool in range(POOLS):
                first[pool] = _next(actions, count, count + kept, pool)
            count += kept
        else:
            if count + anchor - previous > len(events):
                return NO_ROOM, 0
            for event in range(previous, anchor):
                pool = _pool(event, is_listen_plus, is_like, is_skip)
                if pool == TWO_POOLS:
                    return -event - 1, 0
                if pool != NO_POOL:
                    if held[pool] == 0:
                        first[pool] = count
                    events[count] = event
                    actions[count] = 1 << pool
                    held[pool] += 1
                    count += 1
            for pool in range(POOLS):
                while held[pool] > limit or (held[pool] > 0 and events[first[pool]] < start):
                    held[pool] -= 1
                    first[pool] = _next(actions, first[pool] + 1, count, pool)
        previous = anchor
        oldest, length = count, 0
        for pool in range(POOLS):
            place = first[pool] if held[pool] else count
            samples[pool, i] = place
            oldest = min(oldest, place)
            length += held[pool]
        samples[POOLS, i] = count
        samples[POOLS + 1, i] = length
        candidates += count - oldest
    return count, candidates


@compiled
def _pool(event: int, is_listen_plus: NDArray[np.bool_], is_like: NDArray[np.bool_], is_skip: NDArray[np.bool_]) -> int:
    """Pool of an event: 0 listen+, 1 like, 2 skip, NO_POOL or TWO_POOLS."""
    plus, like, skip = int(is_listen_plus[event]), int(is_like[event]), int(is_skip[event])
    if plus + like + skip > 1:
        return TWO_POOLS
    return plus + 2 * like + 3 * skip - 1


@compiled
def _walk_back(
    start: int,
    end: int,
    is_listen_plus: NDArray[np.bool_],
    is_like: NDArray[np.bool_],
    is_skip: NDArray[np.bool_],
    limit: int,
    events: NDArray[np.int64],
    actions: NDArray[np.uint8],
    held: NDArray[np.int64],
) -> int:
    """Finds the last `limit` events of each pool in [start, end); returns their number, or -event - 1 for an event of
    two pools.

    Fills events and actions in order of time, and held [POOLS].
    """
    held[:] = 0
    count = 0
    for event in range(end - 1, start - 1, -1):
        pool = _pool(event, is_listen_plus, is_like, is_skip)
        if pool == TWO_POOLS:
            return -event - 1
        if pool != NO_POOL and held[pool] < limit:
            held[pool] += 1
            events[count] = event
            actions[count] = 1 << pool
            count += 1
            if count == POOLS * limit:
                break
    for i in range(count // 2):
        events[i], events[count - 1 - i] = events[count - 1 - i], events[i]
        actions[i], actions[count - 1 - i] = actions[count - 1 - i], actions[i]
    return count


@compiled
def _next(actions: NDArray[np.uint8], place: int, end: int, pool: int) -> int:
    """The first place from `place` on with an event of the pool, or `end`."""
    while place < end and actions[place] != 1 << pool:
        place += 1
    return place
