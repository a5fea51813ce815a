"""The least time of an iteration: its parts, and that no committed record is faster."""

from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench import started_runs
from dlrm_bench.bench.cli import main
from dlrm_bench.bench.limits.bound import bound_of, bound_table, roofline_points
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.profile.kernel_names import OTHER, STAGES
from dlrm_bench.bench.records.limits import LARGE_COPY, LARGE_PRODUCT, POOLED, Ceiling, best_rate, read_limits
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.dlrm.dcnv2.config import DataConfig, OptimizerConfig
from tests.bench.made_records import H200, configured, kernel, profile, recorded_runs, write

RUN = recorded_runs()[0]
RECORDS = Path(__file__).resolve().parents[3] / "results"
CEILINGS = [read_limits(RECORDS / f"{name}-512-a-gpu-ceilings-bf16") for name in ("06-4xh200", "29-2xh200")]
# One of each batch size, number of GPUs, kind of ids and precision, and all profiled runs of the last rung.
COMMITTED = [
    "01-8xh200-512-a-gpu-stock",
    "02-8xh200-6912-a-gpu-stock",
    "05-4xh200-512-a-gpu-full-ladder/00-peer-memory-bf16",
    "05-4xh200-512-a-gpu-full-ladder/00-overlap-tf32",
    "05-4xh200-512-a-gpu-full-ladder/host-peer-memory-bf16",
    "07-4xh200-512-a-gpu-first-and-last-rung/host-peer-memory-bf16",
    "08-4xh200-6912-a-gpu-first-and-last-rung/host-peer-memory-bf16",
    "11-2xh200-512-a-gpu-realistic-ids/00-peer-memory-bf16",
    "12-2xh200-6912-a-gpu-realistic-ids/00-peer-memory-bf16",
    "13-2xh200-6912-a-gpu-fused-cross-network/after/00-new-6912",
    "27-2xh200-512-a-gpu-shared-sort/last/00",
    "28-2xh200-6912-a-gpu-shared-sort/last/00",
]


@pytest.mark.parametrize("name", COMMITTED)
def test_nothing_is_faster_than_its_bound(name: str) -> None:
    (folder, *_) = sorted(path.parent for path in (RECORDS / name).glob("**/run.json"))
    run = read_record(folder).run
    bound = bound_of(run)
    assert bound is not None
    assert 0 < bound.chain <= bound.iteration
    for limits in CEILINGS:
        bound = bound_of(run, limits)  # whose memory was measured to be slower than the fastest
        assert bound is not None
        assert bound.rates.memory == best_rate(limits, "memory: ") < 4.3e12
        if run["host"] is None:
            assert run["latency_ms"] is not None
            assert run["latency_ms"]["p50"] > bound.iteration
        else:
            assert run["stages_ms"] is not None
            assert all(run["stages_ms"][stage] > bound.stages[stage] for stage in STAGES)


def bound_with(tmp_path: Path, name: str, **changes: object):
    return bound_of(read_record(write(tmp_path / name, RUN, world_size=8, config=configured(**changes))).run)


def test_parts(tmp_path: Path) -> None:
    """Computed by hand: 96 MFLOP and 219 numbers of input a sample, bytes that leave a rank for seven others."""
    bound = bound_with(tmp_path, "a", precision="bf16", local_batch_size=6912)
    amounts = {piece.name: piece for piece in bound.pieces}
    products = amounts["products"].flop + amounts["bottom MLP's products and weight gradients"].flop
    assert products == pytest.approx(6912 * 96e6, rel=0.01)
    assert amounts["copy of the batch"].pcie == 6912 * 4 * 228
    dense = amounts["exchange of dense gradients and weights"].links
    assert dense == pytest.approx(2 * 7 / 8 * 16_044_545 * 2)
    large = [40_000_000] * 5 + [3_067_956, 405_282, 590_152, 39_060, 20_265]  # rows of the tables above 10 MB
    assert amounts["exchange of pooled vectors"].links == 6912 * len(large) * 128 * 2 * 7 / 8
    assert bound.resources["tensor cores"] == pytest.approx(products / 798e12 * 1e3)


