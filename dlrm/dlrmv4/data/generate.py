"""Generates days of listening like Yambda's, with labels from a known teacher: the reference's cache files.

The directory gets processed_5b/hstu_cache_L*/ with the index of windows, shared_metadata/, and `generated.json`,
written last, with the parameters, counts, and the AUC of the teacher's own probabilities: the best that a model can
reach, apart from chance. With --raw it also gets raw/5b/multi_event.parquet, from which `preprocess` makes the same
cache.

The defaults are Yambda's size: 4.7 billion events, 0.23 TB. Flags --users and --items reduce it; --history scales the
number of events per user and the lengths of histories: 63 gives data for a CPU. With all items and two threads, peak
memory is 0.9 GB (measured); 30 million events take 19 s of CPU time.

Generated data are known to differ from Yambda in these points: 2.2 instead of 2.29 billion anchors; a third instead of
0.4 of all users have an anchor; the last window has 2.9 instead of 2.06 million anchors for a million users; lengths of
histories vary less (their rms is 1.03 times their mean; with at least one full pool and 105 likes, 1.067 is the
maximum).
"""

import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from dlrm_bench.dlrm.dlrmv4.data.cache import Cache, complete_caches
from dlrm_bench.dlrm.dlrmv4.data.cache_writer import CacheWriter, Events
from dlrm_bench.dlrm.dlrmv4.data.item_maps import write_maps
from dlrm_bench.dlrm.dlrmv4.data.limits import POOLS, Limits, Rows
from dlrm_bench.dlrm.dlrmv4.data.listeners import BINS, DAY, STEP, World, catalogue, fill_users, sizes
from dlrm_bench.dlrm.dlrmv4.data.raw_events import RawWriter
from dlrm_bench.dlrm.dlrmv4.data.windows import prepare_windows
from dlrm_bench.dlrm.runtime.command_line import exit_status
from dlrm_bench.dlrm.runtime.parsed import options_of

MANIFEST = "generated.json"
VERSION = 1  # Raised when equal parameters would give other files.
CHUNK_EVENTS = 4_000_000
EVENT_BYTES = 40
START = 60_480
"""Seconds until the first anchor, from which windows count: Yambda's 300 windows end 299.9 days after its begin."""
MOST_DAYS = ((1 << 31) - START) // DAY
LEAST_LAST_DAY = 0.0002
"""More than two steps of time, so that the last window has one."""
MEDIAN_EVENTS, SIGMA, MOST_EVENTS = 2_695.0, 1.129, 27_738.0
"""Events of a user: lognormal with Yambda's median, its mean (4,763) and its most."""

ARTIST_SHARE, ALBUM_SHARE = 9.27 / 9.39, 8.65 / 9.39
"""Shares of Yambda's items with an artist and with an album."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GenerateConfig:
    """Days of listening, made."""

    out: Annotated[Path, tyro.conf.Positional]
    """Directory to write."""
    users: int = 1_000_000
    """Number of users; about a third of them eventually have a full history."""
    items: int = 9_390_623
    """Number of items."""
    artists: int = 1_293_394
    """Number of artists."""
    albums: int = 3_367_691
    """Number of albums."""
    days: int = 300
    """Number of windows of one day; the last window evaluates."""
    last_day: float = 0.05
    """Length of the last window, in days; 0.05 gives it a thousandth of all samples, as in Yambda."""
    history: int = 4086
    """Maximum number of events in a history, at least one of each of three pools, and of a user's events before the
    first anchor; scales events per user."""
    zipf: float = 0.92
    """Zipf exponent of the items' popularity, 0 or more and less than 1."""
    repeats: float = 0.75
    """Share of listens to items that the user has heard before."""
    explores: float = 0.15
    """Share of listens to a new item of an artist heard before; other new items are chosen by popularity."""
    seed: int = 1
    """Equal seeds give equal files."""
    raw: bool = False
    """Also write Yambda's own format, with an additional last day that preprocessing cuts off."""
    threads: int = 2
    """Number of threads that make users; it does not change the files."""

    def __post_init__(self) -> None:
        for name in ("users", "items", "artists", "albums", "history", "threads"):
            least = POOLS if name == "history" else 1
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}: choose {least} or more")
        rows = Rows()
        for name, limit in (
            ("users", rows.uid),
            ("items", rows.item),
            ("artists", rows.artist),
            ("albums", rows.album),
        ):
            if getattr(self, name) >= limit:
                raise ValueError(f"--{name} is {getattr(self, name)}: the benchmark's table has {limit} rows")
        if not (2 <= self.days <= MOST_DAYS and LEAST_LAST_DAY <= self.last_day <= 1):
            raise ValueError(
                f"--days {self.days} --last-day {self.last_day}: choose 2 to {MOST_DAYS} days, as times fit 31 bits, "
                f"the last {LEAST_LAST_DAY} to 1 long"
            )
        if not (0 <= self.zipf < 1 and 0 <= self.seed < 1 << 62):
            raise ValueError(
                f"--zipf {self.zipf} --seed {self.seed}: the exponent lies in [0, 1), the seed in [0, 2^62)"
            )
        if min(self.repeats, self.explores) < 0 or self.repeats + self.explores > 1:
            raise ValueError(f"--repeats {self.repeats} --explores {self.explores}: these are shares, together up to 1")

    @property
    def limits(self) -> Limits:
        """Limits of the cache: the benchmark's, or all in proportion to the history."""
        return Limits.scaled(self.history)


