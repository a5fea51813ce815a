"""Costs are those of the GPU's type. An unknown GPU gets another type's, and a note says so."""

from dataclasses import replace

from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.runtime.gpu_types import DEFAULT_COSTS, H100, H200, costs_of, gpu_type, note
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.planner import make_plan


def test_an_unknown_gpu_has_default_costs_and_a_note_says_so() -> None:
    assert gpu_type("NVIDIA H200") is H200
    assert gpu_type("NVIDIA A100") is gpu_type(None) is None
    assert costs_of("NVIDIA H200") is H200.costs
    assert note(H200.costs, "NVIDIA H200") == "NVIDIA H200"
    assert costs_of("NVIDIA A100") is costs_of(None) is DEFAULT_COSTS
    assert note(DEFAULT_COSTS, "NVIDIA A100").startswith("NVIDIA H200, because there are no costs of NVIDIA A100: run")
    assert note(DEFAULT_COSTS, None) == "NVIDIA H200"


def test_an_h100_has_its_own_memory_and_an_h200_s_products() -> None:
    assert gpu_type("NVIDIA H100 80GB HBM3") is H100
    assert H100.costs.memory_bytes < H200.costs.memory_bytes
    assert H100.rates.memory < H200.rates.memory
    assert H100.data_sheet_flop == H200.data_sheet_flop
    assert note(H100.costs, H100.name).startswith("NVIDIA H100 80GB HBM3, stated")


def test_plans_follow_the_costs() -> None:
    """The exchange decides with links a hundred times slower, and every rank gets as many columns."""
    slow = replace(H200.costs, all_to_all_bytes_per_us=H200.costs.all_to_all_bytes_per_us / 100)
    plans = [
        make_plan(MLPERF_MODEL.tables, Topology.one_node(8), 8 * 6912, costs=costs) for costs in (H200.costs, slow)
    ]
    columns = [
        [sum(shard.columns for shard in plan.of_rank(rank)) for rank in range(plan.world_size)] for plan in plans
    ]
    assert max(columns[1]) < max(columns[0])