def test_rates_of_eight_bits_are_not_known(tmp_path: Path) -> None:
    assert bound_with(tmp_path, "a", pipeline="static", precision="bf16", fp8=True) is None


def test_rows_count_once_and_optimizers_move_their_state(tmp_path: Path) -> None:
    def update(name: str, **changes: object) -> float:
        (piece,) = (p for p in bound_with(tmp_path, name, **changes).pieces if p.name == "table update")
        return piece.memory

    large = {"local_batch_size": 6912}
    expanded, uniform = update("a", **large), update("b", **large, data=DataConfig(random_ids="uniform"))
    assert 1.5 < uniform / expanded < 3
    assert update("c", **large, optimizer=OptimizerConfig(embedding="sgd")) < expanded


def test_measured_rates_are_those_of_large_work(tmp_path: Path) -> None:
    """Rates are those of the record's own precision and GPU."""
    run = read_record(write(tmp_path / "a", RUN, config=configured(precision="bf16"))).run
    ceilings = [
        Ceiling(name=LARGE_PRODUCT, stage=None, ms=2.0, amount=1e12, unit="FLOP"),
        Ceiling(name="GEMM: top 0 forward", stage=None, ms=0.001, amount=1e12, unit="FLOP"),
        Ceiling(name=LARGE_COPY, stage=None, ms=5.0, amount=1e9 / 4, unit="B"),
    ]
    limits: Any = {"id": "l", "ceilings": ceilings, "machine": {"gpu": "NVIDIA H200"}, "config": {"precision": "bf16"}}
    bound = bound_of(run, limits)
    assert bound is not None
    assert (bound.rates.flop["bf16"], bound.rates.pcie, bound.rates.memory) == (5e14, 5e10, 4.3e12)
    assert bound.rates.flop["tf32"] == 494.7e12
    with pytest.raises(ValueError, match="but l is of NVIDIA B200"):
        bound_of(run, {**limits, "machine": {"gpu": "NVIDIA B200"}})


def test_another_batch_size_has_a_bound_and_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = str(write(tmp_path / "a", RUN, config=configured(precision="bf16")))
    assert main(["limits", "--above", record, "--batch", "8192"]) == 0
    said = capsys.readouterr().out
    assert "8192 a rank" in said
    assert "samples/s" not in said
    assert main(["limits", "--above", record, "--batch", "0"]) == 2
    assert main(["limits", "--batch", "512", "--preset", "smoke"]) == 2


def test_what_has_no_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = write(tmp_path / "unknown", RUN, machine={**H200, "gpu": "NVIDIA B200"})
    assert bound_table(read_record(unknown).run) is None
    assert main(["limits", "--above", str(unknown)]) == 2
    assert "no bound" in capsys.readouterr().err
    assert main(["limits"]) == 2


def test_the_command_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed = write(tmp_path / "timed", RUN)
    profiled = write(tmp_path / "profiled", RUN, profile=profile())
    assert main(["limits", "--above", str(timed), "--roofline", str(tmp_path / "r.png")]) == 2
    assert "needs a profiled run" in capsys.readouterr().err
    assert main(["limits", "--above", str(timed), str(profiled), "--roofline", str(tmp_path / "r.png")]) == 0
    assert "exchange of pooled vectors" in capsys.readouterr().out
    assert (tmp_path / "r.png").stat().st_size > 10_000
    found = roofline_points(read_record(profiled).run)
    assert found is not None
    assert {point.name for point in found[0]} >= {"GEMMs"}


