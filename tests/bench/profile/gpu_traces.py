"""Traces as Kineto writes them on a GPU, made by hand: names, categories and arguments as CUPTI gives them."""

from typing import Any

from dlrm_bench.bench.doctor.trace import ITERATION

LOOP, AUTOGRAD, SECOND = 100, 101, 102
"""Host threads."""

NVJET = "nvjet_sm90_tst_128x64_64x8_2x1_v_bz_coopA_NTT"
CUTLASS = (
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x128_16x6_tn_align1>"
    "(cutlass_80_tensorop_s1688gemm_64x128_16x6_tn_align1::Params)"
)
LOOKUP = (
    "void split_embedding_codegen_forward_unweighted_kernel<float, float, c10::BFloat16, int, false, 32ul, 4ul, 32ul>"
    "(at::GenericPackedTensorAccessor<float, 1ul, at::RestrictPtrTraits, long>, int)"
)
TBE_UPDATE = (
    "void split_embedding_backward_codegen_adagrad_unweighted_kernel_cta_per_row_1<float, float, float, float>"
    "(at::GenericPackedTensorAccessor<float, 2ul, at::RestrictPtrTraits, int>, int)"
)
SORT = (
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy<int, int, "
    "unsigned long long>::Policy900, false, int, int, unsigned long long, int, int>(int*, int*, int const*)"
)
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<int>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<int>, std::array<char*, 3ul>)"
)


def event(
    cat: str, name: str, ts: float, dur: float, tid: int = LOOP, correlation: int | None = None
) -> dict[str, Any]:
    """A complete event; times in microseconds."""
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def call(name: str, ts: float, dur: float, correlation: int, tid: int = LOOP) -> dict[str, Any]:
    """A CUDA call on the host."""
    return event(
        "cuda_driver" if name.startswith("cu") and name[2].isupper() else "cuda_runtime",
        name,
        ts,
        dur,
        tid,
        correlation,
    )


def on_gpu(name: str, ts: float, dur: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    """A kernel, copy or memset."""
    cat = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name.partition(" ")[0], "kernel")
    made = event(cat, name, ts, dur, stream, correlation)
    made["args"] |= {"device": 0, "stream": stream, "context": 1}
    return made


def stock_trace() -> list[dict[str, Any]]:
    """Two iterations of 1 ms of stock TorchRec: its own ranges, a backward thread, a copy that waits."""
    events = [call("cudaLaunchKernel", -50, 5, 999), on_gpu("before", -40, 10, 999)]  # before the window
    for i in range(2):
        t, c = 1000.0 * i, 100 * i
        events += [
            event("user_annotation", ITERATION, t, 1000),
            event("gpu_user_annotation", ITERATION, t + 40, 950, 7),
            event("user_annotation", "## start_sparse_data_dist 3 ##", t + 10, 200),
            call("cudaMemcpyAsync", t + 20, 30, c + 1),
            call("cudaStreamSynchronize", t + 60, 40, c + 2),
            event("user_annotation", "## forward 3 ##", t + 300, 300),
            event("user_annotation", "[lookup]_[ebc]_[table_wise]", t + 320, 100),
            call("cudaLaunchKernel", t + 330, 10, c + 3),
            call("cuLaunchKernelEx", t + 500, 10, c + 4),
            event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", t + 650, 100, AUTOGRAD),
            call("cudaLaunchKernelExC", t + 660, 10, c + 5, AUTOGRAD),
            event("user_annotation", "## optimizer 3 ##", t + 900, 50),
            call("cudaLaunchKernel", t + 910, 20, c + 6),
            event("user_annotation", "gloo:all_reduce", t, 900, 103),  # a thread that launches nothing
            call("cudaEventQuery", t + 400, 5, c + 8, 104),  # a watchdog
            on_gpu("Memcpy DtoH (Device -> Pageable)", t + 40, 10, c + 1),
            on_gpu(LOOKUP, t + 350, 100, c + 3),
            on_gpu(NVJET, t + 420, 100, c + 4, 8),  # overlaps by 30
            on_gpu(CUTLASS, t + 700, 50, c + 5),
            on_gpu(
                "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<3> >()", t + 950, 20, c + 6
            ),
        ]
    return events


