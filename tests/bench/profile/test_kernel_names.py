"""Names of kernels: shortened, and told apart by stage where a CUDA graph hides who launched them."""

import ast
import re
from pathlib import Path

import pytest

from dlrm_bench.bench.doctor.trace import is_collective
from dlrm_bench.bench.profile import kernel_names
from dlrm_bench.bench.profile.kernel_names import (
    OTHER,
    short_kernel_name,
    stage_of_name,
    stages_of_replay,
)
from dlrm_bench.kernels import stages
from tests.bench.profile.gpu_traces import (
    ADD,
    ALL_REDUCE,
    CUTLASS,
    GRAPH,
    LOOKUP,
    NVJET,
    REDUCE_SCATTER,
    SEND_RECV,
    SORT,
    TBE_UPDATE,
    replay,
)

BARRIER = "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)"
KERNELS = Path(__file__).resolve().parents[3] / "kernels"


@pytest.mark.parametrize(
    ("name", "short", "stage"),
    [
        (NVJET, "GEMM (nvjet)", "dense_forward_backward"),
        (CUTLASS, "GEMM (cutlass, unaligned)", "dense_forward_backward"),
        (CUTLASS.replace("align1", "align16"), "GEMM (cutlass)", "dense_forward_backward"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_cublas", "GEMM (cublas)", "dense_forward_backward"),
        ("ampere_sgemm_128x64_tn", "GEMM (cublas)", "dense_forward_backward"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>()", "GEMM (cublas)", "dense_forward_backward"),
        (LOOKUP, "split_embedding_forward", "embedding_forward"),
        (TBE_UPDATE, "split_embedding_backward_adagrad_cta_per_row_1", "embedding_backward"),
        ("void fbgemm_gpu::permute_2D_data_kernel<true, int>(int)", "permute_2D_data", "input_dist"),
        ("void fbgemm_gpu::permute_pooled_embs_kernel<float>(float)", "permute_pooled_embs_kernel", OTHER),
        (SORT, "radix sort", OTHER),
        ("void linearize_index_kernel<int, int>(int)", "linearize_index_kernel", OTHER),
        (SEND_RECV, "NCCL SendRecv", OTHER),
        (ALL_REDUCE, "NCCL AllReduce_Sum_f32_RING_LL", "dense_forward_backward"),
        (REDUCE_SCATTER, "NCCL ReduceScatter_Sum_bf16_RING_LL", "dense_forward_backward"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", "NCCL AllGather_RING_LL_Sum_int8_t", "dense_update"),
        (ADD, "vectorized_elementwise_kernel (CUDAFunctor_add)", OTHER),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)", "input_dist"),
        ("Memset (Device)", "Memset (Device)", OTHER),
        ("_sorted_adagrad_merge_kernel", "sorted_adagrad: _sorted_adagrad_merge_kernel", "embedding_backward"),
        ("_merge_runs", "sorted_adagrad: _merge_runs", "embedding_backward"),  # of earlier versions
        ("_backward", "cross or mlp: _backward", "dense_forward_backward"),
        ("_regroup_kernel", "regroup: _regroup_kernel", OTHER),
        (BARRIER, "peer memory: barrier", OTHER),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "TensorListMetadata<2>, at::native::(anonymous namespace)::BinaryOpScalarFunctor<float, 2>>(float)",
            "multi_tensor_apply_kernel (BinaryOpScalarFunctor)",
            "dense_update",
        ),
        ("_adagrad_of_tensors_kernel", "_adagrad_of_tensors_kernel", "dense_update"),  # the drop-in's
        ("", "", OTHER),
    ],
)
def test_names(name: str, short: str, stage: str) -> None:
    assert (short_kernel_name(name), stage_of_name(name)) == (short, stage)
    assert short_kernel_name(short) == short


def test_every_kernel_of_ours_is_known() -> None:
    """Functions under @jit that are launched, and CUDA's, with the file that they stand in."""
    launched = set()
    for path in KERNELS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):  # kernel[grid](...)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = node.func.value
                if isinstance(kernel, ast.Name) and kernel.id.startswith("_"):
                    launched.add((kernel.id, path.stem))
    for path in KERNELS.rglob("*.cu"):
        launched |= {(name, path.stem) for name in re.findall(r"__global__.* (\w+)\(const", path.read_text())}
    assert launched == {(name, module) for name, (module, _) in stages.KERNELS.items()}
    assert len(launched) == len(stages.KERNELS), "two kernels of one name"


def test_the_table_of_stages_imports_nothing() -> None:
    tree = ast.parse((KERNELS / "stages.py").read_text())
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))


def test_traces_of_earlier_versions_are_told_apart_alike() -> None:
    former = {new: old for old, new in kernel_names._FORMER_NAMES.items()}
    assert set(former) <= set(stages.KERNELS)
    old = [(former.get(name, name), *rest) for name, *rest in GRAPH]
    assert old != GRAPH
    assert stages_of_replay(replay(old)) == [stage for *_, stage in GRAPH]


def test_a_replay_is_told_apart() -> None:
    assert stages_of_replay(replay(GRAPH)) == [stage for *_, stage in GRAPH]