@dataclass(kw_only=True, slots=True, frozen=True)
class Generated:
    """The content of generated.json."""

    parameters: dict[str, Any]
    users: int
    events: int
    train_anchors: int
    """Anchors of all windows but the last."""
    eval_anchors: int
    """Anchors of the last window."""
    windows: int
    best_auc: float
    """AUC of the teacher's probabilities on the anchors of the last window."""
    best_train_auc: float
    """The same on all other anchors."""


def smoke_config(out: Path) -> GenerateConfig:
    """Data for a run to its target on two CPU cores: 0.3 million events, histories of up to 63."""
    return GenerateConfig(
        out=out, users=6_000, items=4_000, artists=500, albums=1_500, days=20, last_day=1.0, history=63
    )


def generate(config: GenerateConfig) -> tuple[Generated, bool]:
    """Writes the data unless they exist; returns their description, and whether they were written.

    ValueError where OUT has other data or too little room, or cannot be written, and where no user has a sample in the
    last window.
    """
    parameters = _parameters(config)
    if known := read_generated(config.out):
        if known.parameters == parameters:
            return known, False
        name = next(name for name in parameters if parameters[name] != known.parameters.get(name))
        raise ValueError(
            f"{config.out} was generated with {name} {known.parameters.get(name)}, not {parameters[name]}: choose "
            "another directory, or delete it"
        )
    for folder in complete_caches(config.out):  # of any history: they share the maps
        raise ValueError(f"{folder} holds a complete cache: delete it, or choose another directory")
    config.out.mkdir(parents=True, exist_ok=True)
    try:
        return _write(config, parameters), True
    except OSError as error:
        free = shutil.disk_usage(config.out).free / 1e9
        raise ValueError(
            f"{config.out} cannot be written ({error}; {free:.1f} GB are free): make room, or choose another directory"
        ) from error


def _write(config: GenerateConfig, parameters: dict[str, Any]) -> Generated:
    world = make_world(config)
    counts = user_events(config)
    _require_space(config, int(counts.sum()))
    artist, album = (np.zeros(config.items + 1, dtype=np.int32) for _ in range(2))
    catalogue(config.seed, 6, config.artists, ARTIST_SHARE, artist)
    catalogue(config.seed, 8, config.albums, ALBUM_SHARE, album)
    best = np.zeros((2, 2, BINS), dtype=np.int64)
    folder = config.out / "processed_5b" / config.limits.cache_name
    with CacheWriter(folder, config.limits) as writer, RawWriter(config.out, config.raw, int(world.end)) as raw:
        write_maps(config.out, artist, album)  # here: the maps of another writer, or of a complete cache, stay
        for events, counted in _chunks(config, world, counts, artist):
            writer.append(events)
            raw.append(events)
            best += counted
        if not best[1].sum():  # before the cache is complete
            raise ValueError(
                f"{config.out}: no user has a sample in the last window: choose more --users, a longer --last-day, or "
                "another --seed"
            )
    index = prepare_windows(Cache.open(folder))
    assert len(index) == config.days, (len(index), config.days)
    generated = Generated(
        parameters=parameters,
        users=config.users,
        events=int(counts.sum()),
        train_anchors=int(index.windows[:-1, 1].sum()),
        eval_anchors=index.anchors_of(len(index) - 1),
        windows=len(index),
        best_auc=auc(best[1, 0], best[1, 1]),
        best_train_auc=auc(best[0, 0], best[0, 1]),
    )
    assert (generated.train_anchors, generated.eval_anchors) == (best[0].sum(), best[1].sum())
    partial_path = config.out / f"{MANIFEST}.partial"
    partial_path.write_text(json.dumps(asdict(generated), indent=1) + "\n")
    os.replace(partial_path, config.out / MANIFEST)
    return generated


