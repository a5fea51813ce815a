"""The last words of `make bench`: proven where the interval says so, and nothing proven where not."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.ladder.analysis import rung_results
from dlrm_bench.bench.ladder.verdict import latest_ladder, main, verdict
from dlrm_bench.bench.machine.description import describe_machine
from dlrm_bench.bench.records.ladder import LADDER_JSON, LADDER_SCHEMA, Ladder
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.dlrm.dcnv2.ladders import LADDERS
from tests.bench.made_records import H200, configured, recorded_runs, write
from tests.pipelines import changed

RESULTS = ROOT / "results"
RUNS = recorded_runs()
PIPELINES = ("torchrec", "five-stage", "static")
CPU = {**describe_machine(), "gpus": 0, "gpu": None}


def a_ladder(folder: Path, factors: tuple[float, float, float] = (1, 1, 2), rounds: int = 5, machine=CPU) -> Path:
    """A ladder of the rungs of the CPU, whose recorded times are multiplied by these factors."""
    rungs = LADDERS["cpu"]
    members = {}
    for i, (rung, pipeline, factor) in enumerate(zip(rungs, PIPELINES, factors, strict=True)):
        config = changed(configured(), pipeline)
        series = [RUNS[(3 * n + i) % len(RUNS)] * np.float32(factor) for n in range(rounds)]
        places = [
            write(folder / f"{n:02d}-{rung.name}", times, minute=3 * n + i, config=config, machine=machine)
            for n, times in enumerate(series)
        ]
        members[rung.name] = [read_record(place) for place in places]
    ladder = Ladder(
        schema=LADDER_SCHEMA,
        id=folder.name,
        created="2026-11-21T00:00:00+00:00",
        command="dlrm-bench ladder",
        rounds=rounds,
        seed=0,
        rungs=rung_results(rungs, members, {}),
        order=[],
    )
    (folder / LADDER_JSON).write_text(json.dumps(ladder))
    return folder


def said_of(rung: str, paragraphs: list[str]) -> str:
    """Returns the paragraph with the rung's result; an earlier one describes the rung."""
    return [text for text in paragraphs if text.startswith(rung)][-1]


def test_stock_with_switches_is_not_called_the_reference():
    """The ladder is record 38's."""
    said = verdict(RESULTS / "38-2xh200-512-a-gpu-fair-baselines")
    assert said[0] == "stock: stock TorchRec, as the MLPerf reference trains."
    assert said[1].startswith("stock-tuned: stock TorchRec with --")
    assert "--compile-dense" in said[2]


def test_a_difference_is_proven_or_not(tmp_path):
    said = verdict(a_ladder(tmp_path / "x", (1, 0.5, 1)))
    faster, same = said_of("five-stage-fp32", said), said_of("static-fp32", said)
    assert faster.startswith("five-stage-fp32 is faster, proven: ")
    assert "times as fast as stock-fp32 in 5 rounds (95 % interval" in faster
    assert same.startswith("static-fp32: no difference proven, ")
    assert re.search(r"Rounds that differ like these find (differences|factors) from [\d.]+%? \(.* to .*\)", same)
    slower = said_of("static-fp32", verdict(a_ladder(tmp_path / "y", (1, 1, 2))))
    assert slower.startswith("static-fp32 is slower, proven: 0.")


def test_one_round_proves_nothing(tmp_path):
    said = verdict(a_ladder(tmp_path / "x", (1, 0.2, 5), rounds=1))
    for rung in ("five-stage-fp32", "static-fp32"):
        assert "in the only round. That proves nothing" in said_of(rung, said)
    assert not any("proven:" in text for text in said)


def test_a_cpu_says_what_it_cannot_show(tmp_path):
    said = " ".join(verdict(a_ladder(tmp_path / "x")))
    assert "these times say nothing about GPUs" in said
    assert "The static pipeline can be slower than stock on a CPU" in said
    assert "--rungs full" not in said
    said = " ".join(verdict(a_ladder(tmp_path / "y", machine=H200)))
    assert "on a CPU" not in said
    assert "`dlrm-bench ladder --rungs full" in said


def test_losses(tmp_path):
    folder = a_ladder(tmp_path / "x")
    assert "first losses are equal to the last bit" in " ".join(verdict(folder))
    ladder = json.loads((folder / LADDER_JSON).read_text())
    for difference, text in ((2e-7, "differ by at most 2e-07 of their value"), (None, "unknown whether all rungs")):
        ladder["rungs"][1]["loss_difference"] = difference
        (folder / LADDER_JSON).write_text(json.dumps(ladder))
        assert text in " ".join(verdict(folder))


def test_the_latest_ladder_of_a_folder(tmp_path, capsys):
    """The last one written: where a clock is wrong, a checkout's own records may have later names."""
    ladders = [a_ladder(tmp_path / name, rounds=1) for name in ("20261122T000000Z-ladder", "20200101T000000Z-ladder")]
    for time, ladder in enumerate(ladders):
        os.utime(ladder / LADDER_JSON, (time, time))
    assert latest_ladder(tmp_path) == ladders[1]
    assert latest_ladder(ladders[0]) == ladders[0]
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"What {ladders[1]} shows:\n\n  - stock-fp32: stock TorchRec")


@pytest.mark.parametrize("arguments", [["a", "b"], ["--help"], ["nothing"]])
def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "name one folder" in line or "name the folder of a ladder" in line
