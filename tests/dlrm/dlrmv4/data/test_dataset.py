"""Windows of a made cache as the training loop reads them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_bench.bench.checkpoints.saved_state import _check_data
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dlrmv4.config import DataConfig
from dlrm_bench.dlrm.dlrmv4.data.builder import BatchBuilder
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache, find_cache
from dlrm_bench.dlrm.dlrmv4.data.dataset import EventDataset
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, read_generated, smoke_config
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits, Rows
from dlrm_bench.dlrm.dlrmv4.data.packed import LABEL, Packed
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex
from dlrm_bench.dlrm.dlrmv4.parts import batch_bytes, data_content, empty_batch, open_data
from dlrm_bench.dlrm.dlrmv4.presets import training
from tests.dlrm.dlrmv4.data.made import random_cache

SMOKE = training("smoke-dlrmv4")
WORLD, BATCH = 2, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    generate(replace(smoke_config(folder), users=400, days=5))
    return folder


def opened(folder: Path, **changes: object) -> EventDataset:
    return EventDataset(replace(SMOKE.data, path=folder, **changes), SMOKE.model)  # type: ignore[arg-type]


def assert_same(found: Packed, expected: Packed) -> None:
    """Between the parts of a buffer are bytes that mean nothing."""
    for part in ("samples", "item", "timestamp", "action"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part


def test_ranks_stride_the_reference_s_order(folder: Path) -> None:
    """Global batch k of a window is k * GBS to (k + 1) * GBS of its anchors by user and time; rank r has every
    world_size-th from the r-th on; what fills no global batch is left out."""
    cache = Cache.open(find_cache(folder))
    index, times = WindowIndex.open(cache), cache.anchor_timestamp
    builder = BatchBuilder(cache, ItemMaps.open(folder), Rows(*SMOKE.model.rows))
    dataset = opened(folder)
    ranks = [dataset.train_batches(rank, WORLD, BATCH) for rank in range(WORLD)]
    step = 0
    for window in range(len(index) - 1):
        start = times.min() + window * 86_400
        of_window = np.flatnonzero((times >= start) & (times < start + 86_400))
        for k in range(len(of_window) // (WORLD * BATCH)):
            of_batch = of_window[k * WORLD * BATCH : (k + 1) * WORLD * BATCH]
            if k % 5 == 0:
                for rank in range(WORLD):
                    expected = builder.build(of_batch[rank::WORLD])
                    found = ranks[rank][step]
                    assert found.num_valid == BATCH
                    assert_same(found.packed, expected)
            step += 1
    assert step == len(ranks[0]) == len(ranks[1]) > 20


def test_counts_are_the_generators(folder: Path) -> None:
    generated = read_generated(folder)
    assert generated is not None
    dataset = opened(folder)
    assert (dataset.train_samples, dataset.eval_samples) == (generated.train_anchors, generated.eval_anchors)
    assert dataset.best_auc == generated.best_auc
    fewer = opened(folder, train_windows=2)
    assert fewer.train_samples == generated.train_anchors, "evaluations of fewer windows come as often as of all"
    assert len(fewer.train_batches(0, WORLD, BATCH)) < len(dataset.train_batches(0, WORLD, BATCH))


def test_a_run_goes_on_where_another_stopped(folder: Path) -> None:
    batches = opened(folder).train_batches(1, WORLD, BATCH)
    assert_same(batches[7:][0].packed, batches[7].packed)
    assert len(batches[7:]) == len(batches) - 7


@pytest.mark.parametrize("batch", [16, 700])
def test_an_evaluation_of_every_sample_or_of_whole_batches(folder: Path, batch: int) -> None:
    """As many batches on every rank; each sample once."""
    cache = Cache.open(find_cache(folder))
    index = WindowIndex.open(cache)
    of_window = index.select(len(index) - 1, np.arange(index.anchors_of(len(index) - 1)))
    labels = cache.is_listen_plus[cache.positions[of_window]]
    total = len(labels)
    whole = total // (WORLD * batch) * WORLD * batch
    for drop, counted in ((True, whole), (False, total)):
        dataset = opened(folder, drop_last_evaluation=drop)
        if counted == 0:
            with pytest.raises(ValueError, match="do not fill one global batch of 2 \\* 700"):
                dataset.eval_batches(0, WORLD, batch)
            continue
        ranks = [dataset.eval_batches(rank, WORLD, batch) for rank in range(WORLD)]
        assert len(ranks[0]) == len(ranks[1])
        found = np.full(counted, -1)
        for rank, batches in enumerate(ranks):
            for step, of_step in enumerate(batches):
                assert of_step.packed.layout.samples == batch
                places = (step * batch + np.arange(of_step.num_valid)) * WORLD + rank
                found[places] = of_step.packed.samples[LABEL, : of_step.num_valid].numpy()
        assert found.tolist() == labels[:counted].astype(int).tolist()
    assert whole < total


def test_a_tail_is_padded_with_the_rank_s_own_sample(folder: Path) -> None:
    """No other history is longer than those that count; a rank without a sample of the tail repeats the first."""
    cache = Cache.open(find_cache(folder))
    index = WindowIndex.open(cache)
    window = len(index) - 1
    builder = BatchBuilder(cache, ItemMaps.open(folder), Rows(*SMOKE.model.rows))
    total = index.anchors_of(window)
    batch = next(size for size in range(7, total) if 0 < total % (4 * size) < 4)  # the last rank has no sample of it
    data = opened(folder, drop_last_evaluation=False)
    for rank in range(4):
        own = np.arange(total // (4 * batch) * 4 * batch + rank, total, 4)
        repeated = np.full(batch - len(own), own[-1] if len(own) else 0)
        last = data.eval_batches(rank, 4, batch)[-1]
        assert last.num_valid == len(own) == (rank < total % (4 * batch))
        assert_same(last.packed, builder.build(index.select(window, np.concatenate([own, repeated]))))


@pytest.mark.slow
def test_nothing_is_left_to_compile_once_data_are_open(folder: Path) -> None:
    """numba compiles for seconds, which reader threads would otherwise do within the clock of a run."""
    program = f"""