def read_generated(root: Path) -> Generated | None:
    """Returns the content of a directory's generated.json, None without one; ValueError if it cannot be read."""
    path = root / MANIFEST
    if not path.exists():
        return None
    try:
        return Generated(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): generate the data again elsewhere") from error


def make_world(config: GenerateConfig) -> World:
    """Returns the constants that all users of a data set share."""
    start = START
    end = start + int((config.days - 1 + config.last_day) * DAY) // STEP * STEP
    factor = int(config.items * 0.6180339887) | 1
    while math.gcd(factor, config.items) != 1:
        factor += 2
    return World(
        seed=config.seed,
        start=start,
        end=end,
        days=(end - start) / DAY,
        min_history=config.limits.min_history,
        items=config.items,
        item_factor=factor,
        eval_start=start + (config.days - 1) * DAY,
        zipf=config.zipf,
        repeats=config.repeats,
        explores=config.explores,
    )


def user_events(config: GenerateConfig) -> NDArray[np.int64]:
    """Events of each user, from uid 1 on; the first has the most."""
    scale = config.history / Limits().history
    counts = np.empty(config.users, dtype=np.int64)
    most = max(MOST_EVENTS * scale, config.limits.min_history + 3.0)
    sizes(config.seed, 1, MEDIAN_EVENTS * scale, SIGMA, most, counts)
    return counts


def auc(negatives: NDArray[np.int64], positives: NDArray[np.int64]) -> float:
    """Returns the area under the ROC curve of scores in ascending bins; a half where there is one class alone."""
    pairs = float(negatives.sum()) * float(positives.sum())
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else 0.5


def _parameters(config: GenerateConfig) -> dict[str, Any]:
    """Returns the parameters that determine the files' content."""
    left_out = ("out", "threads")
    names = [field.name for field in fields(config) if field.name not in left_out]
    return {"version": VERSION, **{name: getattr(config, name) for name in names}}


def _chunks(
    config: GenerateConfig, world: World, counts: NDArray[np.int64], artist: NDArray[np.int32]
) -> Iterator[tuple[Events, NDArray[np.int64]]]:
    """Users in turn, some millions of events at a time, made by threads; with their counts of probabilities."""
    ends = np.cumsum(counts)
    bounds = [0]
    while bounds[-1] < len(counts):
        before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(ends, before + CHUNK_EVENTS, side="right"))))
    parts = [(first, counts[first:end]) for first, end in itertools.pairwise(bounds)]
    make = partial(_make, world, artist)
    with ThreadPoolExecutor(config.threads) as pool:
        waiting = [pool.submit(make, *part) for part in parts[: config.threads]]
        for number in range(len(parts)):
            yield waiting.pop(0).result()
            if number + config.threads < len(parts):
                waiting.append(pool.submit(make, *parts[number + config.threads]))


def _make(
    world: World, artist: NDArray[np.int32], first: int, counts: NDArray[np.int64]
) -> tuple[Events, NDArray[np.int64]]:
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    total = int(starts[-1])
    events = Events(
        uid=np.empty(total, dtype=np.int64),
        item=np.empty(total, dtype=np.int64),
        timestamp=np.empty(total, dtype=np.int64),
        event_type=np.empty(total, dtype=np.int64),
        is_organic=np.empty(total, dtype=np.int8),
        played_ratio=np.empty(total, dtype=np.float32),
    )
    best = np.zeros((2, 2, BINS), dtype=np.int64)
    columns = (events.uid, events.item, events.timestamp, events.event_type, events.is_organic, events.played_ratio)
    fill_users(world, first + 1, starts, artist, *columns, best)
    return events, best


def _require_space(config: GenerateConfig, events: int) -> None:
    needed = events * (EVENT_BYTES + 24 + (20 if config.raw else 0)) + 16 * config.items
    free = shutil.disk_usage(config.out).free
    if needed > free:
        raise ValueError(
            f"{config.out} has {free / 1e9:.1f} GB free, and up to {needed / 1e9:.1f} GB are needed for "
            f"{events / 1e6:.1f} million events: make room, or choose fewer --users"
        )


def main(args: Sequence[str] | None = None, default: GenerateConfig | None = None) -> int:
    """Command line entry; returns the exit status. default: values for flags that are not given."""
    return exit_status(lambda: _run(args, default))


def _run(args: Sequence[str] | None, default: GenerateConfig | None) -> int:
    words: dict[str, Any] = {} if default is None else {"default": default}
    config = options_of(GenerateConfig, args, "data generate", __doc__, **words)
    generated, written = generate(config)
    print(
        f"{config.out}: {generated.events} events of {generated.users} users, {generated.train_anchors} samples of "
        f"training, {generated.eval_anchors} of evaluation, best AUC {generated.best_auc:.4f}"
        + ("" if written else " (was there already)")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
