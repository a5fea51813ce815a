from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data.criteo import MultiHotDay
from dlrm_bench.dlrm.dcnv2.data.file_batches import FileBatches

Writer = Callable[..., dict[str, np.ndarray]]
SAMPLES, SIZE = 40, 6
BAD = [
    ("0", (17, 2), 50, r"\[0.npy\]: id 50 of sample 17 \(feature cat_0\)"),
    ("2", (0, 0), -1, r"\[2.npy\]: id -1 of sample 0 \(feature cat_2\)"),
    ("3", (39, 3), 2**31 - 1, r"\[3.npy\]: id 2147483647 of sample 39"),
    ("3", (39, 3), -(2**31), r"\[3.npy\]: id -2147483648 of sample 39"),
    ("labels", (31, 0), 2, "label of sample 31 is 2,"),
    ("labels", (31, 0), -(2**31), "label of sample 31 is -2147483648,"),
    ("dense", (30, 1), np.nan, "dense feature 1 of sample 30 is nan"),
    ("dense", (30, 0), np.inf, "dense feature 0 of sample 30 is inf"),
]


def batches(path: Path, model: ModelConfig) -> FileBatches:
    """Batches of two days, of which the second one goes half."""
    days = [MultiHotDay(path, day, model) for day in range(2)]
    return FileBatches([(days[0], SAMPLES), (days[1], 20)], model, range(11), 0, 1, SIZE, pin=False)


@pytest.mark.parametrize("day", [0, 1])
@pytest.mark.parametrize(("name", "index", "value", "message"), BAD)
def test_finds_what_the_plain_check_finds(
    tmp_path: Path,
    model: ModelConfig,
    day_writer: Writer,
    day: int,
    name: str,
    index: tuple[int, int],
    value: float,
    message: str,
) -> None:
    """The error of the batch that has the bad value; the batches before it, and those after the last sample of the
    pass, have none."""
    for i in range(2):
        arrays = day_writer(tmp_path, i, SAMPLES, model)
        if i == day:
            arrays[name][index] = value
            np.save(tmp_path / f"day_{i}_{name}.npy", arrays[name])
            np.savez(tmp_path / f"day_{i}_sparse_multi_hot.npz", **{k: a for k, a in arrays.items() if k.isdigit()})
    read = batches(tmp_path, model)
    bad = SAMPLES * day + index[0]
    within = day == 0 or index[0] < 20
    for i in range(len(read)):
        if within and i == bad // SIZE:
            with pytest.raises(ValueError, match=f"day_{day}_.*{message}"):
                read[i]
        else:
            assert read[i].num_valid == min(SIZE, SAMPLES + 20 - i * SIZE)


@given(start=st.integers(0, 11), step=st.integers(1, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
def test_a_slice_holds_the_same_batches(
    tmp_path: Path, model: ModelConfig, day_writer: Writer, start: int, step: int
) -> None:
    for day in range(2):
        day_writer(tmp_path, day, SAMPLES, model, first=SAMPLES * day)
    everything = batches(tmp_path, model)
    some = everything[start::step]
    assert len(some) == len(range(start, 11, step))
    for got, wanted in zip(some, list(everything)[start::step], strict=True):
        assert torch.equal(got.storage[: got.dense.nbytes], wanted.storage[: wanted.dense.nbytes])
        assert torch.equal(got.ids, wanted.ids)
        assert got.num_valid == wanted.num_valid


@pytest.mark.parametrize(("name", "index", "value", "message"), BAD)
def test_raw_ids_are_read_whatever_they_are(
    tmp_path: Path,
    model: ModelConfig,
    day_writer: Writer,
    name: str,
    index: tuple[int, int],
    value: float,
    message: str,
) -> None:
    """Among them the ends of int64; other values are checked."""
    raw, rng, days = replace(model, raw_ids=True), np.random.default_rng(1), []
    ends = np.iinfo(np.int64)
    for i in range(2):
        days.append(day_writer(tmp_path, i, SAMPLES, model, first=SAMPLES * i))
        for feature, hot in enumerate(model.multi_hot_sizes):
            ids = rng.integers(ends.min, ends.max, size=(SAMPLES, hot), endpoint=True)
            ids[0, 0], ids[1, 0] = ends.min, ends.max
            days[i][str(feature)] = ids
        np.savez(tmp_path / f"day_{i}_sparse_multi_hot.npz", **{k: a for k, a in days[i].items() if k.isdigit()})
    read = list(batches(tmp_path, raw))
    for feature in range(len(model.multi_hot_sizes)):
        found = np.concatenate([feature_blocks(batch.ids, model.multi_hot_sizes)[feature] for batch in read])
        np.testing.assert_array_equal(found[:60], np.concatenate([days[0][str(feature)], days[1][str(feature)][:20]]))
        assert not found[60:].any(), "padding is id 0"
    dense = np.concatenate([batch.dense for batch in read])
    np.testing.assert_array_equal(dense[:60], np.concatenate([days[0]["dense"], days[1]["dense"][:20]]))
    if not name.isdigit():
        days[0][name][index] = value
        np.save(tmp_path / f"day_0_{name}.npy", days[0][name])
        with pytest.raises(ValueError, match=f"day_0_.*{message}"):
            list(batches(tmp_path, raw))
