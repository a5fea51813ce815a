"""Records and their kernels beside the floor of a limits record."""

from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.config import as_json
from dlrm_bench.bench.limits.floor import (
    caveats_of_floor,
    check_same_work,
    limits_table,
    work_of_kernels,
    work_table,
)
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.limits import ACTIVATIONS, ADAGRAD, ALL_GATHER, ATTENTION, REDUCE_SCATTER, UPDATE
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.records.schema import Kernel, RunRecord
from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from tests.bench.made_records import H200, configured, kernel, profile, recorded_runs, write
from tests.bench.records.test_limits import ceiling, some_limits


def test_the_table_has_a_row_for_all_products_of_a_network() -> None:
    rows = [str(cell) for cell in limits_table(some_limits()).columns[0].cells]
    assert rows.count("GEMMs: top") == 1


def profiled_with(folder: Path, *kernels: Kernel, **changes: Any) -> RunRecord:
    measured = {**profile(), "kernels": list(kernels)}
    return read_record(write(folder, recorded_runs()[0], profile=measured, config=configured(**changes))).run


def test_kernels_beside_what_they_could_take(tmp_path: Path) -> None:
    profiled = profiled_with(
        tmp_path / "profiled",
        kernel("GEMM (nvjet)", "dense_forward_backward", 1500, calls=12),
        kernel("split_embedding_forward", "embedding_forward", 900),
        kernel("GEMM (cutlass)", "embedding_forward", 500, calls=3),  # by its range: the bottom MLP
        kernel("NCCL SendRecv", "embedding_forward", 450),
        kernel("NCCL SendRecv", "input_dist", 410),
        kernel("NCCL SendRecv", "other", 400),  # nobody knows what it sends
        kernel("radix sort", "input_dist", 300, calls=4),
        kernel("NCCL AllReduce_Sum_f32_RING_LL", "dense_forward_backward", 200),
        kernel("sorted_adagrad: _update_chunks", "embedding_backward", 100),  # these limits have no ceiling for it
    )
    work = work_of_kernels(some_limits(), profiled)
    assert [(each.name, each.us, each.best_us) for each in work] == [
        ("GEMMs", 2000, 1000),
        ("table lookup", 900, pytest.approx(300)),
        ("all-to-all of pooled vectors", 450, pytest.approx(400)),
        ("all-to-all of ids", 410, pytest.approx(200)),
        ("NCCL SendRecv", 400, None),
        ("radix sort", 300, None),
        ("all-reduce", 200, pytest.approx(800)),
        ("table update", 100, None),
    ]
    assert work[0].calls == 15  # of two kernels
    table = work_table(some_limits(), profiled)
    assert table is not None
    assert list(table.columns[4].cells)[3:5] == ["200.0", "not known"]
    assert next(iter(table.columns[5].cells)) == "2.0 x"


def test_kernels_of_unpooled_rows_and_attention_have_their_work(tmp_path: Path) -> None:
    profiled = profiled_with(
        tmp_path / "profiled",
        kernel("silu_attention: silu_attention", "dense_forward_backward", 500, calls=2),
        kernel("last_query_attention: _last_query_forward_kernel", "dense_forward_backward", 100),
        kernel("gated_norm: _gated_norm_forward_kernel", "dense_forward_backward", 80),
        kernel("norm: _norm_backward_kernel", "dense_forward_backward", 70),
        kernel("token_input: _token_input_forward_kernel", "dense_forward_backward", 50),
        kernel("row_wise_adagrad: _row_wise_adagrad_kernel", "embedding_backward", 60),
        kernel("distinct_sums: _distinct_sums_kernel", "embedding_backward", 40),
        kernel("gather_rows: _gather_rows_kernel", "embedding_forward", 90, calls=2),
        kernel("NCCL AllReduce_Sum_f32_RING_LL", "dense_update", 30),
        kernel("flat_adam: _flat_adam_kernel", "dense_update", 15),
        kernel("_adagrad_of_tensors_kernel", "dense_update", 5),
    )
    limits = some_limits()
    named = ((ATTENTION, 0.3), (ACTIVATIONS, 0.1), (UPDATE, 0.05), (ADAGRAD, 0.01))
    limits["ceilings"] += [ceiling(name, None, ms) for name, ms in named]
    assert [(each.name, each.us, each.best_us) for each in work_of_kernels(limits, profiled)] == [
        ("attention", 600, pytest.approx(300)),
        ("norms, gates and the tokens' input", 200, pytest.approx(100)),
        ("table update", 100, pytest.approx(50)),
        ("table lookup", 90, pytest.approx(300)),
        ("all-reduce", 30, pytest.approx(800)),
        ("dense update", 20, pytest.approx(10)),
    ]


