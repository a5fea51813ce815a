"""The model against committed records of other numbers of GPUs, and what it must say whatever the figures."""

from dataclasses import replace

import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.records.limits import read_limits
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.scale.scaling import IDEAL, Scaling, fit, kind_of, median_ms, model_of, prediction
from dlrm_bench.bench.scale.simulation import simulate
from dlrm_bench.bench.scale.work import tasks_of
from dlrm_bench.dlrm.gpu_costs import H200
from dlrm_bench.dlrm.topology import Network, Topology

RESULTS = ROOT / "results"
LIMITS = read_limits(RESULTS / "06-4xh200-512-a-gpu-ceilings-bf16")
SMALL = "14-2xh200-512-a-gpu-fused-cross-network/before/09-old-512"
LARGE = "13-2xh200-6912-a-gpu-fused-cross-network/before/01-old-6912"
TENTH, P2P = "18-2xh200-as-two-nodes", "40-4xh200-as-two-nodes-p2p"
OF_TENTH = ("512-one-gpu", "512-peer", "6912-one-gpu", "6912-peer")


def record(path: str):
    return read_record(RESULTS / path).run


def fitted(path: str) -> Scaling:
    run = record(path)
    return fit(run, LIMITS, H200, model_of(run))


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
    scaling, run = fitted(path), record(other)
    assert prediction(scaling, record(path)) == pytest.approx(median_ms(record(path)), rel=0.01)
    assert run["config"]["world_size"] != record(path)["config"]["world_size"]
    assert kind_of(run) == scaling.kind
    assert prediction(scaling, run) == pytest.approx(median_ms(run), rel=0.1)


@pytest.mark.parametrize("job", [TENTH, P2P])
@pytest.mark.parametrize("fitted_to", OF_TENTH)
@pytest.mark.parametrize("path", OF_TENTH)
def test_fitted_to_one_number_of_gpus_and_batch_it_predicts_others_within_a_tenth(job, fitted_to, path):
    """Of one job on one machine, tables of a tenth."""
    run = record(f"{job}/{path}")
    assert prediction(fitted(f"{job}/{fitted_to}"), run) == pytest.approx(median_ms(run), rel=0.1)


@pytest.mark.parametrize("fitted_to", OF_TENTH)
def test_it_says_less_of_four_gpus_by_no_more_than_is_known(fitted_to):
    """What grows from two to four GPUs is not in the model."""
    run = record(f"{P2P}/512-four-gpus")
    assert 0.85 < prediction(fitted(f"{P2P}/{fitted_to}"), run) / median_ms(run) < 0.92


@pytest.mark.parametrize("path", ["512-sockets", "6912-sockets"])
def test_fitted_to_one_gpu_it_predicts_two_nodes_over_a_slow_network(path):
    """4 GB/s, what loopback's sockets carried in that job."""
    run, sockets = record(f"{TENTH}/{path}"), Network(name="sockets", bytes_per_us=4e3, latency_us=20.0)
    assert prediction(fitted(f"{TENTH}/512-one-gpu"), run, sockets) == pytest.approx(median_ms(run), rel=0.15)


def test_stages_agree_with_a_trace():
    """Those whose kernels do not wait for other ranks, by an eighth of an iteration."""
    run = record("05-4xh200-512-a-gpu-full-ladder/host-peer-memory-bf16")
    point = fitted("05-4xh200-512-a-gpu-full-ladder/00-peer-memory-bf16").point(Topology.one_node(4))
    stages = run["stages_ms"]
    assert stages is not None
    for stage in ("embedding_backward", "embedding_forward", "input_dist"):
        assert abs(point.stages_us[stage] / 1e3 - stages[stage]) < median_ms(run) / 8


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
    tasks = tasks_of(kind, scaling.load(topology, batch), topology, scaling.system, replace(scaling.fit, host_us=900))
    steady = simulate(tasks)
    for resource in ("GPU", "NVLink", "network", "PCIe"):
        assert 0 < steady.busy_us[resource] <= steady.iteration_us * 1.001
    assert ("host" in steady.busy_us) == (kind != "static")
    assert steady.iteration_us >= 0.999 * steady.busy_us.get("host", 0)


def test_a_record_that_links_alone_make_slower_is_refused():
    run = record(SMALL)
    slow = {**LIMITS, "ceilings": [{**c, "ms": c["ms"] * 100} for c in LIMITS["ceilings"]]}
    with pytest.raises(ValueError, match="give limits of its machine"):
        fit(run, slow, H200, model_of(run))  # type: ignore[arg-type]
