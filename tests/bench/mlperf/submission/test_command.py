"""The commands' flags and exit statuses; their output for a real submission is in test_chain.py."""

import json
from pathlib import Path

import pytest

from dlrm_bench.bench.cli import main
from tests.bench.mlperf.submission.made_packages import description, made_package


def test_a_package_that_is_not_accepted_has_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = made_package(tmp_path)
    package.description.write_text(json.dumps(description(status="onprem", division="closed")))
    assert main(["submission", "check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "error: arrangement: " in out
    assert "error: system description: System description checker failed" in out
    assert "not accepted: fix the errors and check again" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "out"], "name ten runs with --runs, or give the flags of new ones from --preset on"),
        (["build", "out", "--runs", "x", "--preset", "smoke"], "one of the two"),
        (["build", "out", "--preset", "smoke", "--seed", "3"], "--seed is chosen by this command: use --first-seed"),
        (["build", "out", "--preset", "smoke", "--results_dir=x"], "--results-dir is chosen by this command"),
        (["build", "out", "--runs", "nowhere"], "nowhere is not a result log, a record"),
        (["check", "nowhere"], "nowhere is not a submission"),
        (["score", "nowhere"], "nowhere is not a submission"),
        (["score", "nowhere", "--foo"], "error: Unrecognized options: --foo\n"),
    ],
)
def test_bad_input_has_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["submission", *words]) == 2
    assert message in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("build", "check", "score"):
        with pytest.raises(SystemExit, match="0"):
            main(["submission", what, "--help"])
        assert f"usage: dlrm-bench submission {what}" in capsys.readouterr().out
