"""The console of dlrm-bench prints names as they are, whatever rich would read into them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.compare.tables import result_table, rungs_table
from dlrm_bench.bench.console import console
from dlrm_bench.bench.mlperf.published_logs import MLPerfRun, logs_table
from tests.bench.compare.test_checks import side
from tests.bench.compare.two_sides import compare_sides
from tests.bench.made_records import recorded_runs, write


def test_brackets_and_colons_of_a_log_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(logs_table([MLPerfRun(path=Path("x[red].txt"), org="Acme [/beta] :smile:")]))
    said = capsys.readouterr().out
    assert "x[red].txt" in said
    assert "Acme [/beta] :smile:" in said


def test_brackets_of_a_side_are_printed_in_titles_and_cells(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (side(f"run/[old]{name}[/new]", np.array([1.0, 1.1]), i) for i, name in enumerate("ab"))
    result = compare_sides(a, replace(b, label="other/[/red]"))
    console().print(result_table(result))
    console().print(rungs_table([replace(result, name="[bold]rung")]))
    said = capsys.readouterr().out
    assert "A = run/[old]a[/new]" in said
    assert "B = other/[/red]" in said
    assert "[bold]rung" in said


def test_a_verdict_is_bold_and_its_folders_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [write(tmp_path / name, run) for name, run in zip(("[old]", "[/new]x"), recorded_runs(), strict=False)]
    assert main(["compare", *map(str, sides)]) == 0
    said = "".join(capsys.readouterr().out.split("\n"))
    assert "[bold]" not in said
    assert "[old]" in said
    assert main(["report", str(tmp_path / "[old]"), "--out", str(tmp_path / "[page]")]) == 0
    assert f"page {tmp_path / '[page]' / 'index.html'}" in capsys.readouterr().out
