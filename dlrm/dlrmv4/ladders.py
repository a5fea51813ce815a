"""The built-in ladders of DLRMv4: each rung's flags of launch/dlrm.py, and what it takes away from the one before."""

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
    "baselines": (*_REFERENCE, *_FULL[:2], _FULL[-1]),
    "ends": (_FULL[0], _FULL[-1]),
    "stock": (
        Rung("stock-fp32", ("--precision", "fp32"), "TrainPipelineSparseDist in fp32."),
        Rung("stock-bf16", ("--precision", "bf16"), "Half of the bytes and most of the products' time, by bf16."),
    ),
    "same": (_STOCK, Rung("same-again", _STOCK.flags, "Nothing: the same thing again.")),
}
"""Ladders by name, first rung first."""