def test_a_roofline_counts_a_distinct_row_once(tmp_path: Path) -> None:
    """49 distinct rows a sample of DLRMv4, of 512 columns, where it names 6,200."""
    config = preset("mlperf-dlrmv4")
    looked_up = {**profile(), "kernels": [kernel("gather_rows: _gather_rows_kernel", "embedding_forward", 50)]}
    run = read_record(write(tmp_path / "profiled", RUN, world_size=1, config=config, profile=looked_up)).run
    found = roofline_points(run)
    assert found is not None
    ((point,), _) = found
    assert point.name == "table lookup"
    assert point.flop_per_s == pytest.approx(config.local_batch_size * 49 * 512 / 50e-6)
    assert point.intensity == pytest.approx(1 / 4)


def test_a_picture_without_known_kernels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = {**profile(), "kernels": [kernel("element-wise", OTHER, 100)]}
    run = write(tmp_path / "profiled", RUN, profile=others)
    assert main(["limits", "--above", str(run), "--roofline", str(tmp_path / "r.png")]) == 2
    assert "--roofline needs a profiled run in --above" in capsys.readouterr().err


@pytest.mark.parametrize("above", [(), ("--above", "timed")])
def test_a_picture_is_refused_before_anything_is_measured(
    above: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "timed", RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(started_runs, "measure", lambda *_: pytest.fail("measured"))
    assert main(["limits", *above, "--roofline", "r.png", "--preset", "smoke"]) == 2
    assert "--roofline needs a profiled run in --above" in capsys.readouterr().err


def test_records_of_files_have_a_bound() -> None:
    """All timed records of day files, whose path another machine had; nothing is faster than its bound."""
    known = 0
    for path in sorted(RECORDS.glob("**/run.json")):
        run = read_record(path.parent).run
        data, pipeline = run["config"].get("data", {}), run["config"]["pipeline"]
        if data.get("path") is None or run["machine"]["gpu"] is None or pipeline.get("fp8"):
            continue
        bound = bound_of(run)
        assert bound is not None, path
        if run["latency_ms"] is not None and run["host"] is None:
            assert run["latency_ms"]["p50"] > bound.iteration
            known += 1
    assert known >= 20


def test_the_table_says_where_its_rates_are_from(tmp_path: Path) -> None:
    run = read_record(RECORDS / "05-4xh200-512-a-gpu-full-ladder/00-peer-memory-bf16").run
    known, measured = bound_table(run), bound_table(run, CEILINGS[0])
    assert known is not None
    assert measured is not None
    assert "rates known of NVIDIA H200" in str(known.caption)
    said = str(measured.caption)
    assert f"rates measured by {CEILINGS[0]['id']}: memory; rates known of NVIDIA H200 " in said
    other = bound_table(read_record(RECORDS / "05-4xh200-512-a-gpu-full-ladder/00-overlap-tf32").run, CEILINGS[0])
    assert other is not None
    assert "warning: precision tf32, beside limits of bf16" in str(other.caption)


def test_measured_rates_alone_bound_a_run_on_cpus(tmp_path: Path) -> None:
    """Products, memory, copies and collectives were all measured; without limits nothing is known of CPUs."""
    cpus = {**H200, "gpu": None, "gpus": 0}
    run = read_record(write(tmp_path / "a", RUN, machine=cpus, config=configured(precision="fp32"))).run
    ceilings = [
        Ceiling(name=LARGE_PRODUCT, stage=None, ms=2.0, amount=1e9, unit="FLOP"),
        Ceiling(name=LARGE_COPY, stage=None, ms=5.0, amount=1e8, unit="B"),
        Ceiling(name="memory: copy", stage=None, ms=1.0, amount=1e7, unit="B"),
        Ceiling(name=POOLED, stage="embedding_forward", ms=1.0, amount=1e6, unit="B"),
    ]
    limits: Any = {"id": "l", "ceilings": ceilings, "machine": cpus, "config": {"precision": "fp32"}}
    bound = bound_of(run, limits)
    assert bound is not None
    assert (bound.rates.flop, bound.rates.memory, bound.rates.links) == ({"fp32": 5e11}, 1e10, 1e9)
    assert bound_of(run) is None
    assert bound_of(run, {**limits, "ceilings": ceilings[:2]}) is None
    assert bound_of(run, {**limits, "config": {"precision": "bf16"}}) is None