def test_no_ceiling_is_claimed_for_work_of_another_size(tmp_path: Path) -> None:
    """Reduce-scatter: each rank updates its part. Another precision: other bytes, but for ids."""
    kernels = (
        kernel("NCCL ReduceScatter_Sum_bf16_RING_LL", "dense_forward_backward", 200),
        kernel("NCCL AllReduce_Sum_bf16_RING_LL", "dense_forward_backward", 100),
        kernel("flat_adagrad: _update", "dense_update", 50),
        kernel("NCCL SendRecv", "input_dist", 20),
        kernel("GEMM (nvjet)", "dense_forward_backward", 10),
    )
    limits = some_limits()
    limits["ceilings"] += [ceiling(REDUCE_SCATTER, None, 0.15), ceiling(ADAGRAD, "dense_update", 0.1)]
    best = [each.best_us for each in work_of_kernels(limits, profiled_with(tmp_path / "a", *kernels))]
    assert best == [pytest.approx(150), None, None, pytest.approx(200), pytest.approx(1000)]
    alone = work_of_kernels(limits, profiled_with(tmp_path / "b", *kernels[1:]))
    assert [each.best_us for each in alone] == pytest.approx([800, 100, 200, 1000])
    peers = (
        kernel("sharded_adagrad: _update_slice", "dense_update", 300),
        kernel("NCCL AllReduce_Sum_f32_RING_LL", "dense_forward_backward", 100),
        kernel("pooled_lookup: _lookup", "embedding_forward", 90),
        kernel("fetch: _fetch", "input_dist", 80),
    )
    limits["ceilings"].append(ceiling(ALL_GATHER, None, 0.07))
    in_peer_memory = work_of_kernels(limits, profiled_with(tmp_path / "e", *peers))
    assert [each.best_us for each in in_peer_memory] == [
        pytest.approx(220),
        None,
        pytest.approx(300),
        pytest.approx(100),
    ]
    other = work_of_kernels(limits, profiled_with(tmp_path / "c", *kernels[1:], precision="bf16"))
    assert [each.best_us for each in other] == [None, None, pytest.approx(200), None]
    assert work_table(limits, read_record(write(tmp_path / "d", recorded_runs()[0])).run) is None


def test_a_record_of_other_work_is_refused(tmp_path: Path) -> None:
    other = read_record(write(tmp_path / "x", recorded_runs()[0], config=configured(local_batch_size=64))).run
    with pytest.raises(ValueError, match="another local_batch_size than limits"):
        check_same_work(some_limits(), other)


def test_a_floor_of_cpus_is_none_for_gpus(tmp_path: Path) -> None:
    record = read_record(write(tmp_path / "x", recorded_runs()[0])).run
    on_cpus: Any = {**H200, "gpu": None, "gpus": 0}
    with pytest.raises(ValueError, match="x ran on NVIDIA H200, but limits is of CPUs: measure limits on"):
        check_same_work(some_limits(machine=on_cpus), record)
    other = read_record(write(tmp_path / "y", recorded_runs()[0], machine=on_cpus)).run
    with pytest.raises(ValueError, match="y ran on CPUs, but limits is of NVIDIA H200"):
        check_same_work(some_limits(), other)


@pytest.mark.parametrize(
    ("measured", "ran", "said"),
    [
        ({}, {"config": configured(precision="bf16")}, "precision bf16, beside limits of tf32"),
        ({"gpu": "NVIDIA H100"}, {}, "GPU NVIDIA H200, beside limits of NVIDIA H100"),
        (
            {"gpu": None, "cpu": "x86"},
            {"machine": {**H200, "gpu": None, "cpu": "Arm"}},
            "CPU Arm, beside limits of x86",
        ),
        ({"hosts": ["a", "b"]}, {"machine": {**H200, "hosts": ["c"]}}, "host c, beside limits of a + b"),
        (
            {},
            {"config": configured(optimizer=OptimizerConfig(embedding="sgd"))},
            "table optimizer sgd, beside limits of adagrad",
        ),
    ],
)
def test_a_floor_of_other_work_is_doubtful(
    tmp_path: Path, measured: dict[str, Any], ran: dict[str, Any], said: str
) -> None:
    limits = some_limits(machine={**H200, **measured})
    limits["config"]["table_optimizer"] = "adagrad"
    record = read_record(write(tmp_path / "x", recorded_runs()[0], **ran)).run
    assert caveats_of_floor(limits, record) == [said]


def test_a_floor_without_eight_bits_is_doubtful_for_a_run_with_them(tmp_path: Path) -> None:
    limits, ran = some_limits(), configured(pipeline="static", precision="bf16", fp8=True)
    limits["config"]["precision"] = "bf16"
    record = read_record(write(tmp_path / "x", recorded_runs()[0], config=ran)).run
    assert caveats_of_floor(limits, record) == ["products in eight bits, beside limits without any"]


def test_what_limits_or_record_do_not_say_is_no_doubt(tmp_path: Path) -> None:
    nameless = {name: value for name, value in H200.items() if name != "hosts"}
    ran_by_sgd = configured(optimizer=OptimizerConfig(embedding="sgd"))
    record = read_record(write(tmp_path / "x", recorded_runs()[0], machine=nameless, config=ran_by_sgd)).run
    named = some_limits(machine={**H200, "hosts": ["a"]})
    assert caveats_of_floor(named, record) == []
    renamed = read_record(write(tmp_path / "y", recorded_runs()[0], machine={**H200, "hosts": ["b"]})).run
    assert caveats_of_floor(some_limits(machine=nameless), renamed) == []


def test_what_computes_the_same_products_is_the_same_work(tmp_path: Path) -> None:
    """DLRMv4's limits stand beside each of its rungs, whose models differ in what computes them; not beside others."""
    model = as_json(preset("smoke-dlrmv4"))["model"]
    record, limits = read_record(write(tmp_path / "x", recorded_runs()[0])).run, some_limits()
    for config in (limits["config"], record["config"]):
        config.update(benchmark="dlrmv4", precision="bf16", model=dict(model))
    record["config"]["model"].update(last_layer="all", kernels="fused")
    check_same_work(limits, record)
    record["config"]["model"].update(width=64)
    with pytest.raises(ValueError, match="has another model than"):
        check_same_work(limits, record)
