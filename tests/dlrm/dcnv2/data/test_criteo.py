from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.data.distributions import raw_ids
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data.criteo import Day, MultiHotDay, OneHotDay, write_multi_hot
from dlrm_bench.dlrm.dcnv2.data.expansion import open_expansion_tables

Writer = Callable[..., dict[str, np.ndarray]]
SAMPLES = 40


@pytest.fixture
def arrays(tmp_path: Path, model: ModelConfig, day_writer: Writer) -> dict[str, np.ndarray]:
    return day_writer(tmp_path, 0, SAMPLES, model)


def read(day: Day, model: ModelConfig, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    of_ids = [np.dtype(np.int64 if model.raw_ids else np.int32)] * len(model.multi_hot_sizes)
    dtypes = [np.dtype(np.float32), np.dtype(np.int32), *of_ids]
    columns = (model.dense_in_features, 1, *model.multi_hot_sizes)
    sizes = [of.itemsize * (stop - start) * width for of, width in zip(dtypes, columns, strict=True)]
    memory = np.empty(sum(sizes), np.uint8)
    day.read(start, stop, memory, np.cumsum(sizes) - sizes)
    parts = zip(np.split(memory, np.cumsum(sizes)[:-1]), dtypes, strict=True)
    dense, labels, *ids = (part.view(of).reshape(stop - start, -1) for part, of in parts)
    labels = labels[:, 0]
    day.check_values(start, dense, labels, ids)
    return dense, labels, ids


def open_one_hot(path: Path, model: ModelConfig) -> OneHotDay:
    day = OneHotDay(path, 0, model)
    day.tables = open_expansion_tables(path, model.rows, model.multi_hot_sizes)
    return day


def save_members(path: Path, arrays: dict[str, np.ndarray], **changed: np.ndarray) -> None:
    members = {name: array for name, array in arrays.items() if name.isdigit()} | changed
    np.savez(path / "day_0_sparse_multi_hot.npz", **members)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(0, SAMPLES), (0, 1), (13, 29), (SAMPLES - 1, SAMPLES)])
def test_reads_what_numpy_wrote(
    tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray], one_hot: bool, start: int, stop: int
) -> None:
    day = open_one_hot(tmp_path, model) if one_hot else MultiHotDay(tmp_path, 0, model)
    assert day.num_samples == SAMPLES
    dense, labels, ids = read(day, model, start, stop)
    np.testing.assert_array_equal(dense, arrays["dense"][start:stop])
    np.testing.assert_array_equal(labels, arrays["labels"][start:stop, 0])
    for feature, block in enumerate(ids):
        np.testing.assert_array_equal(block, arrays[str(feature)][start:stop])


def test_writes_what_numpy_reads(
    tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm_bench.dlrm.dcnv2.data.criteo.WRITE_CHUNK", 7)
    tables = open_expansion_tables(tmp_path, model.rows, model.multi_hot_sizes)
    write_multi_hot(tmp_path / "written.npz", arrays["one_hot"], model.multi_hot_sizes, tables)
    with np.load(tmp_path / "written.npz") as written:
        assert len(written.files) == model.num_features
        for name in written.files:
            np.testing.assert_array_equal(written[name], arrays[name])


def test_one_hot_ids_wrap_around_the_table_as_in_the_reference(
    tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray]
) -> None:
    rows = np.array(model.rows, np.int32)
    np.save(tmp_path / "day_0_sparse.npy", arrays["one_hot"] + 3 * rows)
    _, _, ids = read(open_one_hot(tmp_path, model), model, 0, SAMPLES)
    for feature, block in enumerate(ids):
        np.testing.assert_array_equal(block, arrays[str(feature)])


@pytest.mark.parametrize("name", ["dense.npy", "labels.npy", "sparse_multi_hot.npz"])
def test_a_missing_file(tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray], name: str) -> None:
    (tmp_path / f"day_0_{name}").unlink()
    with pytest.raises(ValueError, match=f"day_0_{name} does not exist.*--data.train-days"):
        MultiHotDay(tmp_path, 0, model)


def test_a_loop_of_links_is_not_missing(tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    for name in ("day_0_dense.npy", "day_0_sparse_multi_hot.npz"):
        path = tmp_path / name
        kept = path.read_bytes()
        path.unlink()
        path.symlink_to(name)
        with pytest.raises(ValueError, match=rf"{name} cannot be reached \(Too many levels of symbolic links\)"):
            MultiHotDay(tmp_path, 0, model)
        path.unlink()
        path.write_bytes(kept)


def test_a_missing_one_hot_file(tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    (tmp_path / "day_0_sparse.npy").unlink()
    with pytest.raises(ValueError, match=r"day_0_sparse.npy does not exist.*--data.source"):
        OneHotDay(tmp_path, 0, model)


def test_compressed_members(tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    members = {name: array for name, array in arrays.items() if name.isdigit()}
    np.savez_compressed(tmp_path / "day_0_sparse_multi_hot.npz", **members)
    with pytest.raises(ValueError, match=r"npz\[0.npy\] is compressed.*numpy.savez "):
        MultiHotDay(tmp_path, 0, model)


def test_a_truncated_zip(tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    path = tmp_path / "day_0_sparse_multi_hot.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="npz is not a complete zip file"):
        MultiHotDay(tmp_path, 0, model)


def test_a_damaged_directory_of_a_zip(tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    path = tmp_path / "day_0_sparse_multi_hot.npz"
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 6] = 255  # the version that is needed to extract a member
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"npz is not a complete zip file \(zip file version 25.5\)"):
        MultiHotDay(tmp_path, 0, model)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"4": np.zeros((SAMPLES, 1), np.int32)}, r"expected the 4 members.*found 5 \(4.npy unexpected\).*--model"),
        ({"3": np.zeros((SAMPLES, 5), np.int32)}, r"\[3.npy\]: expected shape \(N, 4\).*--model.multi-hot-sizes"),
        (
            {"1": np.zeros((SAMPLES, 1), np.int64)},
            r"\[1.npy\]: expected dtype int32, found int64: .*add --model.raw-ids",
        ),
        ({"2": np.zeros((SAMPLES - 1, 2), np.int32)}, r"\[2.npy\] has 39 samples, but day_0_dense.npy has 40"),
    ],
)
def test_members_unlike_the_model(
    tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray], changed: dict[str, np.ndarray], message: str
) -> None:
    save_members(tmp_path, arrays, **changed)
    with pytest.raises(ValueError, match=message):
        MultiHotDay(tmp_path, 0, model)


