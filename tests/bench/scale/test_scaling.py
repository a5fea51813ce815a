"""The model against committed records of other numbers of GPUs, and its properties for all figures."""

from dataclasses import replace

import numpy as np
import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.records.limits import read_limits
from dlrm_bench.bench.records.record import Record, read_record
from dlrm_bench.bench.report.published import PUBLISHED
from dlrm_bench.bench.scale.command import KNOWN_ERRORS
from dlrm_bench.bench.scale.scaling import IDEAL, Scaling, fit, kind_of, period_ms, plan_in
from dlrm_bench.bench.scale.simulation import simulate
from dlrm_bench.bench.scale.work import System, plan_on
from dlrm_bench.dlrm.benchmarks import restored
from dlrm_bench.dlrm.runtime.gpu_types import H100, H200
from dlrm_bench.dlrm.runtime.topology import INFINIBAND_400G, Network, Topology
from dlrm_bench.dlrm.runtime.topology import P2P as P2P_NETWORK
from dlrm_bench.pipeline.static.options import StaticOptions
from tests.bench.made_records import configured, recorded_runs, write
from tests.bench.records.test_limits import some_limits

RESULTS = ROOT / "results"
LIMITS = read_limits(RESULTS / "06-4xh200-512-a-gpu-ceilings-bf16")
SMALL = "14-2xh200-512-a-gpu-fused-cross-network/before/09-old-512"
LARGE = "13-2xh200-6912-a-gpu-fused-cross-network/before/01-old-6912"
TENTH, P2P = "18-2xh200-as-two-nodes", "40-4xh200-as-two-nodes-p2p"
FOUR = "72-4xh100-one-two-and-four-gpus"
OF_TENTH = ("512-one-gpu", "512-peer", "6912-one-gpu", "6912-peer")


def record(path: str) -> Record:
    return read_record(RESULTS / path)


def fitted(path: str) -> Scaling:
    read = record(path)
    return fit(read, LIMITS, H200.costs)


@pytest.mark.parametrize(
    ("path", "other"),
    [
        (SMALL, "05-4xh200-512-a-gpu-full-ladder/00-peer-memory-bf16"),
        (SMALL, "07-4xh200-512-a-gpu-first-and-last-rung/00-peer-memory-bf16"),
        (LARGE, "08-4xh200-6912-a-gpu-first-and-last-rung/00-peer-memory-bf16"),
        ("05-4xh200-512-a-gpu-full-ladder/00-stock", "01-8xh200-512-a-gpu-stock"),
    ],
)
def test_fitted_to_one_number_of_gpus_it_predicts_another_within_a_tenth(path, other):
    scaling, own, read = fitted(path), record(path), record(other)
    assert scaling.ms_of(own.run) == pytest.approx(period_ms(own), rel=0.01)
    assert read.run["config"]["world_size"] != own.run["config"]["world_size"]
    assert kind_of(read.run) == scaling.kind
    assert scaling.ms_of(read.run) == pytest.approx(period_ms(read), rel=0.1)


@pytest.mark.parametrize("job", [TENTH, P2P])
@pytest.mark.parametrize("fitted_to", OF_TENTH)
def test_fitted_to_one_number_of_gpus_and_batch_it_predicts_others_within_a_tenth(job, fitted_to):
    """Records of one job on one machine, with tables of a tenth; the largest error is four GPUs by one, 9 % too
    little."""
    scaling = fitted(f"{job}/{fitted_to}")
    for path in (*OF_TENTH, *(["512-four-gpus"] if job == P2P else [])):
        read = record(f"{job}/{path}")
        assert scaling.ms_of(read.run) == pytest.approx(period_ms(read), rel=0.1), path


@pytest.mark.parametrize("path", ["512-sockets", "6912-sockets"])
def test_fitted_to_one_gpu_it_predicts_two_nodes_over_a_slow_network(path):
    """4 GB/s, what loopback's sockets carried in that job."""
    read, sockets = record(f"{TENTH}/{path}"), Network(name="sockets", bytes_per_us=4e3, latency_us=20.0)
    assert fitted(f"{TENTH}/512-one-gpu").ms_of(read.run, sockets) == pytest.approx(period_ms(read), rel=0.15)


def off(scaling: Scaling, path: str, network: Network, job: str = P2P) -> tuple[float, float]:
    """How far the model is off a record's period, and off its slowest rank's median."""
    read = record(f"{job}/{path}")
    said = scaling.ms_of(read.run, network)
    return said / period_ms(read) - 1, said / float(np.median(read.latencies_ms)) - 1