from dataclasses import replace
from pathlib import Path
from dlrm_bench.dlrm.dlrmv4.data import builder, windows
from dlrm_bench.dlrm.dlrmv4.parts import open_data
from dlrm_bench.dlrm.dlrmv4.presets import training
config = training("smoke-dlrmv4")
data = open_data(replace(config, data=replace(config.data, path=Path({str(folder)!r}), deal="users")))
loops = (builder.collect, builder._fill_events, builder._fill_samples, builder._gather, windows._select)
before = [list(loop.signatures) for loop in loops]
assert all(before), before
data.train_batches(0, 2, 16)[3]
data.eval_batches(1, 2, 16)[-1]
assert before == [list(loop.signatures) for loop in loops]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_bad_input_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--data\.path .*nowhere .* generate a small data set"):
        opened(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"histories of 63 events, and --model\.max-history is 99"):
        EventDataset(replace(SMOKE.data, path=folder), replace(SMOKE.model, max_history=99))
    with pytest.raises(
        ValueError, match=r"--data\.train-windows is 9: .* has 4 training windows.*: lower it or leave it out"
    ):
        opened(folder, train_windows=9)
    with pytest.raises(ValueError, match="table item_id has 100 rows"):
        EventDataset(DataConfig(path=folder), replace(SMOKE.model, event_rows=(100, 501, 1501)))
    with monkeypatch.context() as patch:
        patch.setattr(WindowIndex, "__len__", lambda index: 1)
        with pytest.raises(ValueError, match=r"has one window.* name data of more days \(--data\.path"):
            opened(folder)
    with pytest.raises(ValueError, match="none of 4 windows has the 2 \\* 100000 samples"):
        opened(folder).train_batches(0, WORLD, 100_000)


@pytest.mark.parametrize("history", [1, 2])
def test_histories_that_exceed_the_longest_are_refused(tmp_path: Path, history: int) -> None:
    """Of three pools of one event each; attention would leave a candidate's row as it finds it."""
    limits = Limits(history=history, min_history=history, window_seconds=20_000)
    random_cache(tmp_path / "processed_5b", limits, users=20, events=30)
    with pytest.raises(ValueError, match=rf"up to 3 events, .* --model\.max-history is {history}: .* --history 3 or"):
        EventDataset(replace(SMOKE.data, path=tmp_path), replace(SMOKE.model, max_history=history))


def test_parts(folder: Path) -> None:
    config = replace(SMOKE, data=replace(SMOKE.data, path=folder))
    batches = open_data(config).train_batches(0, WORLD, config.local_batch_size)
    assert max(batch.packed.layout.end for batch in batches) <= batch_bytes(config)
    assert empty_batch(config, pin=False).packed.layout.samples == config.local_batch_size
    content = data_content(config)
    assert {"flat_uid.npy", "album_item_mapping.parquet"} < content.keys()
    assert content == data_content(config)
    assert {"positions_L63.npy", "anchor_ts_L63.npy", "store_meta.json"} < content.keys()
    assert {"ranges_L63_86400s.npy", "windows_L63_86400s.npy"} < content.keys()


@pytest.mark.parametrize("name", ["positions_L63.npy", "ranges_L63_86400s.npy", "store_meta.json"])
def test_a_checkpoint_is_resumed_with_its_own_anchors_and_windows(folder: Path, tmp_path: Path, name: str) -> None:
    """One of an earlier version, which knows neither, is resumed too."""
    config = replace(preset("smoke-dlrmv4"), data=replace(SMOKE.data, path=folder))
    saved = data_content(config)
    _check_data(tmp_path, saved, config)
    _check_data(tmp_path, {known: of for known, of in saved.items() if not of.get("added")}, config)
    with pytest.raises(ValueError, match=f"{name} has another content"):
        _check_data(tmp_path, {**saved, name: {"sample": "another", "blake2b": None}}, config)
    with pytest.raises(ValueError, match="has another content"):
        _check_data(tmp_path, {}, config)