def test_a_missing_member(tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    del arrays["2"]
    save_members(tmp_path, arrays)
    with pytest.raises(ValueError, match=r"found 3 \(2.npy missing\)"):
        MultiHotDay(tmp_path, 0, model)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("dense", np.zeros((SAMPLES, 3), np.float32), r"expected shape \(N, 2\).*--model.dense-in-features"),
        ("dense", np.zeros((SAMPLES, 2), np.float64), "expected dtype float32, found float64"),
        ("labels", np.zeros(SAMPLES, np.int32), r"expected shape \(N, 1\)"),
        ("labels", np.zeros((SAMPLES + 1, 1), np.int32), "has 41 samples, but day_0_dense.npy has 40"),
        ("sparse", np.zeros((SAMPLES, 3), np.int32), r"expected shape \(N, 4\).*--model.num-embeddings"),
        ("sparse", np.zeros((SAMPLES + 1, 4), np.int32), "has 41 samples, but day_0_dense.npy has 40"),
    ],
)
def test_arrays_unlike_the_model(
    tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray], name: str, array: np.ndarray, message: str
) -> None:
    np.save(tmp_path / f"day_0_{name}.npy", array)
    with pytest.raises(ValueError, match=f"day_0_{name}.npy.*{message}"):
        OneHotDay(tmp_path, 0, model)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (50, "outside its table of 50 rows: choose the --model"),
        (2**31 - 1, "outside its table of 50 rows: choose the --model"),
        (-1, "negative: copy or generate it again$"),  # no table is large enough for it
        (-(2**31), "negative: copy or generate it again$"),
    ],
)
def test_an_id_outside_its_table(
    tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray], value: int, message: str
) -> None:
    arrays["0"][17, 2] = value
    save_members(tmp_path, arrays)
    day = MultiHotDay(tmp_path, 0, model)
    read(day, model, 0, 17)
    read(day, model, 18, SAMPLES)
    with pytest.raises(ValueError, match=rf"\[0.npy\]: id {value} of sample 17 \(feature cat_0\) is {message}"):
        read(day, model, 10, SAMPLES)


def test_a_negative_one_hot_id(tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    arrays["one_hot"][17, 3] = -5
    np.save(tmp_path / "day_0_sparse.npy", arrays["one_hot"])
    with pytest.raises(ValueError, match=r"day_0_sparse.npy: id -5 of sample 17 \(feature cat_3\) is negative"):
        read(open_one_hot(tmp_path, model), model, 10, SAMPLES)


@pytest.mark.parametrize("value", [2, -1])
def test_a_label_that_is_none(tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray], value: int) -> None:
    arrays["labels"][30, 0] = value
    np.save(tmp_path / "day_0_labels.npy", arrays["labels"])
    with pytest.raises(ValueError, match=f"day_0_labels.npy: the label of sample 30 is {value}"):
        read(MultiHotDay(tmp_path, 0, model), model, 20, SAMPLES)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_dense_value_that_is_not_finite(
    tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray], value: float
) -> None:
    arrays["dense"][30, 1] = value
    np.save(tmp_path / "day_0_dense.npy", arrays["dense"])
    with pytest.raises(ValueError, match=f"day_0_dense.npy: dense feature 1 of sample 30 is {value}"):
        read(MultiHotDay(tmp_path, 0, model), model, 20, SAMPLES)


def test_raw_ids_have_64_bits(tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(
        ValueError, match=r"\[0.npy\]: expected dtype int64, found int32: convert it with numpy's astype$"
    ):
        MultiHotDay(tmp_path, 0, replace(model, raw_ids=True))


def test_raw_ids_are_written_for_the_rows(
    tmp_path: Path, model: ModelConfig, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm_bench.dlrm.dcnv2.data.criteo.WRITE_CHUNK", 7)
    tables = open_expansion_tables(tmp_path, model.rows, model.multi_hot_sizes)
    write_multi_hot(tmp_path / "day_0_sparse_multi_hot.npz", arrays["one_hot"], model.multi_hot_sizes, tables, raw=True)
    raw = replace(model, raw_ids=True)
    _, _, ids = read(MultiHotDay(tmp_path, 0, raw), raw, 0, SAMPLES)
    for feature, block in enumerate(ids):
        np.testing.assert_array_equal(block, raw_ids(arrays[str(feature)], salt=feature))
