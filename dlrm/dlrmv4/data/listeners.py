"""Made users and what they listen to: the compiled loops behind `generate`.

Every number comes from splitmix64 (Steele, Lea and Flood, OOPSLA 2014) of the seed and a user's or an item's id, so a
user's events are the same whatever is generated beside it. What the constants are chosen for is said, and measured, in
tests/dlrm/dlrmv4/data/test_generate.py; their sources are the statistics published of Yambda.

The teacher: a listen is a listen+ with the probability sigmoid(user's bias + item's and artist's quality + the user's
affinity to the artist + what was chosen by the user rather than by the service + whether the item was heard in the last
few events). All of these are functions of a sample's features, so the probability is the best score a model can have.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.dlrmv4.data.compiled import compiled
from dlrm_bench.dlrm.dlrmv4.data.limits import LIKE, LISTEN

BINS = 1 << 14
"""Number of bins of the teacher's probabilities, for its AUC."""
DAY = 86_400
STEP = 5
"""Timestamps are multiples of it, in seconds."""
GAP = 1_800
"""Seconds without an event that end a session."""
SESSION_EVENTS = 22.0
"""Mean events of a session."""
SAME_TIME = 0.04
"""Share of events without a gap to the previous one; with those whose gap is below a step, 12.5 %."""
LIKE_SHARE, OTHER_SHARE = 0.0185, 0.0103
"""Shares of all events; other is dislike, unlike and undislike."""
RECENT = 8
"""Events among which an item counts as heard again; a third of the repeats are of the last four times as many."""
_NIGHT, _DAYTIME = (2.0, 1.3, 0.9, 0.7, 0.8, 1.4, 2.6, 4.2), (5.2, 5.4, 5.3, 5.2, 5.2, 5.2, 5.2, 5.3)
HOURLY = np.cumsum([*_NIGHT, *_DAYTIME, 5.5, 5.9, 6.1, 6.0, 5.8, 5.4, 4.6, 3.4])
"""Listening up to the end of each hour of the day: a trough at night, a peak at six in the evening."""


class World(NamedTuple):
    """The constants that all users share."""

    seed: int
    start: float
    """Seconds; nobody but the first user has an event before it."""
    end: float
    days: float
    """Days from start to end."""
    min_history: int
    items: int
    item_factor: int
    """Prime to `items`: takes an item's rank by popularity to its id."""
    eval_start: float
    """Seconds, the begin of the last window."""
    zipf: float
    repeats: float
    """Share of listens that are of an item heard before."""
    explores: float
    """Share of listens that are of another item beside one heard before."""


@compiled
def mixed(value: np.uint64) -> np.uint64:
    """splitmix64's finalizer."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(value ^ (value >> np.uint64(31)))


@compiled
def stream(seed: int, purpose: int, key: int) -> NDArray[np.uint64]:
    """Returns a generator's state, [1], for one purpose and one key."""
    state = mixed(np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(purpose + 1))
    return np.full(1, mixed(state + np.uint64(0xD1B54A32D192ED03) * np.uint64(key + 1)), dtype=np.uint64)


@compiled
def uniform(state: NDArray[np.uint64]) -> float:
    """The next number in (0, 1)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    return (float(mixed(state[0]) >> np.uint64(11)) + 0.5) / 9007199254740992.0


@compiled
def normal(state: NDArray[np.uint64]) -> float:
    """The next number of mean 0 and variance 1, by Box and Muller."""
    radius = np.sqrt(-2.0 * np.log(uniform(state)))
    return radius * np.cos(2.0 * np.pi * uniform(state))


@compiled
def quality(seed: int, purpose: int, key: int) -> float:
    """A fixed normal number of a key."""
    return normal(stream(seed, purpose, key))


@compiled
def events_of(seed: int, uid: int, median: float, sigma: float, most: float) -> int:
    """Returns a user's number of events: lognormal, clipped."""
    return int(min(max(1.0, median * np.exp(sigma * normal(stream(seed, 0, uid)))), most))


@compiled
def activity(state: NDArray[np.uint64], days: float) -> tuple[float, float]:
    """A user's first day, and how much of its listening comes early: the exponent of a decay over the days left."""
    first = 0.27 * days * uniform(state) ** 2
    tilt = 1.3 * normal(state)
    return first, tilt if abs(tilt) > 1e-3 else 1e-3


