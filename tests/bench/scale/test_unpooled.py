"""The model of tables that are not pooled, against committed records and the reference's published runs."""

import re
from dataclasses import replace
from typing import Any

import pytest

from dlrm_bench.bench import ROOT, cli
from dlrm_bench.bench.records.record import Record, read_record
from dlrm_bench.bench.scale.scaling import period_ms
from dlrm_bench.bench.scale.unpooled import KNOWN_ERRORS, ROOM, UnpooledScaling, fit_unpooled, is_unpooled
from dlrm_bench.dlrm.runtime.topology import Network, Topology
from dlrm_bench.dlrm.tables.sequence.capacity import IdCapacity

RESULTS = ROOT / "results"
LARGE = "66-1xh200-dlrmv4-1024-samples/00-cuda-graph"
SMALL = "65-1xh200-dlrmv4-128-samples/00-cuda-graph"
TWO = "64-2xh200-dlrmv4-static-pipeline/static-1024"
STOCK = "66-1xh200-dlrmv4-1024-samples/00-fused"
POOLED = "05-4xh200-512-a-gpu-full-ladder/00-peer-memory-bf16"
OTHER = "58-2xh200-iteration-graph/zoo-dlrm-00-stock"
LIMITS = ["--limits", str(RESULTS / "29-2xh200-512-a-gpu-ceilings-bf16")]


def record(path: str) -> Record:
    return read_record(RESULTS / path)


def fitted(path: str) -> UnpooledScaling:
    return fit_unpooled(record(path))


@pytest.mark.parametrize("path", [LARGE, SMALL, TWO])
def test_it_says_the_record_that_it_is_fitted_to(path: str) -> None:
    read = record(path)
    assert is_unpooled(read.run)
    assert fitted(path).ms_of(read.run) == pytest.approx(period_ms(read), rel=1e-6)


def test_the_known_errors_are_those_of_the_records() -> None:
    scaling, two = fitted(LARGE), record(TWO)
    same_sizes = scaling.steady(Topology.one_node(2), 1024).iteration_us / 1e3
    by_sizes, took = scaling.ms_of(two.run), period_ms(two)
    assert f"{same_sizes:.1f} ms for two" in KNOWN_ERRORS
    assert f"took {took:.1f}" in KNOWN_ERRORS
    assert f"says {by_sizes:.0f}, {by_sizes / took - 1:.0%}".replace("%", " %") in KNOWN_ERRORS


def test_lists_have_the_room_of_record_64() -> None:
    run = record(TWO).run
    room = run["pipeline"]["rooms"]["iteration"]["room_for_rows"]
    sizes = run["sample_sizes"]
    assert sizes is not None
    entries = 2 * IdCapacity((10**6,), room).list_entries(2)
    assert entries / (1024 * sizes["rows"]) == pytest.approx(ROOM, abs=0.05)


def test_operations_and_samples_scale_the_gpus_work() -> None:
    """Fitted to 1,024 samples, the model is 10 % off at 128, on one GPU each."""
    scaling, alone = fitted(LARGE), Topology.one_node(1)
    one = scaling.steady(alone, 1024).iteration_us
    assert scaling.steady(alone, 1024, operations=1.5).iteration_us == pytest.approx(1.5 * one)
    assert scaling.steady(alone, 512).iteration_us == pytest.approx(one / 2)
    small = record(SMALL)
    assert scaling.ms_of(small.run) == pytest.approx(period_ms(small), rel=0.15)


def test_more_ranks_add_exchanges_and_the_slowest_rank() -> None:
    """All of the network's time is in the chain."""
    scaling, nodes = fitted(LARGE), Topology.of(16, 8)
    iteration, gpu = (scaling.steady(nodes, 1024), scaling.gpu_us * 1.02)
    assert iteration.busy_us["GPU"] == pytest.approx(gpu)
    ideal = replace(nodes, network=Network(name="", bytes_per_us=float("inf"), latency_us=0.0))
    assert gpu < scaling.steady(ideal, 1024).iteration_us < iteration.iteration_us
    one_row = 2048 * scaling.sizes["rows"] * 1024 * 16**0.73 * ROOM / 16
    leaves = iteration.busy_us["network"] * nodes.network.bytes_per_us  # rows, their gradients, and 15.2 M weights
    assert leaves == pytest.approx(2 * 8 * one_row, rel=0.1)
    data: Any = scaling.training.data
    by_users = replace(scaling, training=replace(scaling.training, data=replace(data, deal="users")))
    assert by_users.steady(nodes, 1024).busy_us["network"] < iteration.busy_us["network"] / 2
    evaluation = scaling.steady(nodes, 1024, trains=False)
    assert evaluation.busy_us["network"] < iteration.busy_us["network"] / 2


def test_tables_of_both_sizes_stand_beside_published_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Without limits; minutes where the reference has convergence points."""
    check = ["--check", str(RESULTS / TWO)]
    assert cli.main(["scale", *(str(RESULTS / path) for path in (LARGE, SMALL)), "--nodes", "1", "4", "8", *check]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d+ +\d+ +\d+ +\d+\.\d ", line)]
    assert [row[:3] for row in rows[:3]] == [["1", "8", "8192"], ["4", "32", "32768"], ["8", "64", "65536"]]
    assert [len(row) for row in rows] == [10, 10, 9, 9, 9, 10]
    assert float(rows[0][3]) < float(rows[0][4]) < float(rows[1][4])
    published = [line for line in text.splitlines() if "MI350X" in line]
    assert [line.split()[0] for line in published] == ["8", "32", "8"]
    assert re.search(r"730\.9 +84\.9 +159\.6 +125\.6 +8 ", published[0]), "without 24 evaluations"
    assert re.search(r"730\.9 +84\.9 +159\.6 +125\.6 +64 ", published[2])
    assert re.search(r"B200, .*631\.7 +8 +\d", text), "its step alone is known"
    assert re.search(r"v4-1024 +1 +2 +1024 +00-cuda-graph +252\.\d+ +210\.6\d+ +\+20\.\d%", text)
    assert KNOWN_ERRORS in text
    assert "AMD counted 50,000 rows" in text


def test_a_global_batch_is_split_among_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nodes", "1", "8", "--global-batch-size", "8192"]
    assert cli.main(["scale", str(RESULTS / LARGE), *flags]) == 0
    one, eight = re.findall(r"^ +[18] +\d+ +8192 .* ([\d.]+)  $", capsys.readouterr().out, re.MULTILINE)[:2]
    assert 5 * float(eight) < float(one) < 8 * float(eight)


@pytest.mark.parametrize(
    ("path", "flags", "message"),
    [
        (STOCK, LIMITS, "is of pipeline torchrec with tables that are not pooled"),
        (STOCK, [], "give one of --pipeline static"),
        (POOLED, [], "record 00-peer-memory-bf16 needs --limits"),
        (OTHER, LIMITS, "are of another dense network than that of record"),
    ],
)
def test_what_it_does_not_model_is_refused(
    path: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also records of other benchmarks beside limits of the first one, which the model once took."""
    assert cli.main(["scale", str(RESULTS / path), "--nodes", "1", *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
