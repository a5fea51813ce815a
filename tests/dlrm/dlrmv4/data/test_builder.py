"""Built batches, expanded, equal the plain samples."""

import dataclasses
import os
import signal

import numpy as np
import pytest
import torch

from dlrm_bench.bench.instruments.abort import AbortWatch
from dlrm_bench.dlrm.data.loader import Prefetcher
from dlrm_bench.dlrm.dlrmv4.data import plain
from dlrm_bench.dlrm.dlrmv4.data.builder import BatchBuilder
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache
from dlrm_bench.dlrm.dlrmv4.data.collect import NO_ROOM, collect
from dlrm_bench.dlrm.dlrmv4.data.deal import RankSamples
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits, Rows
from dlrm_bench.dlrm.dlrmv4.data.order import Order
from dlrm_bench.dlrm.dlrmv4.data.packed import LENGTH, PackedLayout, expand
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex, prepare_windows
from dlrm_bench.dlrm.dlrmv4.samples import Samples
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.dlrm.dlrmv4.data.made import ITEMS, assert_equal, random_cache, random_maps
from tests.launched import fork, wait

LIMITS = [
    Limits(history=9, min_history=9, scan=30, window_seconds=20_000),
    Limits(history=30, min_history=0, scan=25, window_seconds=50_000),  # some histories are empty
    Limits(history=3, min_history=5, scan=10_000, window_seconds=20_000),
    Limits(history=300, min_history=40, scan=200, window_seconds=10_000),
    Limits(history=1, min_history=1, scan=1, window_seconds=30_000),
]


def expanded(builder, maps, numbers):
    return expand(builder.build(numbers), torch.from_numpy(maps.artist), torch.from_numpy(maps.album))


def test_the_references_samples(cache, maps):
    numbers = np.arange(len(cache.positions))
    assert_equal(expanded(BatchBuilder(cache, maps), maps, numbers), plain.samples(cache, maps, Rows(), numbers))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_steps_of_every_rank_equal_the_plain_samples(tmp_path, limits, seed):
    cache, maps, rows = random_cache(tmp_path, limits, users=40, events=200, seed=seed), random_maps(), Rows()
    builder = BatchBuilder(cache, maps)
    index = prepare_windows(cache)
    order = Order(index, 0, len(index), 2, 13)
    for rank in range(2):
        with Prefetcher(range(1, len(order)), RankSamples(builder, order, rank).build, 4, 2) as batches:
            seen = list(batches)
        assert len(seen) == len(order) - 1 > 2
        for step, packed in enumerate(seen, 1):
            found = expand(packed, torch.from_numpy(maps.artist), torch.from_numpy(maps.album))
            assert_equal(found, plain.samples(cache, maps, rows, order.batch(step, rank)))
            assert packed.longest == found.lengths.max()


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_anchors_in_any_order(tmp_path, limits):
    cache, maps = random_cache(tmp_path, limits, users=6, events=100), random_maps()
    numbers = np.random.default_rng(3).choice(len(cache.positions), 60)
    assert_equal(expanded(BatchBuilder(cache, maps), maps, numbers), plain.samples(cache, maps, Rows(), numbers))


def test_a_history_that_slides_needs_room_for_every_event_between_two_anchors(tmp_path):
    """The loop writes to memory without a check of bounds."""
    limits = Limits(history=9, min_history=9, scan=10_000, window_seconds=20_000)
    cache = random_cache(tmp_path, limits, users=40, events=200)
    anchors = cache.positions[cache.uid[cache.positions] == cache.uid[cache.positions[0]]][[0, -1]]
    flags = (cache.is_listen_plus, cache.is_like, cache.is_skip)

    def collected(room: int) -> int:
        events, actions = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.uint8)
        samples = np.zeros((LENGTH + 1, 2), dtype=np.int32)
        columns = cache.uid, cache.user_start, *flags
        return collect(anchors, *columns, limits.pool, limits.scan, events, actions, samples)[0]

    alone = np.zeros((LENGTH + 1, 1), dtype=np.int32)
    scratch = np.zeros(limits.history, dtype=np.int64), np.zeros(limits.history, dtype=np.uint8)
    first, _ = collect(anchors[:1], cache.uid, cache.user_start, *flags, limits.pool, limits.scan, *scratch, alone)
    needed = first + int(anchors[1] - anchors[0])
    assert needed > limits.history
    assert collected(needed) > first
    assert collected(needed - 1) == NO_ROOM


def test_neighbours_share_their_events(tmp_path):
    limits = Limits(history=60, min_history=60, scan=500, window_seconds=10**6)
    cache, maps = random_cache(tmp_path, limits, users=8, events=2_000), random_maps()
    numbers = np.arange(len(cache.positions))
    packed = BatchBuilder(cache, maps).build(numbers)
    users = len(np.unique(cache.uid[cache.positions]))
    assert packed.layout.events <= len(cache)
    assert packed.layout.events + users * 60 < packed.tokens / 4


