"""Parts of an iteration that no single line makes, as measured on one rank: the time that a change of pipeline
removes."""

from collections.abc import Sequence
from typing import Any, TypedDict

from .findings import slower
from .rank_file import RankFile
from .trace import STAGES, host_stages_of_loop


class Parts(TypedDict):
    """Milliseconds of an iteration that the loop's thread spends, waiting included, scaled to one without instruments.

    Zero where the script opens no ranges that tell them (TorchRec's train pipelines do).
    """

    dense_ms: float
    """Forward, backward and update of the dense network."""
    input_dist_ms: float
    """Input dist: copies of the batch, exchanges of splits and ids."""
    record_streams_ms: float
    """Calls of Tensor.record_stream."""
    stages_ms: float
    """All five stages of the pipeline: input dist, lookup, dense network, update of tables and of dense weights."""
    gpu_ms: float
    """Time of the GPU's work, collectives left out: no change of the host makes an iteration shorter."""


def parts_of(rank: RankFile, events: Sequence[dict[str, Any]], gpu_ms: float | None) -> Parts:
    """Returns the parts of a rank's iteration. events: its trace. gpu_ms: work of the GPU with the most; None without
    one."""
    plain = rank["plain"]["ms"]
    loop, autograd = host_stages_of_loop(events)
    faster = min(1.0, plain / rank["traced"]["ms"])
    # The ranges of TorchRec's pipelines alone name a dense forward; what torch names by itself is the backward.
    known = rank["found_by"] == "progress"
    dense = loop["dense_forward_backward"] + loop["dense_update"] - autograd["embedding_backward"]
    streams = sum(call["us"] for call in rank["calls"] if call["main"] and call["name"].endswith(".record_stream"))
    return Parts(
        dense_ms=max(0.0, dense) * faster if known else 0.0,
        input_dist_ms=loop["input_dist"] * faster if known else 0.0,
        record_streams_ms=streams / 1000 / rank["marked"]["iterations"] / slower(rank),
        stages_ms=sum(loop[name] for name in STAGES) * faster if known else 0.0,
        gpu_ms=gpu_ms or 0.0,
    )
