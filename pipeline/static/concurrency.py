"""The streams and barriers of the static pipeline, each with its work or the accesses that it orders.

Those of stage 3 are in the concurrency.py of the benchmark's folder. CONCURRENCY.md draws one iteration and describes
the writers and readers of each buffer, and their order; tests/pipeline/static/test_barriers.py shows that no barrier is
missing and none is redundant.
"""

from dlrm_bench.dlrm.runtime.peer_memory import Barrier
from dlrm_bench.dlrm.runtime.streams import MAIN, Priority, Stream
from dlrm_bench.dlrm.tables.pooled.ways import EmbeddingBarriers

INPUT_DIST = Stream(
    name="input_dist",
    priority=Priority.FILL,
    carries="the next batch: its way to the device, the exchange of its ids, the picking of split tables' rows; where "
    "rows are made when they are first named, their places and the new rows",
)
AGREEMENT = Stream(
    name="agreement",
    priority=Priority.FILL,
    carries="the ranks' agreement whether the next batch overflows any list of picked ids, or has rows without places; "
    "no sort waits for it",
)
TIERS = Stream(
    name="tiers",
    carries="where rows are on two tiers: the next batch's input dist, the sort of its ids, the places of its rows, "
    "and rows that come to the device beside this batch; ahead of what it runs beside, as the link takes long",
)
LOCAL = Stream(name="local", carries="lookups of replicated tables, and the part of stage 3 without pooled vectors")
SECOND_HALF = Stream(name="second half", carries="the chain of the second half of a batch in two halves")
SECOND_LOOKUP = Stream(
    name="second lookup", priority=Priority.FILL, carries="the lookup of the second half, beside the first half's chain"
)
REPLICATED = Stream(name="replicated", carries="the update of the replicated tables")
TABLES = Stream(name="tables", priority=Priority.FILL, carries="the update of the sharded tables")
SORT = Stream(name="sort", priority=Priority.FILL, carries="the sort of the next batch's ids, beside the table update")
METRICS = Stream(
    name="metrics",
    priority=Priority.FILL,
    carries="the addition of the batch's predictions to the metrics, if a run has any",
)
WEIGHTS_SEEN = Stream(name="weights", carries="the barrier after the dense updates, in peer memory")

CHAINS = (MAIN, SECOND_HALF)
"""The stream of each part of the batch, from its output dist to its gradients' exchange."""
LOOKUPS = (MAIN, SECOND_LOOKUP)
"""The stream of each part's lookup."""

IDS = Barrier(
    name="ids",
    orders="all ranks' writes of a batch's ids, before their owner picks, sorts or looks them up",
)
WEIGHTS = Barrier(
    name="weights",
    orders="all ranks' writes of updated dense weights, before `local` of the next iteration reads its own: all other "
    "readers come after `pooled`, which orders them too",
)
EVALUATED = Barrier(
    name="evaluated",
    orders="the last reads of an evaluated batch's inputs, before the next batch's lookups write them",
)


def embedding_barriers(parts: int, nodes: int) -> EmbeddingBarriers:
    """Returns the barriers that the exchanges of ids, pooled vectors and gradients launch."""
    each = range(parts)
    return EmbeddingBarriers(IDS, tuple(_pooled(p, nodes) for p in each), tuple(_gradients(p, nodes) for p in each))


def pipeline_barriers(parts: int, nodes: int) -> tuple[Barrier, ...]:
    """Returns all barriers of the static pipeline with peer memory, except those of stage 3."""
    barriers = embedding_barriers(parts, nodes)
    return barriers.ids, *barriers.pooled, *barriers.gradients, WEIGHTS, EVALUATED


def pipeline_streams() -> tuple[Stream, ...]:
    """Returns all streams of the static pipeline, except those of stage 3."""
    return (
        *(MAIN, INPUT_DIST, AGREEMENT, TIERS, LOCAL, SECOND_HALF, SECOND_LOOKUP, REPLICATED, TABLES, SORT),
        *(METRICS, WEIGHTS_SEEN),
    )


def _pooled(part: int, nodes: int) -> Barrier:
    orders = (
        "all ranks' writes of a part's pooled vectors, before they are read; and the last table update's reads of "
        "gradients and flags, before this iteration writes them"
    )
    return Barrier(name=f"pooled {part}" if nodes == 1 else f"pooled {part} staged", orders=orders)


def _gradients(part: int, nodes: int) -> Barrier:
    orders = "all ranks' writes of a part's gradients, and of the guards' flags, before the table update reads them"
    return Barrier(name=f"gradients {part}" if nodes == 1 else f"gradients {part} staged", orders=orders)
