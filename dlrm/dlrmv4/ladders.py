"""The built-in ladders of DLRMv4: each rung's flags of launch/dlrm.py, and the cost that it removes from the rung
before."""

from dlrm_bench.dlrm.benchmark import Rung

_CANDIDATES = ("--model.last-layer", "candidates")
_FIVE_STAGE = (*_CANDIDATES, "--pipeline", "five-stage")
_STOCK = Rung("stock", ("--model.last-layer", "all"), "TrainPipelineSparseDist; all layers compute all tokens.")
_FULL = (
    _STOCK,
    Rung("candidates", _CANDIDATES, "A quarter of the operations: the last layer has a query for candidates alone."),
    Rung("five-stage", _FIVE_STAGE, "Nothing yet: the five stages under their own schedule, all switches off."),
    Rung(
        "avoid-record-streams",
        (*_FIVE_STAGE, "--avoid-record-streams"),
        "TorchRec's record_stream calls, by events that keep its buffers alive.",
    ),
    Rung(
        "pinned-d2h",
        (*_FIVE_STAGE, "--avoid-record-streams", "--pinned-d2h"),
        "Stream syncs at device-to-host reads: they land in pinned memory and are waited for where they are needed.",
    ),
)

_FUSED = (*_CANDIDATES, "--model.kernels", "fused")
_STATIC = (*_FUSED, "--pipeline", "static")
_STATIC_RUNGS = (
    Rung(
        "fused",
        _FUSED,
        "Passes over all tokens: norms, gates, dropout and the first layer's input are a kernel each.",
    ),
    Rung(
        "static",
        _STATIC,
        "Reads of the device, and repeated rows: fixed shapes, with padding of tokens of 5 % at most.",
    ),
    Rung(
        "overlap", (*_STATIC, "--overlap"), "The next input dist, and the dense update, off the chain, by side streams."
    ),
    Rung(
        "cuda-graph",
        (*_STATIC, "--overlap", "--cuda-graph", "iteration"),
        "The host's launches: an iteration is a CUDA graph, collectives included, one for each room for tokens.",
    ),
)

_ITEMS = Rung(
    "items",
    (*_STATIC_RUNGS[-1].flags, "--model.content", "items"),
    "Repeated items: rows and content of each distinct one, not of each event; made data has four events an item.",
)
_IN_BF16 = (*_STATIC_RUNGS[-1].flags, "--precision", "bf16")
_FP8 = (
    Rung("cuda-graph", _IN_BF16, "The host's launches: an iteration is a CUDA graph, in bf16."),
    Rung(
        "fp8",
        (*_IN_BF16, "--fp8"),
        "A third of the time of layers' forward products, by e4m3 factors, which norms write in half of the bytes.",
    ),
)
_USERS = Rung(
    "users",
    (*_ITEMS.flags, "--data.deal", "users"),
    "Rows of other ranks' users: a rank has neighbouring samples of few users, with equal sums of tokens and squares.",
)

_REFERENCE = (
    Rung(
        "reference-as-shipped",
        ("--model.network", "reference-as-shipped", "--schedule", "base"),
        "The reference's modules, kernels as it ships them, under TrainPipelineBase. Needs --model.reference.",
    ),
    Rung(
        "reference",
        ("--model.network", "reference", "--schedule", "base"),
        "Kernels' settings for another GPU: its Triton kernels are tuned on this one.",
    ),
)

LADDERS: dict[str, tuple[Rung, ...]] = {
    "full": _FULL,
    "static": (*_FULL[:2], *_STATIC_RUNGS, _ITEMS, _USERS),
    "static-ends": (_STOCK, _STATIC_RUNGS[0], _STATIC_RUNGS[-1]),
    "baselines": (*_REFERENCE, _STOCK, _STATIC_RUNGS[0], _STATIC_RUNGS[-1]),
    "reference": (_REFERENCE[-1], _STOCK, _STATIC_RUNGS[-1]),
    "fp8": _FP8,
    "recompute": (
        Rung(
            "recompute",
            (*_STATIC_RUNGS[-1].flags, "--model.recompute-layers"),
            "Memory, not time: layers keep their input and attention, and compute projections again.",
        ),
        Rung(
            "keep-projections",
            (*_STATIC_RUNGS[-1].flags, "--model.no-recompute-layers"),
            "A sixth of the products: projections stay in memory for the backward pass.",
        ),
    ),
    "dynamic-rows": (
        _STATIC_RUNGS[-1],
        Rung(
            "dynamic-rows",
            (*_STATIC_RUNGS[-1].flags, "--dynamic-rows", "30000000"),
            "No time, but memory: rows are made when a batch first names them, and found by a map of their ids.",
        ),
    ),
    "ends": (_FULL[0], _FULL[-1]),
    "stock": (
        Rung("stock-fp32", ("--precision", "fp32"), "TrainPipelineSparseDist in fp32."),
        Rung("stock-bf16", ("--precision", "bf16"), "Half of the bytes and most of the products' time, by bf16."),
    ),
    "same": (_STOCK, Rung("same-again", _STOCK.flags, "Nothing: the same thing again.")),
}
"""Ladders by name, first rung first."""
