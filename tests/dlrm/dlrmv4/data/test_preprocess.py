"""Preprocessing writes the reference's files."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from dlrm_bench.dlrm.dlrmv4.data.cache_writer import CacheWriter
from dlrm_bench.dlrm.dlrmv4.data.generate import GenerateConfig, generate
from dlrm_bench.dlrm.dlrmv4.data.item_maps import FOLDER, ItemMaps, map_path
from dlrm_bench.dlrm.dlrmv4.data.preprocess import PreprocessConfig, Split, main, preprocess, training_events
from dlrm_bench.dlrm.dlrmv4.data.raw_events import RAW_FILE
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex
from tests.dlrm.dlrmv4.data.conftest import REFERENCE


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A folder as the reference's download leaves it."""
    folder = tmp_path / "raw_data"
    (folder / RAW_FILE).parent.mkdir(parents=True)
    (folder / FOLDER).mkdir()
    shutil.copy(REFERENCE / "raw" / "multi_event.parquet", folder / RAW_FILE)
    for name in ("artist", "album"):
        shutil.copy(REFERENCE / "raw" / f"{name}_item_mapping.parquet", folder / FOLDER)
    return folder


def assert_the_references(out: Path) -> None:
    expected = REFERENCE / "processed_5b"
    for path in expected.rglob("*.*"):
        found = (out / "processed_5b" / path.relative_to(expected)).read_bytes()
        if path.name == "store_meta.json":  # ours also has the limits where they are not the benchmark's
            assert json.loads(path.read_bytes()).items() <= json.loads(found).items()
        else:
            assert found == path.read_bytes(), path.name


@pytest.mark.parametrize("chunk_events", [1, 100, 8_000_000])
def test_files_are_the_references_whatever_the_piece(raw, tmp_path, chunk_events):
    preprocess(PreprocessConfig(raw=raw, out=tmp_path / "out", history=9, chunk_events=chunk_events))
    assert_the_references(tmp_path / "out")


@pytest.mark.parametrize(
    "event_type",
    [pl.col("event_type").to_physical(), *(pl.col("event_type").cast(kind) for kind in (pl.Utf8, pl.Categorical))],
    ids=("numbers", "strings", "categories"),
)
def test_out_may_be_raw_and_event_types_of_any_kind(raw, event_type):
    pl.read_parquet(raw / RAW_FILE).with_columns(event_type).write_parquet(raw / RAW_FILE)
    assert main([str(raw), str(raw), "--history", "9"]) == 0
    assert_the_references(raw)


def test_users_in_any_order_of_the_file(raw, tmp_path):
    """Events of one user and second keep the file's order, so whole users are moved."""
    events = pl.read_parquet(raw / RAW_FILE)
    parts = events.partition_by("uid", maintain_order=True)
    pl.concat(parts[::-1]).write_parquet(raw / RAW_FILE, row_group_size=64)
    preprocess(PreprocessConfig(raw=raw, out=tmp_path / "out", history=9, chunk_events=100))
    assert_the_references(tmp_path / "out")


def test_generated_events_come_back_to_the_byte(tmp_path):
    made, out = tmp_path / "made", tmp_path / "out"
    config = GenerateConfig(out=made, users=120, items=300, artists=40, albums=90, days=20, history=30, raw=True)
    generate(config)
    preprocess(PreprocessConfig(raw=made, out=out, history=30, chunk_events=500))
    files = [path for path in (made / "processed_5b").rglob("*.*") if path.is_file()]
    assert len(files) == 17
    for path in files:
        assert (out / path.relative_to(made)).read_bytes() == path.read_bytes(), path.name


def test_an_event_at_a_bound_belongs_to_what_begins_there(tmp_path):
    """As in the reference; an event of the very last second is in neither part."""
    split = Split.of(PreprocessConfig(raw=tmp_path, out=tmp_path, train_days=2), 0, 400_000)
    bounds = [split.train_start, split.train_end, split.test_start, split.test_end]
    times = [time + more for time in bounds for more in (-1, 0)]
    kinds = {"item_id": 1, "is_organic": 1, "played_ratio_pct": 90, "event_type": 0}
    kept = training_events(tmp_path, pl.DataFrame({"uid": 5, "timestamp": times, **kinds}), split)
    assert kept.timestamp.tolist() == [split.train_start, split.train_end - 1]
    assert split.test_events == 2
    times = [split.train_start + after for after in (0, 1_800, 3_601)]  # only more than half an hour ends a session
    before = split.sessions
    training_events(tmp_path, pl.DataFrame({"uid": 5, "timestamp": times, **kinds}), split)
    assert split.sessions == before + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pl.lit("dance").alias("event_type"), "unknown event_type dance"),
        (pl.lit(None, pl.UInt32).alias("item_id"), "column item_id has nulls"),
        (pl.lit(None, pl.UInt32).alias("uid"), "column uid has nulls"),
        (pl.lit(-1).alias("item_id"), "negative ids"),
        (pl.lit(600, pl.UInt32).alias("item_id"), "not of one data set"),
    ],
)
def test_events_that_cannot_be_are_named(raw, tmp_path, change, message):
    pl.read_parquet(raw / RAW_FILE).with_columns(change).write_parquet(raw / RAW_FILE)
    with pytest.raises(ValueError, match=message):
        preprocess(PreprocessConfig(raw=raw, out=tmp_path / "out", history=9))