def test_scratch_memory_grows(tmp_path):
    limits = Limits(history=60, min_history=60, scan=500, window_seconds=10**6)
    cache, maps = random_cache(tmp_path, limits, users=8, events=2_000), random_maps()
    builder, numbers = BatchBuilder(cache, maps), np.arange(len(cache.positions))
    builder._make_room(1)
    assert_equal(expanded(builder, maps, numbers), plain.samples(cache, maps, Rows(), numbers))


@pytest.mark.parametrize(
    ("column", "value"), [("item", ITEMS), ("item", -1), ("timestamp", 1 << 31), ("timestamp", -5)]
)
@pytest.mark.parametrize("of_anchor", [True, False])
def test_values_that_cannot_be_are_named(cache, maps, column, value, of_anchor):
    changed = np.array(getattr(cache, column))
    event = int(cache.positions[3]) - (not of_anchor)
    changed[event] = value
    broken = dataclasses.replace(cache, **{column: changed})
    with pytest.raises(ValueError, match=f"event {event} has item {broken.item[event]}"):
        BatchBuilder(broken, maps).build(np.array([3]))


@pytest.mark.parametrize("numbers", [[3], [3, 5]])
def test_events_of_two_pools_are_named(cache, maps, numbers):
    like = np.array(cache.is_like)
    event = int(cache.positions[numbers[-1]]) - 1
    like[event] = True
    plus = np.array(cache.is_listen_plus)
    plus[event] = True
    broken = dataclasses.replace(cache, is_like=like, is_listen_plus=plus)
    with pytest.raises(ValueError, match=f"event {event} is of more than one"):
        BatchBuilder(broken, maps).build(np.array(numbers))


@pytest.mark.parametrize("event", [-1, 10**9])
def test_an_anchor_that_is_no_event_is_named(cache, maps, event):
    positions = np.array(cache.positions)
    positions[3] = event
    broken = dataclasses.replace(cache, positions=positions)
    with pytest.raises(ValueError, match=rf"positions_L9\.npy names an event outside of 0 to {len(cache) - 1}"):
        BatchBuilder(broken, maps).build(np.array([2, 3]))


def reads_cut_short(folder, file):
    """Builds a batch of 64 samples from files of which somebody cuts one short."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    cache = Cache.open(folder)
    index, builder = WindowIndex.open(cache), BatchBuilder(cache, random_maps())
    with AbortWatch(ranks, (folder / "closed").touch):
        os.truncate(file, 0)
        numbers = index.select(0, np.arange(64)) if file.name.startswith("ranges") else np.arange(64)
        builder.users_and_lengths(numbers)
    return 0


@pytest.mark.parametrize("name", ["ranges", "positions", "flat_uid"])
def test_a_mapped_file_that_is_cut_short(tmp_path, name):
    """SIGBUS repeats in the thread that reads it; the thread that ends the rank can run only without Python's lock."""
    limits = Limits(history=9, min_history=9, window_seconds=10**6)
    cache = random_cache(tmp_path, limits, users=8, events=100)
    prepare_windows(cache)
    assert len(cache.positions) >= 64
    (file,) = cache.folder.glob(f"{name}*.npy")
    ended = wait(fork(1, tmp_path, reads_cut_short, cache.folder, file), tmp_path, 60)
    assert ended.statuses == [128 + signal.SIGBUS]
    assert f"rank 0: stopped by SIGBUS: {file} is truncated, it has 0 bytes" in ended.outputs[0]
    assert (cache.folder / "closed").exists()


def test_tables_too_small_are_named(cache, maps):
    with pytest.raises(ValueError, match=r"table uid has 12 rows: .* \(--model\.context-rows\)"):
        BatchBuilder(cache, maps, Rows(uid=12))
    with pytest.raises(ValueError, match=r"table item_id has 59 rows: .* \(--model\.event-rows\)"):
        BatchBuilder(cache, maps, Rows(item=59))
    BatchBuilder(cache, maps, Rows(uid=13, item=60))


@pytest.mark.gpu
def test_pinned_batches_arrive_on_the_device(cache, maps):
    numbers, device = np.arange(len(cache.positions)), torch.device("cuda")
    packed = BatchBuilder(cache, maps, pin=True).build(numbers)
    assert packed.storage.is_pinned()
    columns = (torch.from_numpy(column).to(device) for column in (maps.artist, maps.album))
    found, expected = expand(packed.to(device), *columns), plain.samples(cache, maps, Rows(), numbers)
    for name in Samples.__dataclass_fields__:
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


def test_layout_has_no_overlaps():
    layout = PackedLayout(1_024, 300_001)
    assert layout.item_start >= 1_024 * 18 * 4
    assert layout.timestamp_start >= layout.item_start + 4 * 300_001
    assert layout.action_start >= layout.timestamp_start + 4 * 300_001
    assert layout.end == layout.action_start + 300_001
