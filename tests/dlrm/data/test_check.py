"""Flags and report that checks of data share: a planted finding, none, and flags that contradict each other."""

from dataclasses import dataclass, field

import pytest

from dlrm_bench.dlrm.data.check import CheckConfig, run_check


@dataclass
class Planted:
    findings: list[str] = field(default_factory=list)
    counts: str = "3 files"


def test_findings_are_lines_of_stdout_and_status_2(tmp_path, capsys):
    assert run_check(CheckConfig, lambda _: Planted(["a: copy it again", "b: delete it"]), [str(tmp_path)], None) == 2
    assert capsys.readouterr().out == "a: copy it again\nb: delete it\n"


def test_without_findings_the_numbers_are_said(tmp_path, capsys):
    seen = []
    assert run_check(CheckConfig, lambda config: seen.append(config) or Planted(), [str(tmp_path), "--fast"], None) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 3 files, all well\n"
    assert seen == [CheckConfig(directory=tmp_path, fast=True)]


def test_flags_that_contradict_each_other_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--mlperf reads every byte, --fast does not: choose one"):
        CheckConfig(directory=tmp_path, mlperf=True, fast=True)