def test_what_the_order_does_not_tell_is_not_guessed() -> None:
    """Ids that travel between lookup and loss, on a stream that does not tell either."""
    late = [kernel for kernel in GRAPH if kernel[1:3] != (6, 15)]
    late.append((SEND_RECV, 66, 15, 21, OTHER))
    told = stages_of_replay(replay(late))
    assert told[-1] == OTHER
    assert next(s for s, kernel in zip(told, late, strict=True) if kernel[0] == SEND_RECV) == "embedding_forward"
    after_gather = [
        *late[:-1],
        ("_gather_segments_kernel", 60, 4, 21, "input_dist"),
        (SEND_RECV, 66, 15, 21, "input_dist"),
    ]
    assert stages_of_replay(replay(after_gather))[-1] == "input_dist"


def test_all_to_alls_of_unpooled_rows_belong_to_what_writes_their_send_buffer() -> None:
    kernels = [
        ("_gather_rows_kernel", 0, 5, 7, "embedding_forward"),
        ("_rest_of_lists_kernel", 1, 2, 13, "input_dist"),
        (SEND_RECV, 4, 5, 13, "input_dist"),
        (SEND_RECV, 5, 5, 7, "embedding_forward"),
        ("_gather_rows_kernel", 10, 5, 7, "embedding_forward"),
        ("silu_attention", 15, 5, 7, "dense_forward_backward"),
        ("_distinct_sums_merge_kernel", 20, 5, 7, "embedding_backward"),
        (SEND_RECV, 25, 5, 7, "embedding_backward"),
        ("_row_wise_adagrad_kernel", 30, 5, 7, "embedding_backward"),
        (SEND_RECV, 35, 5, 7, OTHER),
    ]
    assert stages_of_replay(replay(kernels)) == [stage for *_, stage in kernels]


def test_without_the_loss_nothing_is_forward_or_backward() -> None:
    rest = [kernel for kernel in GRAPH if kernel[0] != "_logit_loss_backward_kernel"]
    told = dict(zip([(name, start) for name, start, *_ in rest], stages_of_replay(replay(rest)), strict=True))
    assert told["_regroup_kernel", 65] == told[SEND_RECV, 30] == told[SEND_RECV, 185] == OTHER
    assert told["_sorted_adagrad_kernel", 225] == "embedding_backward"


def test_barriers_of_peer_memory_belong_to_what_they_are_around() -> None:
    kernels = [
        ("_pooled_lookup_kernel", 0, 5, 7, "embedding_forward"),
        ("_push_segments_kernel", 0, 2, 5, "input_dist"),
        (BARRIER, 5, 2, 8, "embedding_forward"),
        (BARRIER, 6, 2, 5, "input_dist"),
        ("_pooled_lookup_kernel", 9, 5, 6, "embedding_forward"),
        ("_logit_loss_backward_kernel", 10, 5, 7, "dense_forward_backward"),
        (BARRIER, 15, 2, 9, "dense_update"),
        ("_sharded_adagrad_kernel", 20, 5, 9, "dense_update"),
        ("_push_columns_kernel", 22, 2, 7, "embedding_backward"),
        (BARRIER, 25, 2, 9, "dense_update"),
        (BARRIER, 26, 2, 7, "embedding_backward"),
        (BARRIER, 27, 2, 6, "embedding_forward"),
        ("_sorted_adagrad_kernel", 30, 5, 7, "embedding_backward"),
    ]
    assert stages_of_replay(replay(kernels)) == [stage for *_, stage in kernels]
    without_loss = [kernel for kernel in kernels if kernel[0] != "_logit_loss_backward_kernel"]
    assert stages_of_replay(replay(without_loss)).count(OTHER) == 1
    of_drop_in = [("_push_to_ranks_kernel", 8, 1, 4, OTHER), (BARRIER, 9, 2, 4, OTHER)]
    assert stages_of_replay(replay([*kernels, *of_drop_in])).count(OTHER) == 2
    assert is_collective(BARRIER)
    assert not is_collective("_push_columns_kernel")


@pytest.mark.parametrize(
    ("update", "extra", "before", "after"),
    [
        ("_sorted_adagrad_kernel", "_row_sums_kernel", "input_dist", "input_dist"),
        (TBE_UPDATE, "_row_sums_kernel", "input_dist", OTHER),  # replicated tables sort ahead, FBGEMM behind the loss
        (TBE_UPDATE, "_column_sums_kernel", "embedding_backward", "embedding_backward"),
        ("_flat_adagrad_kernel", "_column_sums_kernel", OTHER, OTHER),
    ],
)
def test_sorts(update: str, extra: str, before: str, after: str) -> None:
    kernels = [
        (SORT, 0, 5, 7, ""),
        ("_logit_loss_backward_kernel", 10, 5, 7, ""),
        (SORT, 20, 5, 7, ""),
        (extra, 25, 5, 7, ""),
        (update, 30, 5, 7, ""),
    ]
    told = stages_of_replay(replay(kernels))
    assert (told[0], told[2]) == (before, after)