GRAPH: list[tuple[str, float, float, int, str]] = [
    # name, start, duration, stream, stage: an iteration of the static EBC with overlap and ids sorted ahead
    ("Memcpy DtoD (Device -> Device)", 0, 2, 13, "other"),
    (ALL_GATHER, 0, 20, 14, "dense_update"),
    ("_gather_segments_kernel", 2, 4, 13, "input_dist"),
    (LOOKUP, 0, 30, 7, "embedding_forward"),
    (SEND_RECV, 6, 15, 13, "input_dist"),
    (NVJET, 4, 20, 15, "dense_forward_backward"),
    ("_gather_segments_kernel", 21, 4, 13, "input_dist"),
    (SORT, 25, 60, 13, "input_dist"),
    (SEND_RECV, 30, 35, 7, "embedding_forward"),
    ("_regroup_kernel", 65, 5, 7, "embedding_forward"),
    (NVJET, 70, 40, 7, "dense_forward_backward"),
    (ADD, 90, 2, 13, "other"),
    ("_cross_forward_kernel", 110, 5, 7, "dense_forward_backward"),
    ("_logit_loss_backward_kernel", 115, 5, 7, "dense_forward_backward"),
    (NVJET, 120, 60, 7, "dense_forward_backward"),
    ("_regroup_kernel", 180, 5, 7, "embedding_backward"),
    (SEND_RECV, 185, 40, 7, "embedding_backward"),
    (NVJET, 185, 50, 15, "dense_forward_backward"),
    (REDUCE_SCATTER, 235, 100, 15, "dense_forward_backward"),
    ("_sorted_adagrad_kernel", 225, 90, 7, "embedding_backward"),
    ("_sorted_adagrad_merge_kernel", 315, 10, 7, "embedding_backward"),
    ("_update", 335, 15, 15, "dense_update"),
]


def replay(
    graph: list[tuple[str, float, float, int, str]], ts: float = 0, correlation: int = 1
) -> list[dict[str, Any]]:
    """Returns the GPU's events of one graph launch."""
    return [on_gpu(name, ts + start, dur, correlation, stream) for name, start, dur, stream, _ in graph]


def graph_trace(iterations: int = 3) -> list[dict[str, Any]]:
    """Iterations of 400 us on the GPU, each one replay and one copy; the host runs ahead, 50 us an iteration."""
    events = []
    for i in range(iterations):
        host, gpu, c = 50.0 * i, 1000 + 400.0 * i, 10 * i
        events += [
            event("user_annotation", ITERATION, host, 50),
            call("cudaGraphLaunch", host + 5, 20, c + 1),
            call("cudaMemcpyAsync", host + 30, 10, c + 2),
            *replay(GRAPH, gpu, c + 1),
            on_gpu("Memcpy HtoD (Pinned -> Device)", gpu - 100, 12, c + 2, 20),
        ]
    return events


def two_thread_trace() -> list[dict[str, Any]]:
    """One iteration of two launching threads, the dense network a graph launched in its stage's range."""
    return [
        event("user_annotation", ITERATION, 0, 200),
        event("user_annotation", "input_dist", 10, 150, SECOND),
        call("cudaLaunchKernel", 20, 10, 1, SECOND),
        call("cudaEventSynchronize", 40, 50, 2, SECOND),
        event("user_annotation", "dense_forward_backward", 60, 100),
        call("cuGraphLaunch", 70, 20, 3),
        call("cudaDeviceSynchronize", 180, 15, 4),
        event("cuda_sync", "Stream Sync", 180, 15, 7, 4),
        on_gpu("_gather_segments_kernel", 40, 30, 1, 13),
        on_gpu(NVJET, 90, 40, 3),
        on_gpu(ALL_REDUCE, 130, 20, 3),
        on_gpu("Memset (Device)", 150, 2, 3),
    ]
