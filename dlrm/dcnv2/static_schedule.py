"""The schedule of DLRM-DCNv2's stage 3, decided once from the batch size and the options."""

from dataclasses import dataclass

from dlrm_bench.dlrm.benchmark import StaticDenseOptions

# Local batches from here on keep every multiprocessor busy in the dense backward: weight gradients in parallel gain
# nothing there, but two halves of the batch do. Below, weight gradients find room, and the top MLP's reduce-scatter can
# start early.
_FILLING_BATCH = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSchedule:
    """The decisions in which the schedules of large and of small batches differ."""

    parts: int
    """The number of parts in which the batch goes from the embedding forward to the embedding backward: two equal
    halves where one half's GEMMs hide the other half's exchanges and memory traffic, else 1."""
    top_update_within_chain: bool
    """Whether the top MLP's weight gradients and update start right after its backward, beside the cross layers'
    backward, where a small batch leaves room. They otherwise start after the whole chain from loss to dx0, beside the
    all-to-all and the table update: beside the chain they would delay it by their own time."""
    cross_updates_within_chain: bool
    """Whether each cross layer's weight gradients and update start right after its backward; otherwise they start after
    the chain. Within the chain each layer's exchange overlaps with what follows, which needs room on the GPU, and a
    bucket for each layer, which the dense network has in peer memory."""
    cross_gradients_apart: bool
    """Whether weight gradients of different cross layers run beside one another: one layer's of a small batch leave
    room for another's. Those of a large batch go one after the other."""
    tables_after_weight_gradients: bool
    """Whether the table update waits for the weight gradients of the cross layers and the bottom MLP: its many small
    blocks leave no room for GEMMs, so where these take no longer than the all-to-all, they go first. Those of a large
    batch take longer."""
    tables_after_bottom_update: bool
    """Whether the table update waits for the bottom MLP's update too. The reduce-scatters before it need room as well,
    and NCCL launches them before the last all-reduce; the kernels of peer memory get along with few
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
