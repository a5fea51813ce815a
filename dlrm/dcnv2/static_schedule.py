"""The schedule of DLRM-DCNv2's stage 3, decided once from the batch size and the options."""

from dataclasses import dataclass

from dlrm_bench.dlrm.benchmark import StaticDenseOptions

# Local batches of at least this size keep every multiprocessor busy in the dense backward: there, weight gradients in
# parallel gain nothing, but two halves of the batch do. Below it, weight gradients find free multiprocessors, and the
# top MLP's reduce-scatter can start early.
_FILLING_BATCH = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSchedule:
    """The decisions in which the schedules of large and small batches differ."""

    parts: int
    """Number of parts in which the batch runs from the embedding forward to the embedding backward: two equal halves if
    one half's GEMMs can hide the other half's exchanges and memory traffic, else 1."""
    top_update_within_chain: bool
    """Whether the top MLP's weight gradients and update start right after its backward, beside the cross layers'
    backward, if a small batch leaves room. They otherwise start after the whole chain from loss to dx0, beside the
    all-to-all and the table update: beside the chain they would delay it by their own duration."""
    cross_updates_within_chain: bool
    """Whether each cross layer's weight gradients and update start right after its backward; otherwise they start after
    the chain. Within the chain each layer's exchange overlaps with subsequent work; this needs room on the GPU, and one
    bucket per layer, which the dense network has with peer memory."""
    cross_gradients_apart: bool
    """Whether weight gradients of different cross layers run in parallel: with a small batch, one layer's gradients
    leave room for another's. With a large batch they run one after another."""
    tables_after_weight_gradients: bool
    """Whether the table update waits for the weight gradients of the cross layers and the bottom MLP: its many small
    blocks leave no room for GEMMs, so if the weight gradients take no longer than the all-to-all, they go first. With a
    large batch they take longer."""
    tables_after_bottom_update: bool
    """Whether the table update also waits for the bottom MLP's update. The reduce-scatters before that update need room
    as well, and NCCL launches them before the last all-reduce; the peer-memory kernels need only few
    multiprocessors."""


def static_schedule(batch_size: int, options: StaticDenseOptions) -> StaticSchedule:
    """Returns the schedule of local batches of this size."""
    fills_gpu = batch_size >= _FILLING_BATCH
    return StaticSchedule(
        parts=2 if fills_gpu and options.may_go_in_parts and batch_size % 2 == 0 else 1,
        top_update_within_chain=not fills_gpu,
        cross_updates_within_chain=options.peer_memory and not fills_gpu,
        cross_gradients_apart=not fills_gpu,
        tables_after_weight_gradients=not fills_gpu,
        tables_after_bottom_update=not fills_gpu and not options.peer_memory,
    )
