"""dlrm-bench scale: a table for each record, checks, a picture, and errors that name the flag."""

import re

import pytest

from dlrm_bench.bench import ROOT, cli
from dlrm_bench.bench.scale.command import KNOWN_ERRORS, _network
from dlrm_bench.dlrm.runtime.topology import INFINIBAND_400G, P2P
from tests.bench.made_records import configured, profile, recorded_runs, write

RESULTS = ROOT / "results"
LIMITS = ["--limits", str(RESULTS / "06-4xh200-512-a-gpu-ceilings-bf16")]
LADDER = RESULTS / "05-4xh200-512-a-gpu-full-ladder"
STATIC, STOCK = (str(LADDER / rung) for rung in ("00-peer-memory-bf16", "00-stock"))


def test_tables_checks_and_picture(tmp_path, capsys):
    other = str(RESULTS / "07-4xh200-512-a-gpu-first-and-last-rung" / "00-peer-memory-bf16")
    flags = ["--nodes", "1", "2", "--gpus-per-node", "2", "--picture", str(tmp_path / "scale.svg"), "--check", other]
    assert cli.main(["scale", STATIC, STOCK, *LIMITS, *flags]) == 0
    text = capsys.readouterr().out
    assert "a model, not a measurement" in text
    assert re.search(r"static, fitted to \S+: GPU work x \d", text)
    assert re.search(r"torchrec, fitted to \S+: host time 15\.\d\d ms", text)
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) +([\d.]+) +(GPU|host|network|NVLink|dependencies)", text, re.MULTILINE)
    assert [row[:3] for row in rows] == [("1", "2", "1024"), ("2", "4", "2048")] * 2
    assert [row[4] for row in rows[2:]] == ["host", "host"]
    assert re.search(r"0\.\d+ +0\.483 +[-+]\d+\.\d% +0\.\d+ +[-+]\d", text), "model, period, latency, differences"
    assert KNOWN_ERRORS in text
    assert "leaves out contention" in text
    assert (tmp_path / "scale.svg").read_text().count("<path") > 5


def test_records_of_one_id_have_a_curve_each(tmp_path):
    """Runs of ladders are named by round and rung."""
    other = str(RESULTS / "07-4xh200-512-a-gpu-first-and-last-rung" / "00-peer-memory-bf16")
    picture = tmp_path / "scale.svg"
    assert cli.main(["scale", STATIC, other, *LIMITS, "--nodes", "1", "2", "--picture", str(picture)]) == 0
    assert picture.read_text().count(">static (00-peer-memory-bf16)<") == 2


def test_a_network_has_a_name_and_figures_of_its_own():
    assert _network("p2p", None, None) == P2P
    assert _network("infiniband-400g", None, None) == INFINIBAND_400G
    stated = _network("p2p", 45, None)
    assert (stated.name, stated.bytes_per_us, stated.latency_us) == ("stated", 45e3, P2P.latency_us)
    assert _network("p2p", None, 7).latency_us == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([STATIC, "--nodes", "0"], "--nodes and --gpus-per-node must be whole numbers above 0"),
        ([STATIC, "--network-gb-s", "0"], "--network-gb-s must be above 0"),
        ([STATIC, "--nodes", "1", "--gpus-per-node", "2", "--global-batch-size", "5"], "does not split into 2 parts"),
        ([STATIC, "--nodes", "1", "--global-batch-size", "0"], "--global-batch-size is 0: it must be positive"),
        ([], "name at least one record"),
    ],
)
def test_what_is_wrong_is_said(flags, message, capsys):
    assert cli.main(["scale", *flags, *LIMITS]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flag", [(), (STATIC, "--check")])
def test_a_profiled_run_is_refused(flag, tmp_path, capsys):
    """Its latencies include the profiler."""
    profiled = write(tmp_path / "host", recorded_runs()[0], profile=profile())
    assert cli.main(["scale", *flag, str(profiled), *LIMITS, "--nodes", "1"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{profiled} is a profiled run, whose latencies include the profiler: name timed runs" in said


def test_a_record_that_no_model_fits_is_named(tmp_path, capsys):
    other = write(tmp_path / "other", recorded_runs()[0], config=configured(pipeline="static", precision="tf32"))
    assert cli.main(["scale", STATIC, *LIMITS, "--nodes", "1", "--check", str(other)]) == 0
    said = capsys.readouterr().out
    assert "checked against other records" not in said
    assert "other is not checked: no record given has its benchmark, pipeline and precision" in said