@compiled
def day_of(share: float, first: float, tilt: float, days: float) -> float:
    """The day, with its fraction, by which a user has had this share of its events."""
    return first + (days - first) * (-np.log1p(share * np.expm1(-tilt)) / tilt)


@compiled
def second_of(day: float) -> float:
    """Seconds since the begin: a day's fraction becomes a time of day, by the hours' listening."""
    whole = np.floor(day)
    target = (day - whole) * HOURLY[23]
    hour = int(np.searchsorted(HOURLY, target))
    before = HOURLY[hour - 1] if hour else 0.0
    return DAY * whole + 3_600.0 * (hour + (target - before) / (HOURLY[hour] - before))


@compiled
def times(state: NDArray[np.uint64], world: World, uid: int, gaps: NDArray[np.float64], out: NDArray[np.int64]) -> None:
    """Fills a user's times, ascending; gaps [N] are the seconds that events of a session would like between them."""
    count = len(out)
    first, tilt = activity(state, world.days)
    done = 0
    if uid == 1:  # The first anchor of all, which windows are counted from, comes at a known time.
        done = min(world.min_history + 1, count)
        for i in range(done):
            out[i] = int(world.start * i / world.min_history + 0.5) // STEP * STEP
    lengths = np.empty(count, dtype=np.int64)
    sessions = 0
    rest = count - done
    while rest > 0:
        length = min(rest, 1 + int(-np.log(uniform(state)) * (SESSION_EVENTS - 1)))
        lengths[sessions] = length
        sessions += 1
        rest -= length
    spacing = np.empty(sessions + 1)
    for i in range(sessions + 1):
        spacing[i] = -np.log(uniform(state))
    starts = np.cumsum(spacing)
    starts /= starts[sessions]
    for i in range(sessions):
        starts[i] = max(world.start, second_of(world.start / DAY + day_of(starts[i], first, tilt, world.days)))
    for i in range(sessions):
        begin = starts[i]
        until = starts[i + 1] - GAP - STEP if i + 1 < sessions else world.end - STEP
        wished = gaps[done + 1 : done + lengths[i]].sum()
        factor = min(1.0, max(0.0, until - begin) / max(wished, 1.0))
        moment = begin
        for j in range(done, done + lengths[i]):
            moment += factor * gaps[j] if j > done else 0.0
            out[j] = int(min(moment, world.end - STEP)) // STEP * STEP
        done += lengths[i]
    if uid == 1:
        out[count - 1] = int(world.end) // STEP * STEP - STEP


@compiled
def user_bias(state: NDArray[np.uint64], world: World, count: int, first: float, tilt: float) -> float:
    """Bias of a user's listens to be listens+; those who soon have a full history skip less."""
    early = 0.0
    if count > world.min_history:
        day = day_of(world.min_history / count, first, tilt, world.days)
        early = max(0.0, np.log(0.5 * world.days / max(day, 0.027 * world.days)))
    return 0.68 + 1.7 * early + 1.75 * normal(state)


@compiled
def fill_user(
    world: World,
    uid: int,
    artist_of: NDArray[np.int32],
    item: NDArray[np.int64],
    timestamp: NDArray[np.int64],
    event_type: NDArray[np.int64],
    is_organic: NDArray[np.int8],
    played_ratio: NDArray[np.float32],
    best: NDArray[np.int64],
) -> None:
    """Fills all events of a user, [N] each, and adds its anchors to best [2, 2, BINS]: their number by the teacher's
    probability, in the windows of training and in the last, without and with the label."""
    count = len(item)
    first, tilt = activity(stream(world.seed, 1, uid), world.days)
    state = stream(world.seed, 2, uid)
    bias = user_bias(state, world, count, first, tilt)
    # Who listens more likes a little less of it: so early histories hold about 105 likes.
    likes = min(0.3, 1.06 * LIKE_SHARE * (world.min_history / count) ** 0.1 * np.exp(1.1 * normal(state) - 0.6))
    chosen = 1.0 / (1.0 + np.exp(-0.07 - 0.8 * normal(state)))
    gaps = np.empty(count)
    chances = np.empty(count)
    for i in range(count):
        gaps[i] = 0.0 if uniform(state) < SAME_TIME else -np.log(uniform(state)) * 25.0
        chances[i] = -1.0
        kind = uniform(state)
        is_organic[i] = uniform(state) < chosen
        played_ratio[i] = 0.0
        first_anchor = uid == 1 and i == world.min_history
        if i > 0 and kind < likes + OTHER_SHARE and not first_anchor:
            item[i] = item[i - 1]
            event_type[i] = LIKE if kind < likes else 2 + int(3 * uniform(state))
            continue
        event_type[i] = LISTEN
        item[i] = choose_item(state, world, item, i)
        artist = artist_of[item[i]]
        again = False
        for j in range(max(0, i - RECENT), i):
            again = again or item[j] == item[i]
        affinity = quality(world.seed + 7 * uid, 5, artist)
        logit = bias + 0.4 * quality(world.seed, 3, item[i]) + 0.3 * quality(world.seed, 4, artist) + 0.4 * affinity
        logit += (-0.6 if is_organic[i] else 0.0) + (0.4 if again else 0.0)
        chances[i] = 1.0 / (1.0 + np.exp(-logit))
        listened = uniform(state) < chances[i]
        played_ratio[i] = played(state, listened)
        gaps[i] += 190.0 * (0.7 + 0.6 * uniform(state)) if listened and gaps[i] > 0.0 else 0.0
    times(stream(world.seed, 1, uid), world, uid, gaps, timestamp)
    for i in range(world.min_history, count):
        if event_type[i] == LISTEN:
            last = 1 if timestamp[i] >= world.eval_start else 0
            best[last, 1 if played_ratio[i] >= 50 else 0, min(BINS - 1, int(chances[i] * BINS))] += 1


