"""Flags of launch/dlrm.py that a ladder takes for all of its rungs, and those that its rungs set themselves."""

from pathlib import Path

import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.ladder import ladder_command
from dlrm_bench.bench.ladder.ladder_command import _check_flags, _check_without_gpu
from dlrm_bench.dlrm.benchmarks import named

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
def test_only_ladders_that_run_without_a_gpu_are_taken_there(ladder: str) -> None:
    _check_without_gpu("cpu", LADDERS["cpu"], ["--preset", "smoke", "--iterations", "200"])
    _check_without_gpu("same", LADDERS["same"], ["--preset", "smoke", "--pipeline", "static"])
    if ladder != "same":
        with pytest.raises(ValueError, match=f"--rungs {ladder} needs a GPU"):
            _check_without_gpu(ladder, LADDERS[ladder], ["--preset", "launch-bound"])
