"""The streams and barriers of DLRM-DCNv2's stage 3. The static pipeline, which has its own ones, provides `Streams`.

Functions return the stream or barrier of a layer or bucket. pipeline/static/CONCURRENCY.md draws a whole iteration.
"""

from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.runtime.peer_memory import Barrier
from dlrm_bench.dlrm.runtime.streams import Priority, Stream

GATHER_CROSS = Stream(name="cross", carries="the all-gathers of the cross layers' weights, without peer memory")
ROUND_WEIGHTS = Stream(name="eight bits", carries="copies of weights in eight bits")
GUARD = Stream(name="guard", carries="the guard's look at the losses, before any update")
TOP_GRADIENTS = Stream(
    name="top gradients", priority=Priority.WEIGHT_GRADIENTS, carries="the top MLP's weight gradients"
)
CROSS_GRADIENTS = Stream(
    name="cross gradients",
    priority=Priority.WEIGHT_GRADIENTS,
    carries="all cross layers' weight gradients, one after the other, of large batches",
)
BOTTOM = Stream(name="bottom", carries="the bottom MLP's backward")
BOTTOM_UPDATE = Stream(name="bottom update", carries="the bottom MLP's exchange and update")


def top_update(first: int) -> Stream:
    """Returns the stream of the bucket with the top MLP's layers from `first` on."""
    carries = "exchange and update of a bucket of the top MLP; of the first, without peer memory, its all-gather before"
    return Stream(name=f"top {first}", carries=carries)


def cross_gradients(layer: int) -> Stream:
    """Returns the stream of a cross layer's weight gradients, if several layers' gradients run in parallel."""
    name = f"cross {layer} gradients"
    return Stream(name=name, priority=Priority.WEIGHT_GRADIENTS, carries="weight gradients of a cross layer")


def cross_update(first: int) -> Stream:
    """Returns the stream of the bucket with the cross layers from `first` on."""
    return Stream(name=f"cross {first}", carries="exchange and update of a bucket of cross layers")


def bottom_gradients(layer: int) -> Stream:
    """Returns the stream of a bottom MLP layer's weight gradients."""
    name = f"bottom {layer} gradients"
    return Stream(name=name, priority=Priority.WEIGHT_GRADIENTS, carries="weight gradients of a bottom MLP layer")


def stage_streams(model: ModelConfig) -> tuple[Stream, ...]:
    """Returns all streams of stage 3 of this model."""
    cross, bottom, top = range(model.cross_layers), range(len(model.bottom_mlp)), range(len(model.top_mlp))
    return (
        *(GATHER_CROSS, ROUND_WEIGHTS, GUARD, TOP_GRADIENTS, CROSS_GRADIENTS, BOTTOM, BOTTOM_UPDATE),
        *map(top_update, top),
        *map(cross_gradients, cross),
        *map(cross_update, cross),
        *map(bottom_gradients, bottom),
    )


def bucket_gradients(bucket: str) -> Barrier:
    """Returns the barrier before the update of a bucket in peer memory. bucket: a prefix of its weights' names."""
    return Barrier(
        name=f"{bucket} gradients",
        orders="all ranks' gradients of the bucket, the guards' flags, and the last reads of its weights, before the "
        "ranks' updates, which read the former and write the latter",
    )
