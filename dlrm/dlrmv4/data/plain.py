"""Plain and slow definitions of an anchor, a window, a rank's share and a sample; all fast paths equal these.

The definitions are the reference's (generative_recommenders/dlrm_v4/datasets/yambda.py and StreamingWindowSampler of
train/utils.py), and a test compares them with the results of its code on a small case.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_bench.dlrm.dlrmv4.data.cache import Cache
from dlrm_bench.dlrm.dlrmv4.data.crosses import context_rows
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.limits import CONTEXT, LIKED, LISTEN, LISTEN_PLUS, LISTEN_PLUS_PERCENT, SKIPPED, Rows
from dlrm_bench.dlrm.dlrmv4.samples import Samples


def anchors(cache: Cache) -> NDArray[np.int64]:
    """Events that are anchors: listens with at least min_history earlier events of their user."""
    rank = np.arange(len(cache)) - cache.user_start[cache.uid]
    return np.flatnonzero((rank >= cache.limits.min_history) & (cache.event_type == LISTEN))


def num_windows(cache: Cache) -> int:
    """Windows from the earliest anchor to the latest."""
    span = int(cache.anchor_timestamp.max() - cache.anchor_timestamp.min()) + 1
    return -(-span // cache.limits.window_seconds)


def window(cache: Cache, number: int) -> NDArray[np.int64]:
    """Returns the anchors of a window by their times, ascending, which is by user and then by time: the order of
    training."""
    elapsed = cache.anchor_timestamp - cache.anchor_timestamp.min()
    return np.flatnonzero(elapsed // cache.limits.window_seconds == number)


def share(window: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.int64]:
    """Returns a rank's anchors of a window: every world_size-th anchor of the largest multiple of world_size."""
    return window[: len(window) // world_size * world_size][rank::world_size]


def batches(window: NDArray[np.int64], rank: int, world_size: int, local_batch: int) -> NDArray[np.int64]:
    """Returns a rank's batches of a window, [batches, local_batch]; its last samples, too few for one, are dropped."""
    own = share(window, rank, world_size)
    return own[: len(own) // local_batch * local_batch].reshape(-1, local_batch)


def history(cache: Cache, event: int) -> NDArray[np.int64]:
    """Events of an anchor's history, in order of time.

    Of the `scan` events of its user before it, the last third-of-a-history's listens+, likes and skips.
    """
    first = max(int(cache.user_start[cache.uid[event]]), event - cache.limits.scan)
    before = np.arange(first, event)
    pools = [before[flags[first:event]] for flags in (cache.is_listen_plus, cache.is_like, cache.is_skip)]
    return np.sort(np.concatenate([pool[-cache.limits.pool :] for pool in pools]))


def action(cache: Cache, events: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Action bits of events."""
    bits = LISTEN_PLUS * cache.is_listen_plus[events] + LIKED * cache.is_like[events] + SKIPPED * cache.is_skip[events]
    return bits.astype(np.uint8)


def samples(cache: Cache, maps: ItemMaps, rows: Rows, numbers: NDArray[np.int64]) -> Samples:
    """The samples of anchors, given by their numbers in cache.positions."""
    events = cache.positions[numbers]
    histories = [history(cache, int(event)) for event in events]
    joined = np.concatenate(histories)
    last = [past[-1] if len(past) else event for past, event in zip(histories, events, strict=True)]
    item, candidate = cache.item[joined], cache.item[events]
    context = np.empty((CONTEXT, len(events)), dtype=np.int32)
    for column, event in enumerate(events):
        uid, target, hour = int(cache.uid[event]), int(cache.item[event]), int(cache.timestamp[event]) // 3600 % 24
        keys = (uid, target, int(maps.artist[target]), int(maps.album[target]), hour, int(cache.is_organic[event]))
        context_rows(*keys, np.array(rows.crosses, dtype=np.uint64), context[:, column])
    listened = (cache.event_type[events] == LISTEN) & (cache.played_ratio[events] >= LISTEN_PLUS_PERCENT)
    return Samples(
        lengths=_int32(np.array([len(past) for past in histories])),
        item=_int32(item),
        artist=_int32(maps.artist[item]),
        album=_int32(maps.album[item]),
        timestamp=_int32(cache.timestamp[joined]),
        action=torch.from_numpy(action(cache, joined)),
        candidate_item=_int32(candidate),
        candidate_artist=_int32(maps.artist[candidate]),
        candidate_album=_int32(maps.album[candidate]),
        query_timestamp=_int32(cache.timestamp[last]),
        context=torch.from_numpy(context),
        labels=torch.from_numpy(listened.astype(np.float32)),
    )


def _int32(values: NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