def test_files_that_cannot_be_are_named(raw, tmp_path, capsys):
    config = PreprocessConfig(raw=raw, out=tmp_path / "out", history=9)
    pl.read_parquet(raw / RAW_FILE).drop("is_organic").write_parquet(raw / RAW_FILE)
    with pytest.raises(ValueError, match="no column is_organic"):
        preprocess(config)
    (raw / RAW_FILE).write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="cannot be preprocessed"):
        preprocess(config)
    (raw / RAW_FILE).unlink()
    assert main([str(raw), str(tmp_path / "out")]) == 2
    assert str(RAW_FILE) in capsys.readouterr().err


def test_maps_of_other_data_leave_no_complete_cache(raw, tmp_path):
    """With the right maps the same command goes on to the end."""
    right = map_path(raw, "artist").read_bytes()
    config = PreprocessConfig(raw=raw, out=tmp_path / "out", history=9, chunk_events=100)
    for name in ("artist", "album"):
        path = map_path(raw, name)
        shutil.copy(path, path.with_suffix(".kept"))
        pl.read_parquet(path).filter(pl.col("item_id") < 20).write_parquet(path)
    with pytest.raises(ValueError, match=rf"item 59, and the maps in {raw / FOLDER} know items up to 19"):
        preprocess(config)
    assert not config.has_cache
    for name in ("artist", "album"):
        map_path(raw, name).with_suffix(".kept").rename(map_path(raw, name))
    preprocess(config)
    assert_the_references(config.out)
    assert map_path(config.out, "artist").read_bytes() == right


@pytest.mark.parametrize("lost", ["split_meta.json", "item_popularity.npy", "artist_item_mapping.parquet", "windows_*"])
def test_what_is_missing_beside_a_complete_cache_is_written(raw, tmp_path, lost):
    config = PreprocessConfig(raw=raw, out=tmp_path / "out", history=9)
    preprocess(config)
    ready = (config.folder / "_READY").stat().st_mtime_ns
    (path,) = config.out.rglob(lost)
    path.unlink()
    cache = preprocess(config)
    assert path.exists()
    assert_the_references(config.out)
    WindowIndex.open(cache)
    ItemMaps.open(config.out)
    assert (config.folder / "_READY").stat().st_mtime_ns == ready


def test_a_complete_cache_of_other_events_is_refused(raw, tmp_path):
    config = PreprocessConfig(raw=raw, out=tmp_path / "out", history=9)
    preprocess(config)
    with pytest.raises(ValueError, match=r"was made with --train-days 300, not 2: delete it"):
        preprocess(replace(config, train_days=2))
    (config.processed / "split_meta.json").write_text("{}")
    with pytest.raises(ValueError, match=r"split_meta\.json cannot be read .*: delete it"):
        preprocess(config)
    (config.processed / "split_meta.json").unlink()
    pl.read_parquet(raw / RAW_FILE).head(300).write_parquet(raw / RAW_FILE)
    with pytest.raises(ValueError, match=r"is not of the .* events of training"):
        preprocess(config)


def test_a_disk_without_room_is_refused_before_anything_is_written(raw, tmp_path, monkeypatch):
    config = PreprocessConfig(raw=raw, out=tmp_path / "out", history=9)
    events = pl.read_parquet(raw / RAW_FILE).group_by("uid").len()["len"].cast(pl.Int64)
    needed = 40 * events.sum() + 16 * (events - 9).clip(lower_bound=0).sum()
    free = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(ValueError, match=f"{config.out} has 0.0 GB free, and about 0.0 GB are needed"):
        preprocess(config)
    assert not config.out.exists()
    free.free = needed
    preprocess(config)
    assert sum(path.stat().st_size for path in config.folder.glob("[fpa]*.npy")) - 11 * 128 < needed


def test_a_disk_that_is_full_is_named_as_out(raw, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    config = PreprocessConfig(raw=raw, out=tmp_path / "out", history=9)
    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "append", full)
        with pytest.raises(ValueError, match=rf"^{config.out} cannot be written \(.*No space left on device; .* free"):
            preprocess(config)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy", lambda _, target: (Path(target).write_bytes(b"PAR1"), full()))
        with pytest.raises(ValueError, match=rf"^{config.out} cannot be written"):
            preprocess(config)
    assert not map_path(config.out, "artist").exists()
    preprocess(config)
    assert_the_references(config.out)


@pytest.mark.parametrize("wrong", [{"history": 2}, {"test_days": -1}, {"chunk_events": 0}])
def test_configurations_are_checked(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("_", "-")):
        PreprocessConfig(raw=tmp_path, out=tmp_path, **wrong)