@compiled
def choose_item(state: NDArray[np.uint64], world: World, item: NDArray[np.int64], i: int) -> int:
    """Returns the item of a user's event i: one heard before, the more likely the more often and lately, another one of
    its artist, whose items have neighbouring ids, or one by Zipf."""
    kind = uniform(state)
    if i > 0 and kind < world.repeats + world.explores:
        back = min(i, 4 * RECENT) if uniform(state) < 0.3 else i
        known = item[i - 1 - int(uniform(state) * back)]
        if kind < world.repeats:
            return known
        return 1 + (known + int(4.0 * uniform(state))) % world.items
    power = 1.0 - world.zipf
    rank = int((1.0 + uniform(state) * ((world.items + 1.0) ** power - 1.0)) ** (1.0 / power)) - 1
    return 1 + (min(rank, world.items - 1) * world.item_factor) % world.items


@compiled
def played(state: NDArray[np.uint64], listened: bool) -> int:
    """Percent of the track: of skips a fifth are 0, of others four fifths are 100."""
    if listened:
        return 100 if uniform(state) < 0.81 else 50 + int(50 * uniform(state))
    return 0 if uniform(state) < 0.2 else 1 + int(49 * uniform(state) ** 1.5)


@compiled
def fill_users(
    world: World,
    first_uid: int,
    starts: NDArray[np.int64],
    artist_of: NDArray[np.int32],
    uid: NDArray[np.int64],
    item: NDArray[np.int64],
    timestamp: NDArray[np.int64],
    event_type: NDArray[np.int64],
    is_organic: NDArray[np.int8],
    played_ratio: NDArray[np.float32],
    best: NDArray[np.int64],
) -> None:
    """Fills the events of users from first_uid on; starts [users + 1] are the offsets of each user's events."""
    for user in range(len(starts) - 1):
        a, b = starts[user], starts[user + 1]
        uid[a:b] = first_uid + user
        columns = (item[a:b], timestamp[a:b], event_type[a:b], is_organic[a:b], played_ratio[a:b])
        fill_user(world, first_uid + user, artist_of, *columns, best)


@compiled
def sizes(seed: int, first_uid: int, median: float, sigma: float, most: float, out: NDArray[np.int64]) -> None:
    """Fills how many events users from first_uid on have; the first of all has the most."""
    for i in range(len(out)):
        out[i] = events_of(seed, first_uid + i, median, sigma, most) if first_uid + i > 1 else int(most)


@compiled
def catalogue(seed: int, purpose: int, values: int, present: float, out: NDArray[np.int32]) -> None:
    """Fills artist or album by item, [items + 1]: blocks of neighbouring items, of lognormal sizes, share one.

    present: share of items that have one; the others, and item 0, get 0.
    """
    total, weight = 0.0, 0.0
    for value in range(1, values + 1):
        total += np.exp(1.3 * quality(seed, purpose, value))
    value = 0
    for item in range(1, len(out)):
        while value < values and weight * (len(out) - 1) <= (item - 1) * total:
            value += 1
            weight += np.exp(1.3 * quality(seed, purpose, value))
        if uniform(stream(seed, purpose + 1, item)) < present:
            out[item] = value