def test_the_known_errors_are_those_of_the_records():
    """What KNOWN_ERRORS says, by the figures in it; the gain that the logs show, and the model does not."""
    fits = [fitted(f"{P2P}/{name}") for name in ("512-one-gpu", "6912-one-gpu")]
    four = [off(scaling, "512-four-gpus", INFINIBAND_400G) for scaling in fits]
    assert all(-0.095 < period < -0.08 and -0.125 < latency < -0.11 for period, latency in four)
    for scaling in (fitted(f"{FOUR}/timed-{gpus}") for gpus in (1, 2)):
        period, latency = off(scaling, "timed-4", INFINIBAND_400G, FOUR)
        assert -0.115 < period < -0.085
        assert -0.135 < latency < -0.11
    for scaling in fits:
        assert 0.985 < off(scaling, "512-p2p", INFINIBAND_400G)[0] < 1.005
        assert abs(off(scaling, "512-p2p", P2P_NETWORK)[0]) < 0.01
        assert -0.075 < off(scaling, "6912-p2p", INFINIBAND_400G)[0] < -0.055
        assert -0.125 < off(scaling, "6912-p2p", P2P_NETWORK)[0] < -0.095
    said = fitted("27-2xh200-512-a-gpu-shared-sort/last/00")
    h100 = replace(said, system=System(limits=said.system.limits, costs=H100.costs))
    on = [(Topology.of(gpus, 8), 135168 // gpus) for gpus in (64, 128)]
    model = [h100.steady(h100.load(topology, batch), topology).iteration_us / 1e3 for topology, batch in on]
    assert model == pytest.approx([1.31, 1.32], abs=0.006)
    logs = {p.system: p.ms_per_iteration for p in PUBLISHED["dlrm_dcnv2"] if p.global_batch_size == 135168}
    assert (round(logs["64 x H100"], 2), round(logs["128 x H100"], 2)) == (2.35, 1.77)
    for figure in (
        "8 to 9 %",
        "11 to 12 %",
        "9 to 11 and 11 to 13 %",
        "99 to 100 %",
        "within 1 %",
        "1.31 and 1.32",
        "2.35 and 1.77",
        "1.33 times",
    ):
        assert figure in KNOWN_ERRORS


def test_stages_agree_with_a_trace():
    """Those whose kernels do not wait for other ranks, by an eighth of an iteration."""
    read = record("05-4xh200-512-a-gpu-full-ladder/host-peer-memory-bf16")
    point = fitted("05-4xh200-512-a-gpu-full-ladder/00-peer-memory-bf16").point(Topology.one_node(4))
    stages = read.run["stages_ms"]
    assert stages is not None
    for stage in ("embedding_backward", "embedding_forward", "input_dist"):
        assert abs(point.stages_us[stage] / 1e3 - stages[stage]) < period_ms(read) / 8


def test_a_record_is_taken_by_its_own_plan():
    """Four GPUs of record 40 are pairs with 64 columns, as its planner made them."""
    run = record(f"{P2P}/512-four-gpus").run
    plan = plan_in(run)
    assert plan is not None
    plan.check(restored(run["config"]).model.tables)
    assert [len(plan.of_rank(rank)) for rank in range(4)] == [9, 9, 17, 17]
    assert {shard.columns for shard in plan.shards} == {64}
    assert plan.replicated == (), "in peer memory of one node"
    assert plan_in(record("05-4xh200-512-a-gpu-full-ladder/00-stock").run) is None


@pytest.mark.parametrize("gpus", [1, 2])
def test_plans_in_which_every_rank_sorts_the_largest_table_are_as_fast(gpus):
    """Two plans for four GPUs: all share each sort, or pairs. In record 72 one rank sorted the largest table for the
    others, and sent its ids to three ranks or to one."""
    scaling = fitted(f"{FOUR}/timed-{gpus}")
    shared, pairs = (record(f"{FOUR}/timed-{name}") for name in ("4", "4-old-plan"))
    assert 1.01 < period_ms(shared) / period_ms(pairs) < 1.015
    assert 0.995 < scaling.ms_of(shared.run) / scaling.ms_of(pairs.run) < 1.005


def test_a_record_without_pooled_tables_is_refused():
    run = record(f"{P2P}/512-four-gpus").run
    pipeline = {name: value for name, value in run["pipeline"].items() if name != "plan"}
    with pytest.raises(ValueError, match="which scale does not model"):
        plan_in({**run, "pipeline": pipeline})


def test_a_period_is_no_slowest_rank():
    read = record(f"{P2P}/512-four-gpus")
    times = np.array([[1.0, 3.0, 1.0, 3.0], [3.0, 1.0, 3.0, 1.0]], np.float32)
    turns = replace(read, run={**read.run, "warmup_iterations": 1}, iterations_ms=times)
    assert period_ms(turns) == 2.0
    with pytest.raises(ValueError, match="ended in the warm-up"):
        period_ms(replace(turns, iterations_ms=times[:, :1]))


def test_a_faster_network_never_slows_and_what_is_needed_is_enough():
    scaling, topology = fitted(SMALL), Topology.of(4, 2)
    point, load = scaling.point(topology), scaling.load(topology)
    assert point.needed_gb_s is not None

    def us(network: Network) -> float:
        return scaling.steady(load, replace(topology, network=network)).iteration_us

    needed = replace(topology.network, bytes_per_us=point.needed_gb_s * 1.01e3)
    assert us(IDEAL) <= us(needed) <= 1.1 * us(IDEAL)
    assert us(replace(needed, bytes_per_us=needed.bytes_per_us / 2)) > 1.1 * us(IDEAL)
    assert scaling.point(Topology.one_node(4)).needed_gb_s == 0
    late = replace(topology.network, latency_us=1e4)
    of_late = scaling.point(replace(topology, network=late))
    assert of_late.needed_gb_s is None
    assert of_late.needed_us is not None
    late = replace(late, bytes_per_us=float("inf"), message_us=late.message_us * of_late.needed_us / late.latency_us)
    assert us(replace(late, latency_us=of_late.needed_us)) <= 1.101 * us(IDEAL)
    assert us(replace(late, latency_us=of_late.needed_us * 2)) > 1.1 * us(IDEAL)


@pytest.mark.parametrize("kind", ["torchrec", "five-stage", "static"])
@pytest.mark.parametrize("batch", [512, 6912])
def test_every_resource_has_its_work(kind, batch):
    scaling, topology = fitted(SMALL), Topology.of(4, 2)
    scaling = replace(scaling, kind=kind, fit=replace(scaling.fit, host_us=900))
    tasks = scaling.tasks(scaling.load(topology, batch), topology)
    steady = simulate(tasks)
    for resource in ("GPU", "NVLink", "network", "PCIe"):
        assert 0 < steady.busy_us[resource] <= steady.iteration_us * 1.001
    assert ("host" in steady.busy_us) == (kind != "static")
    assert steady.iteration_us >= 0.999 * steady.busy_us.get("host", 0)


@pytest.mark.parametrize("peer_memory", [False, True])
def test_plan_and_parts_are_those_of_the_static_pipeline(peer_memory):
    """Rows are split, and small tables replicated, where StaticOptions say so; the batch goes in as many parts."""
    scaling = replace(fitted(SMALL), peer_memory=peer_memory)
    options = StaticOptions(presort_ids=True, peer_memory=peer_memory)
    for topology in (Topology.one_node(4), Topology.of(4, 2)):
        plan = plan_on(topology, scaling.training, H200.costs, options)
        assert bool(plan.replicated) == options.replicates(topology.nodes)
        assert options.splits_rows(topology.nodes) or all(shard.row_parts == 1 for shard in plan.shards)
    topology = Topology.one_node(4)
    lookups = [
        sum(task.name.startswith("lookup") for task in scaling.tasks(scaling.load(topology, batch), topology))
        for batch in (512, 6912, 6911)
    ]
    assert lookups == [1, 2, 1]


def test_a_record_that_links_alone_make_slower_is_refused():
    read = record(SMALL)
    slow = {**LIMITS, "ceilings": [{**c, "ms": c["ms"] * 100} for c in LIMITS["ceilings"]]}
    with pytest.raises(ValueError, match="give limits of its machine"):
        fit(read, slow, H200.costs)  # type: ignore[arg-type]


def test_a_record_that_its_work_does_not_explain_is_refused(tmp_path):
    """A run that waits for data, say: no factor on the GPU's work makes the model as slow."""
    config = configured(pipeline="static")
    plan = [
        [{"table": name, "column": 0, "columns": config.model.tables.columns} for name in config.model.tables.names]
    ]
    own = {"config": config, "world_size": 1, "pipeline": {"plan": plan}}
    fast, slow = (
        read_record(write(tmp_path / name, recorded_runs()[0] * times, **own))
        for name, times in (("fast", 0.1), ("slow", 1.0))
    )
    assert fit(fast, some_limits(), H200.costs).ms_of(fast.run) == pytest.approx(period_ms(fast), rel=0.01)
    with pytest.raises(ValueError, match=r"record slow takes 22954 us .* does not model, such as data"):
        fit(slow, some_limits(), H200.costs)
