"""The printed plan names every table once and adds up to the model's size; whole tables are TorchRec's."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.plan.plan_table import measured_costs, print_plan, topology_of
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.limits import read_limits
from dlrm_bench.dlrm.benchmarks import BENCHMARKS, named
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.runtime.gpu_types import H200
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.planner import make_plan
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.torchrec.sharding import Sharders, _plan_of_all
from tests.pipelines import changed


def printed(capsys: pytest.CaptureFixture[str], name: str, world_size: int) -> str:
    print_plan(replace(preset(name), precision="bf16"), Topology.of(world_size, 8))
    return capsys.readouterr().out


def rows(text: str) -> dict[str, list[float]]:
    """Columns, us of tables and of all, and GB of tables and state, by rank."""
    found = re.findall(r"^ +(\d+) .*? (\d+) +(\d+) +(\d+) +([\d.]+) +([\d.]+) *$", text, re.MULTILINE)
    return {rank: [float(value) for value in values] for rank, *values in found}


def test_mlperf_model_on_eight_ranks(capsys):
    text = printed(capsys, "mlperf-dcnv2", 8)
    by_rank = rows(text)
    assert list(by_rank) == [str(rank) for rank in range(8)]
    # 209 GB of tables and state; 18 of the 26 tables are not replicated.
    assert sum(sum(values[-2:]) for values in by_rank.values()) == pytest.approx(209, rel=0.02)
    assert sum(columns for columns, *_ in by_rank.values()) == 18 * 128
    for name, at in (("tables", 1), ("all", 2)):
        times = [values[at] for values in by_rank.values()]
        ratio = float(re.findall(rf"{name} ([\d.]+)", text)[0])
        assert ratio == pytest.approx(max(times) * 8 / sum(times), abs=2e-3)
    (iteration,) = re.findall(r"all ranks wait for: (\d+) us", text)
    assert max(us for _, _, us, *_ in by_rank.values()) <= float(iteration)
    plan = make_plan(MLPERF_MODEL.tables, Topology.one_node(8), 55296)
    for feature in range(26):
        parts = sorted((int(start), int(end)) for start, end in re.findall(rf"cat_{feature}\[(\d+):(\d+)\]", text))
        if feature in plan.replicated:
            assert len(re.findall(rf"cat_{feature}\b(?!\[)", text)) == 1
        else:
            assert parts == sorted((s.column, s.column + s.columns) for s in plan.shards if s.table == feature)


def test_one_rank_holds_everything(capsys):
    text = printed(capsys, "smoke", 1)
    assert all(re.search(rf"cat_{feature}\b", text) for feature in range(26))
    assert re.search(r"tables 1\.000, all 1\.000", text)


LIMITS = read_limits(ROOT / "results" / "06-4xh200-512-a-gpu-ceilings-bf16")


def test_costs_come_from_measured_limits():
    """The committed limits of four H200: 3.4 MB exchanged in 25.6 us, 0.44 MB in 15.2 us, and memory at 4.2 TB/s."""
    costs = measured_costs(LIMITS)
    for amount, us in ((438272, 15.2), (3407872, 25.9)):
        assert costs.all_to_all_us + amount * 3 / 4 / costs.all_to_all_bytes_per_us == pytest.approx(us, rel=0.01)
    assert costs.memory_bytes_per_us == pytest.approx(2 * 2**30 / 507.5, rel=1e-3)
    assert costs.memory_bytes == 150_100_000_000
    assert costs.cache_bytes_per_us == pytest.approx(H200.costs.cache_bytes_per_us, rel=0.01)
    assert costs.measured_on.startswith(f"NVIDIA H200 (limits {LIMITS['id']}")


def test_a_gpu_of_half_the_memory_rate_takes_twice_as_long_for_its_tables():
    slow = copy.deepcopy(LIMITS)
    slow["machine"]["gpu"] = "NVIDIA Unknown"
    for ceiling in slow["ceilings"]:
        ceiling["ms"] *= 2
    assert measured_costs(slow).sort_us_per_million_ids == pytest.approx(
        2 * H200.costs.sort_us_per_million_ids, rel=0.01
    )
    assert measured_costs(slow).all_to_all_us == pytest.approx(2 * measured_costs(LIMITS).all_to_all_us)


def test_the_host_memory_of_a_gpu_is_its_share_of_a_node():
    two_nodes = copy.deepcopy(LIMITS)
    two_nodes["machine"]["nodes"] = 2  # its GPUs are those of both
    assert measured_costs(two_nodes).host_memory_bytes == pytest.approx(2 * measured_costs(LIMITS).host_memory_bytes)


def test_limits_that_tell_no_costs_are_refused():
    alone, flat = copy.deepcopy(LIMITS), copy.deepcopy(LIMITS)
    alone["config"]["world_size"] = alone["machine"]["gpus"] = 1
    with pytest.raises(ValueError, match=r"measured on 1 rank\(s\) with 1 GPU\(s\): a plan's costs need at least two"):
        measured_costs(alone)
    for ceiling in flat["ceilings"]:
        ceiling["ms"] = 1.0
    with pytest.raises(ValueError, match="took no more time for more bytes"):
        measured_costs(flat)


def test_the_table_says_whose_costs_it_shows(capsys):
    assert "By the costs of NVIDIA H200\n" in printed(capsys, "launch-bound", 4).replace(" \n", "\n")
    print_plan(preset("launch-bound"), Topology.of(4, 8), measured_costs(LIMITS))
    assert f"(limits{LIMITS['id']};" in "".join(capsys.readouterr().out.split())


def test_many_nodes_split_the_hottest_table_by_rows(capsys):
    config = changed(preset("launch-bound"), "static", presort_ids=True, precision="bf16")
    print_plan(config, topology_of(32, None, None))
    text = capsys.readouterr().out
    assert "on 32 rank(s) of 4 nodes, global batch 16384" in " ".join(text.split())
    assert "between nodes one 400 Gb/s adapter a GPU, stated" in " ".join(text.split())
    parts = {int(parts) for parts in re.findall(r"cat_20\[\d+:\d+\]\(\d+/(\d+)\)", text)}
    assert len(parts) == 1
    assert max(parts) > 1
    assert float(re.findall(r"tables ([\d.]+), all", text)[0]) <= 1.15
    print_plan(config, topology_of(8, 4, 100.0))
    assert "between nodes 100 GB/s a GPU, given" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ((0, None, None), "--print-plan 0: a plan is for at least one rank"),
        ((8, 0, None), "--gpus-per-node 0: a node has at least one GPU"),
        ((12, None, None), "12 ranks do not fill nodes of 8 GPUs: use a multiple of 8"),
        ((16, 8, -1.0), "--network-gb-s -1.0: give GB/s of one GPU"),
    ],
)
def test_bad_topologies_are_refused(topology, message):
    with pytest.raises(ValueError, match=message):
        topology_of(*topology)


def test_tables_by_rows_are_alike_on_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """DLRMv4's 559 GiB; the reference's own figure for eight ranks is 70 GiB each."""
    for ranks, tables_gb in ((8, 600.17 / 8), (128, 600.17 / 128)):
        print_plan(preset("mlperf-dlrmv4"), Topology.of(ranks, 8))
        text = capsys.readouterr().out
        assert f"on {ranks} rank(s)" in text
        assert f"global batch {1024 * ranks}" in text
        (total,) = re.findall(r"all +293,051,712 +[\d,]+ +([\d.]+) +[\d.]+", text)
        assert float(total) == pytest.approx(tables_gb, rel=1e-3)
        kept = re.findall(r"([\d.]+) GB of activations .* --model.kernels fused(.*) \(2,082 tokens a sample\)", text)
        assert kept == [("39.3", ""), ("13.1", " --model.recompute-layers")]
        assert len(re.findall(r"^ +\w+ +[\d,]+ +[\d,]+ +[\d.]+", text, re.MULTILINE)) == 11 + 1
    with pytest.raises(
        ValueError, match=r"150\.3 GB of the [\d.]+ GB that a rank has; use more GPUs or choose --preset"
    ):
        print_plan(preset("mlperf-dlrmv4"), Topology.of(4, 8))


def test_rows_made_when_named_take_what_they_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(preset("mlperf-dlrmv4"), pipeline=StaticOptions(dynamic_rows=60_000_000))
    print_plan(config, Topology.of(2, 8))
    text = " ".join(capsys.readouterr().out.split())
    assert "at most 60,000,000 per rank, 40.9% of all 293,051,712; 126.5 GB per rank" in text
    assert "7.4 of 133.9 GB are left" in text
    more = replace(config, pipeline=StaticOptions(dynamic_rows=70_000_000))
    with pytest.raises(ValueError, match=r"--dynamic-rows 70000000: rows, state and map take 149\.1 GB of the 133\.9"):
        print_plan(more, Topology.of(2, 8))


def test_pooled_tables_whose_rows_are_made_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """On two GPUs that could not hold all rows of them."""
    few = changed(preset("mlperf-dcnv2"), "static", dynamic_rows=40_000_000)
    print_plan(few, Topology.one_node(2))
    text = capsys.readouterr().out
    assert re.findall(r"cat_\d+\[", text) == []
    assert {int(table) for table in re.findall(r"cat_(\d+)", text)} == set(range(26))
    assert not re.search(r"^ +all +cat", text, re.MULTILINE), "none is replicated"
    words = " ".join(text.split())
    assert "at most 40,000,000 per rank, 39.2% of all 204,184,588; 4" in words
    more = changed(few, dynamic_rows=150_000_000)
    with pytest.raises(ValueError, match=r"--dynamic-rows 150000000: rows, state and map take 1\d\d\.\d GB of the"):
        print_plan(more, Topology.one_node(2))


def test_the_plan_of_raw_ids_says_that_rows_are_expected(capsys: pytest.CaptureFixture[str]) -> None:
    numbered = changed(preset("mlperf-dcnv2"), "static", dynamic_rows=40_000_000)
    needed = []
    for config in (numbered, changed(numbered, model=replace(numbered.model, raw_ids=True))):
        print_plan(config, Topology.one_node(2))
        words = " ".join(capsys.readouterr().out.split())
        needed += [float(found) for found in re.findall(r"; ([\d.]+) GB per rank with state, map", words)]
    assert "39.2% of all 204,184,588 that are expected; 4" in words
    assert words.endswith("The table shows the memory of all expected rows (--model.num-embeddings)")
    assert needed[1] - needed[0] == pytest.approx(4e-9 * (1 << 27), abs=0.11), "the table of each slot"


def test_constraints_are_obeyed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(preset("launch-bound"), "static", constraints=("0,9=column-wise:32", "20=table-wise"))
    print_plan(config, Topology.one_node(2))
    text = capsys.readouterr().out
    assert "as asked: --constraints cat_0,cat_9=column-wise:32 cat_20=table-wise" in text
    assert len(re.findall(r"cat_9\[\d+:\d+\]", text)) == 4
    assert re.search(r"cat_20(?!\[)", text)
    with pytest.raises(ValueError, match="--constraints: --print-plan shows the static pipeline's plan"):
        print_plan(changed(preset("launch-bound"), "torchrec", constraints=("0=table-wise",)), Topology.one_node(2))


NOT_STATIC = tuple(name for of in BENCHMARKS for name in of.presets if "static" not in of.pipelines)


@pytest.mark.parametrize("name", NOT_STATIC)
def test_whole_tables_are_printed_where_the_pipelines_put_them(capsys: pytest.CaptureFixture[str], name: str) -> None:
    config, world_size = preset(name), 4
    print_plan(config, Topology.of(world_size, 8))
    text = capsys.readouterr().out
    assert f"{name} with --pipeline torchrec or five-stage on 4 rank(s)" in " ".join(text.split())
    assert "us" not in text.split(), "nothing is predicted"
    printed_rows = re.findall(r"^ +(\d) +(.+?) +([\d.e-]+) +([\d.e-]+) *$", text, re.MULTILINE)
    assert [int(rank) for rank, *_ in printed_rows] == list(range(world_size))
    ranks = Ranks(rank=0, local_rank=0, world_size=world_size, local_world_size=world_size, device=torch.device("cpu"))
    model = named(config.benchmark).parts().torchrec_model(config, ranks)
    collections = {
        path: part
        for path, part in model.module.named_modules()
        if isinstance(part, EmbeddingBagCollection | EmbeddingCollection)
    }
    plan = _plan_of_all(collections, config.model.tables, Sharders.of_torchrec(None, False), ranks, model.by_rows).plan
    owners = {table.removeprefix("t_"): of.ranks for part in plan.values() for table, of in part.items()}
    assert {name: [int(rank)] for rank, names, *_ in printed_rows for name in names.split()} == owners
    total = sum(float(weights) for *_, weights, _ in printed_rows)
    assert total == pytest.approx(config.model.tables.bytes / 1e9, rel=0.01)


def test_whole_tables_that_do_not_fit_or_are_constrained_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config, small = preset("hstu-small"), replace(H200.costs, memory_bytes=24_000_000_000)
    with pytest.raises(ValueError, match=r"rank 2 holds event_2, user_1, user_5, .* need 26\.6 GB .* has 22\.8 GB"):
        print_plan(config, Topology.one_node(4), small)
    print_plan(config, topology_of(16, None, None))
    assert "presort" not in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"--constraints: this model's tables are assigned round-robin.*; leave it out"
    ):
        print_plan(changed(config, constraints=("0=table-wise",)), Topology.one_node(4))
