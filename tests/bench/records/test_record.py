"""Run records: summaries and their interval, the round trip, and every way in which a record can be broken."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_bench.bench.machine.description import describe_machine
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.record import (
    ITERATIONS_NPZ,
    RUN_JSON,
    build_record,
    create_run_folder,
    discard_run_folder,
    new_run_id,
    read_record,
    reserve_room,
    summarize_latency,
    write_iterations,
    write_record,
)
from dlrm_bench.bench.records.schema import RECORD_SCHEMA, Git, RunRecord
from dlrm_bench.dlrm.benchmarks import PRESETS
from tests.bench.made_records import PROVENANCE, trained
from tests.bench.records.full_disk import fails_after

NOW = datetime(2026, 11, 21, 0, 45, 12, tzinfo=UTC)
MACHINE = describe_machine()


def latencies(ranks: int = 2, iterations: int = 80, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).gamma(4, 0.5, (ranks, iterations)).astype(np.float32)


def record_of(ms: np.ndarray, losses: Any, **changes: Any) -> RunRecord:
    known: dict[str, Any] = {
        "run_id": "20261121T004512Z-cpu-launch-bound",
        "created": NOW,
        "command": "python launch/dlrm.py --preset launch-bound",
        "git": Git(commit="0123abc", dirty=False),
        "provenance": PROVENANCE,
        "config": preset("launch-bound"),
        "world_size": len(ms),
        "machine": MACHINE,
        "pipeline": {"name": "stock"},
        "training": trained(losses, status="success", epoch_num=0.76, auc=0.8028, target=0.80275),
    }
    return build_record(**known | changes, iterations_ms=ms)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    ms, losses = latencies(), np.linspace(0.7, 0.5, 80)
    write_record(tmp_path, record_of(ms, losses), ms, losses)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    """Changes top-level fields of run.json; a field changed to `...` goes away."""
    path = folder / RUN_JSON
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in record.items() if value is not ...}))


def test_round_trip_keeps_every_raw_time(written: Path) -> None:
    record = read_record(written)
    np.testing.assert_array_equal(record.iterations_ms, latencies())
    np.testing.assert_array_equal(record.losses, np.linspace(0.7, 0.5, 80).astype(np.float32))
    assert record.run == record_of(latencies(), np.linspace(0.7, 0.5, 80))
    assert record.folder == written
    assert sorted(file.name for file in written.iterdir()) == [ITERATIONS_NPZ, RUN_JSON]


def test_samples_a_second_of_an_older_record_are_by_the_clock(written: Path) -> None:
    """It has them by the mean of the slowest ranks, and no time by the clock."""
    whole = read_record(written).run
    latency = whole["latency_ms"]
    assert latency is not None
    older = {name: value for name, value in latency.items() if name != "by_clock"}
    samples = whole["config"]["global_batch_size"]
    edit(written, latency_ms=older, samples_per_second=samples / latency["mean"] * 1000)
    again = read_record(written).run
    assert again["latency_ms"] == latency
    assert again["samples_per_second"] == whole["samples_per_second"]
    assert again["samples_per_second"] == pytest.approx(samples / latency["by_clock"] * 1000)
    assert latency["by_clock"] < latency["mean"]


def test_raw_times_are_written_whole_or_stay_as_they_were(written: Path) -> None:
    with fails_after(1000):
        write_iterations(written, latencies(1, 4000), np.zeros(4000))
    assert sorted(file.name for file in written.iterdir()) == [ITERATIONS_NPZ, RUN_JSON]
    np.testing.assert_array_equal(read_record(written).iterations_ms, latencies())


def test_run_json_reads_top_down(written: Path) -> None:
    text = (written / RUN_JSON).read_text()
    assert list(json.loads(text)) == list(RunRecord.__annotations__)
    assert text.startswith('{\n "schema":2,\n "id":"20261121T004512Z-cpu-launch-bound",\n')


@settings(deadline=None, max_examples=25)
@given(
    ranks=st.integers(1, 4),
    iterations=st.integers(51, 120),
    seed=st.integers(0, 1000),
    losses=st.floats(allow_nan=True, allow_infinity=True, width=32),
)
def test_any_run_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, iterations: int, seed: int, losses: float
) -> None:
    folder = tmp_path_factory.mktemp("record")
    ms, loss = latencies(ranks, iterations, seed), [losses] * iterations
    write_record(folder, record_of(ms, loss), ms, loss)
    record = read_record(folder)
    np.testing.assert_array_equal(record.iterations_ms, ms)
    np.testing.assert_array_equal(record.losses, np.float32(loss))
    assert record.run["latency_ms"] == summarize_latency(ms, 50)


@pytest.mark.parametrize("name", PRESETS)
def test_config_is_fully_resolved(name: str) -> None:
    config = dataclasses.replace(preset(name), warmup_iterations=5)
    ms = latencies(ranks=4, iterations=10)
    record = record_of(ms, [0.5] * 10, config=config)
    assert record["config"] | {"world_size": 4, "global_batch_size": 4 * config.local_batch_size} == record["config"]
    assert record["config"]["results_dir"] == "results"
    assert record["config"]["model"] == json.loads(json.dumps(dataclasses.asdict(config.model)))
    latency = record["latency_ms"]
    assert latency is not None
    assert record["samples_per_second"] == pytest.approx(4 * config.local_batch_size / (latency["by_clock"] / 1000))
    assert latency["by_clock"] == pytest.approx(float(ms[:, 5:].sum(axis=1).max()) / 5, rel=1e-6)


def test_training_and_memory() -> None:
    ms = latencies(iterations=60)
    record = record_of(ms, [0.7, *[0.6] * 58, float("nan")], peak_memory_bytes=[2_500_000_000, 1_000_000_000])
    assert record["memory_gb"] == {"peak_allocated": [2.5, 1.0]}
    assert record["training"] == {
        "losses": {"first": 0.7, "last": None},
        "auc": 0.8028,
        "target": 0.80275,
        "best_auc": None,
        "epoch_num": 0.76,
        "status": "success",
    }
    assert record_of(ms, [0.7] * 60, training=None)["training"] is None


def test_a_run_that_ended_within_the_warmup(tmp_path: Path) -> None:
    ms = latencies(iterations=20)
    write_record(tmp_path, record_of(ms, [0.5] * 20), ms, [0.5] * 20)
    record = read_record(tmp_path).run
    assert record["latency_ms"] is None
    assert record["samples_per_second"] is None
    edit(tmp_path, warmup_iterations=3)
    with pytest.raises(ValueError, match="17 iterations after the warm-up"):
        read_record(tmp_path)


def test_a_record_is_never_overwritten(written: Path) -> None:
    before = (written / RUN_JSON).read_bytes()
    ms = latencies(seed=1)
    with pytest.raises(ValueError, match="--run-id"):
        write_record(written, record_of(ms, [0.5] * 80), ms, [0.5] * 80)
    assert (written / RUN_JSON).read_bytes() == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_json_cannot_hold_are_refused(tmp_path: Path, bad: float) -> None:
    ms = latencies()
    outcome = trained(status="aborted", epoch_num=0.1, auc=bad)
    with pytest.raises(ValueError, match=r"training\.auc is (nan|inf)"):
        write_record(tmp_path, record_of(ms, [0.5] * 80, training=outcome), ms, [0.5] * 80)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def power_cut(*_: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr("os.replace", power_cut)
    ms = latencies()
    with pytest.raises(OSError, match="power cut"):
        write_record(tmp_path, record_of(ms, [0.5] * 80), ms, [0.5] * 80)
    with pytest.raises(ValueError, match="not the record of a finished run"):
        read_record(tmp_path)


@settings(deadline=None, max_examples=30)
@given(share=st.floats(0, 0.999))
def test_truncated_json_names_file_and_position(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    folder = tmp_path_factory.mktemp("record")
    ms = latencies()
    write_record(folder, record_of(ms, [0.5] * 80), ms, [0.5] * 80)
    content = (folder / RUN_JSON).read_bytes()
    (folder / RUN_JSON).write_bytes(content[: int(share * (len(content) - 2))])
    with pytest.raises(ValueError, match=r"run\.json is corrupt at line \d+ column \d+"):
        read_record(folder)


def test_an_npz_of_python_objects_is_refused_without_advice_to_unpickle_it(tmp_path: Path) -> None:
    ms = latencies()
    write_record(tmp_path, record_of(ms, [0.5] * 80), ms, [0.5] * 80)
    np.savez(tmp_path / ITERATIONS_NPZ, latency_ms=np.array([{"a": 1}]), loss=ms)
    with pytest.raises(ValueError, match=r"is corrupt \(it holds Python objects, not numbers\): restore it"):
        read_record(tmp_path)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_damaged_npz_is_an_error_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("record")
    ms = latencies()
    write_record(folder, record_of(ms, [0.5] * 80), ms, [0.5] * 80)
    path = folder / ITERATIONS_NPZ
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[position:]
    else:
        content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        np.testing.assert_array_equal(read_record(folder).iterations_ms, ms)  # a date in the zip's headers, say
    except ValueError as error:
        assert ITERATIONS_NPZ in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": RECORD_SCHEMA + 1}, f"schema {RECORD_SCHEMA + 1}; this version reads 1 and {RECORD_SCHEMA}"),
        ({"schema": ...}, "schema None"),
        ({"machine": ..., "host": ...}, "lacks machine, host"),
        ({"git": {"commit": None}}, r"lacks git\.dirty"),
        ({"git": None}, "git is None, expected Git"),
        ({"latency_ms": {"n": 30}}, r"lacks latency_ms\.mean"),
        ({"latency_ms": None}, "30 iterations after the warm-up"),
        ({"warmup_iterations": 49}, r"iterations\.npz disagrees with run\.json: latency_ms\.n is 31"),
        ({"warmup_iterations": "50"}, "warmup_iterations is '50', expected int"),
        ({"config": {"world_size": 3}}, r"latency_ms is float32 \[2, 80\], expected float32 \[3, iterations\]"),
        ({"training": {"losses": {}}}, r"lacks training\.auc"),
        ({"samples_per_second": float("nan")}, "samples_per_second is nan"),
    ],
)
def test_broken_fields_are_named(written: Path, changes: dict[str, Any], message: str) -> None:
    edit(written, **changes)
    with pytest.raises(ValueError, match=message):
        read_record(written)


@pytest.mark.parametrize("name", ["n", "mean", "p50", "p90", "p99"])
def test_a_summary_that_is_not_that_of_the_raw_times(written: Path, name: str) -> None:
    summary = json.loads((written / RUN_JSON).read_text())["latency_ms"]
    for wrong, said in ((type(summary[name])(summary[name] * 1.001 + 1), "disagrees with run"), (None, "run")):
        edit(written, latency_ms=summary | {name: wrong})
        with pytest.raises(ValueError, match=rf"{said}\.json: latency_ms\.{name} is"):
            read_record(written)


def test_broken_files_are_named(written: Path) -> None:
    np.savez(written / ITERATIONS_NPZ, latency_ms=latencies())
    with pytest.raises(ValueError, match=r"iterations\.npz lacks an array: .*loss"):
        read_record(written)
    np.savez(written / ITERATIONS_NPZ, latency_ms=latencies(), loss=np.zeros(79, np.float32))
    with pytest.raises(ValueError, match=r"loss is float32 \[79\], expected float32 \[80\]"):
        read_record(written)
    (written / ITERATIONS_NPZ).unlink()
    with pytest.raises(ValueError, match=r"iterations\.npz is missing"):
        read_record(written)
    (written / RUN_JSON).write_text("[]")
    with pytest.raises(ValueError, match="expected an object, found list"):
        read_record(written)
    (written / RUN_JSON).write_bytes(b"\xff")
    with pytest.raises(ValueError, match="at byte 0: not UTF-8"):
        read_record(written)


def test_run_ids() -> None:
    assert new_run_id("8xh200", "launch-bound", NOW) == "20261121T004512Z-8xh200-launch-bound"
    assert new_run_id("cpu", "smoke", NOW.astimezone(timezone(timedelta(hours=9)))).startswith("20261121T004512Z")


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)), st.integers(1, 10**9))
def test_run_ids_sort_by_date(earlier: datetime, seconds: int) -> None:
    early = earlier.replace(tzinfo=UTC)
    assert new_run_id("zz", "z", early) < new_run_id("aa", "a", early + timedelta(seconds=seconds))


def test_run_folders_are_new(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "deep" / "results", "id")
    assert folder.is_dir()
    with pytest.raises(ValueError, match=f"{folder} exists .*--run-id, --results-dir or --out"):
        create_run_folder(tmp_path / "deep" / "results", "id")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be created \(Not a directory\).*--results-dir"):
        create_run_folder(tmp_path / "file", "id")


def test_a_folder_that_lacks_room_is_gone(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path, "id")
    with pytest.raises(ValueError, match="has no room for a record"):
        reserve_room(folder, iterations=2**50, ranks=1)
    assert not folder.exists()


def test_only_a_folder_without_files_of_others_is_discarded(tmp_path: Path) -> None:
    for name, kept in (("own", []), ("other", ["log", "other"])):
        folder = create_run_folder(tmp_path, name)
        reserve_room(folder, iterations=None, ranks=1)
        (folder / "log").touch()
        for other in kept:
            (folder / other).touch()
        discard_run_folder(folder, "log")
        assert folder.exists() == bool(kept)
        assert sorted(file.name for file in folder.glob("*")) == kept


def test_latency_is_the_slowest_ranks_after_the_warmup() -> None:
    ms = np.array([[9, 1, 5, 1, 2], [9, 3, 1, 4, 1]], dtype=np.float32)
    summary = summarize_latency(ms, warmup=1)  # 3, 5, 4, 2
    assert summary == {
        **{"n": 4, "mean": 3.5, "by_clock": 2.25, "p50": 3.5, "p90": 4.7, "p99": 4.97},
        **{"ci95": None, "drift": None, "steady": None},  # of so few values
    }
    assert summarize_latency(ms[:, :4], warmup=1)["p50"] == 4  # an odd number of iterations
    with pytest.raises(ValueError, match="--warmup-iterations 5 leaves none of the 5 iterations"):
        summarize_latency(ms, warmup=5)
