"""Data commands of either benchmark, by the preset that is named."""

from pathlib import Path

import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.dlrm.benchmarks import PRESETS
from dlrm_bench.dlrm.dlrmv4.benchmark import DLRMV4
from dlrm_bench.dlrm.dlrmv4.data.commands import generate_config
from dlrm_bench.dlrm.dlrmv4.data.generate import GenerateConfig, smoke_config
from dlrm_bench.dlrm.dlrmv4.presets import training

V4 = ["--preset", "smoke-dlrmv4"]


def test_dlrmv4s_data_fit_the_presets_tables() -> None:
    assert generate_config("smoke-dlrmv4") == smoke_config(Path("data/smoke-dlrmv4"))
    assert generate_config("mlperf-dlrmv4") == GenerateConfig(out=Path("data/yambda"))
    eighth = generate_config("dlrmv4-one-gpu")
    assert (eighth.users, eighth.items) == tuple(training("dlrmv4-one-gpu").model.rows[at] - 1 for at in (3, 0))
    assert {name for name, (benchmark, _) in PRESETS.items() if benchmark is DLRMV4} >= {"smoke-dlrmv4"}


def test_raw_events_to_checked_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw, days = str(tmp_path / "raw"), str(tmp_path / "days")
    of_preset = ["--preset", "smoke-dlrmv4"]
    assert main(["data", "generate", *of_preset, raw, "--users", "300", "--days", "4", "--raw"]) == 0
    assert main(["data", "preprocess", *of_preset, raw, days, "--train-days", "4"]) == 0
    assert main(["data", "check", *of_preset, days]) == 0
    assert "all well" in capsys.readouterr().out
    assert main(["data", "fill", *of_preset, days]) == 2
    assert "dlrm-bench data fill does not know --preset smoke-dlrmv4" in capsys.readouterr().err
    assert main(["data", "rows", days]) == 2
    assert "name one of its presets, --preset mlperf-dlrmv4" in capsys.readouterr().err
    assert main(["data", "check", "--preset", "nothing", days]) == 2
    assert "--preset 'nothing' is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["generate", "fill", "preprocess", "check", "speed", "rows", "counts"])
def test_help_needs_no_preset(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["data", what, "--help"])
    assert end.value.code == 0
    assert f"usage: dlrm-bench data {what}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "out", "--foo", "3"], "Unrecognized options: --foo, 3"),
        (["fill", "out", "--dys", "3"], "Unrecognized options: --dys, 3; perhaps you meant --days"),
        (["preprocess", "raw", "out", "--foo"], "Unrecognized options: --foo"),
        (["check", "out", "more"], "Unrecognized options: more"),
        (["speed", "out", "--foo"], "Unrecognized options: --foo"),
        (["counts", "out", "--samples", "0"], "--samples is 0: count at least one"),
        (
            ["generate", *V4, "out", "--users", "x"],
            "Error parsing --users: invalid literal for int() with base 10: 'x'",
        ),
        (["preprocess", *V4, "raw", "out", "--foo"], "Unrecognized options: --foo"),
        (["check", *V4, "out", "--foo"], "Unrecognized options: --foo"),
        (["speed", *V4, "out", "--foo"], "Unrecognized options: --foo"),
        (["rows", *V4, "out", "--world-size", "0"], "--world-size is 0: choose more than 0"),
    ],
)
def test_a_wrong_flag_is_an_error_of_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) == 2
    assert capsys.readouterr() == ("", f"error: {said}\n")
    assert [*tmp_path.iterdir()] == []
