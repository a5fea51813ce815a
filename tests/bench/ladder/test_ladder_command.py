"""Flags of launch/dlrm.py that a ladder takes for all of its rungs, and those that its rungs set themselves."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from dlrm_bench.bench import obstacles, started_runs
from dlrm_bench.bench.cli import main
from dlrm_bench.bench.ladder import ladder_command
from dlrm_bench.bench.ladder.ladder_command import _check_flags, _check_node
from dlrm_bench.dlrm.benchmark import Rung
from dlrm_bench.dlrm.benchmarks import PRESETS, named

LADDERS = named("dlrm_dcnv2").ladders


@pytest.mark.parametrize(
    ("ladder", "flags"),
    [
        ("drop-in", ["--precision", "tf32"]),  # of all its rungs
        ("fp8", ["--precision=bf16"]),  # of some
        ("full", ["--cuda-graph", "dense"]),  # not set by the first
        ("dynamic-rows", ["--overlap", "--min-time", "1"]),  # a switch
        ("same", ["--pipeline", "five-stage", "--precision", "bf16"]),  # the thing that it runs twice
    ],
)
def test_flags_that_take_effect_are_taken(ladder: str, flags: list[str]) -> None:
    _check_flags(ladder, LADDERS[ladder], flags)


@pytest.mark.parametrize("ladder", [name for name in LADDERS if name != "same"])
def test_no_rung_gets_a_pipeline_that_is_not_its_own(ladder: str) -> None:
    with pytest.raises(ValueError, match=f"--pipeline is set by the rungs of {ladder}: leave it out"):
        _check_flags(ladder, LADDERS[ladder], ["--preset", "smoke", "--pipeline", "static"])


def test_a_value_that_every_rung_replaces_is_refused() -> None:
    with pytest.raises(ValueError, match="--precision is set by every rung of fp8, to tf32 or bf16: leave it out"):
        _check_flags("fp8", LADDERS["fp8"], ["--precision", "fp32"])


def test_without_a_gpu_the_default_ladder_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ladder_command, "gpus_of_node", lambda: 0)
    assert main(["ladder", "--results-dir", str(tmp_path), "--preset", "smoke"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --rungs stock needs a GPU, and this machine has none (stock-tf32: --precision tf32")
    assert "`dlrm-bench ladder --rungs cpu --preset smoke` needs none" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ladder", [name for name in LADDERS if name != "cpu"])
def test_only_ladders_that_run_without_a_gpu_are_taken_there(ladder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_command, "gpus_of_node", lambda: 0)
    monkeypatch.setattr(obstacles, "node_memory_bytes", lambda: 10**12)
    _check_node("cpu", LADDERS["cpu"], ["--preset", "smoke", "--iterations", "200"], 2)
    _check_node("same", LADDERS["same"], ["--preset", "smoke", "--pipeline", "static"], 2)
    if ladder != "same":
        with pytest.raises(ValueError, match=f"--rungs {ladder} needs a GPU"):
            _check_node(ladder, LADDERS[ladder], ["--preset", "launch-bound"], 2)


def on_gpus(patch: pytest.MonkeyPatch, gpus: int, gpu_gb: int | None, host_gb: int = 1000) -> None:
    """Pretends a node of this memory and `gpus` GPUs of this size; None: NVML does not report it."""
    patch.setattr(ladder_command, "gpus_of_node", lambda: gpus)
    patch.setattr(obstacles, "largest_gpu_bytes", lambda: None if gpu_gb is None else gpu_gb * 10**9)
    patch.setattr(obstacles, "node_memory_bytes", lambda: host_gb * 10**9)


def test_tables_that_no_run_could_hold_are_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of any rung: only the last one of this ladder keeps all rows on the GPUs."""
    monkeypatch.setattr(started_runs, "gpus_of_node", lambda: 2)
    monkeypatch.setattr(ladder_command, "_run", lambda plan, folder: pytest.fail("a run was started"))
    on_gpus(monkeypatch, 2, 80)
    assert main(["ladder", "--rungs", "tiers", "--results-dir", str(tmp_path), "--preset", "mlperf-dcnv2"]) == 2
    assert capsys.readouterr().err == (
        "error: --rungs tiers needs more memory than this machine has: all-on-the-gpu: the embedding tables do not "
        "fit: tables and optimizer state need 209.1 GB, but the 2 rank(s) have 152.0 GB; use more GPUs or shrink the "
        "tables with --model.table-scale 0.69\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_what_fits_is_taken(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 8, 141)
    for ladder in ("stock", "full", "ends", "same"):  # of every benchmark
        _check_node(ladder, PRESETS[preset][0].ladders[ladder], ["--preset", preset], 8)


@pytest.mark.parametrize(("ladder", "rungs"), [("tiers", LADDERS["tiers"][:-1]), ("cached-tables", None)])
def test_rows_in_host_memory_count(
    ladder: str, rungs: tuple[Rung, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All MLPerf's tables on one GPU and its host, unless that is too small for the rest."""
    rungs = rungs or LADDERS[ladder]
    on_gpus(monkeypatch, 1, 141)
    _check_node(ladder, rungs, ["--preset", "mlperf-dcnv2"], 1)
    on_gpus(monkeypatch, 1, 141, host_gb=60)
    with pytest.raises(ValueError, match=f"--rungs {ladder} needs more memory than this machine has: "):
        _check_node(ladder, rungs, ["--preset", "mlperf-dcnv2"], 1)


def test_memory_that_nvml_does_not_report_is_left_to_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu_gb in (1, None):
        on_gpus(monkeypatch, 1, gpu_gb)
        with nullcontext() if gpu_gb is None else pytest.raises(ValueError, match="--dynamic-rows 30000000 does not"):
            _check_node("dynamic-rows", LADDERS["dynamic-rows"][1:], ["--preset", "mlperf-dcnv2"], 1)


@pytest.mark.parametrize("preset", ["zoo-dlrm", "smoke-dlrmv4"])
def test_a_ladder_of_another_benchmark_is_named_with_its_presets(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ladder", "--results-dir", str(tmp_path), "--rungs"]
    assert main([*words, "cpu", "--preset", preset]) == 2
    own = ", ".join(PRESETS[preset][0].ladders)
    assert capsys.readouterr().err == (
        f"error: --rungs 'cpu' is unknown for --preset {preset}: choose one of {own}; cpu is a ladder of --preset "
        "smoke, mlperf-dcnv2, launch-bound\n"
    )
    assert main([*words, "none", "--preset", preset]) == 2
    assert capsys.readouterr().err == f"error: --rungs 'none' is unknown for --preset {preset}: choose one of {own}\n"
