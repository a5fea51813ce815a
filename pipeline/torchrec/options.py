"""Options of the pipelines over TorchRec's modules."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.pipeline.five_stage.options import HostSwitches

Schedule = Literal["base", "sparse-dist", "fused-sparse-dist"]


@dataclass(kw_only=True, slots=True, frozen=True)
class TorchRecModelOptions:
    """Options of TorchRec's sharded model, for any schedule."""

    row_wise: bool = True
    """Let TorchRec's planner split tables by rows, which makes the input dist depend on the ids: the host has to read
    the sizes of its exchange."""
    quantized_comms: Literal["none", "bf16", "fp16"] = "none"
    """Number format of pooled vectors in TorchRec's all-to-alls; their gradients are bf16 in both cases. On the CPU
    TorchRec uses bf16 in place of fp16."""

    def check(self, config: TrainingConfig) -> None:
        """Raises ValueError, naming the flag, where these options cannot train `config`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TorchRecOptions(TorchRecModelOptions):
    """Stock TorchRec: its own modules under one of its own train pipelines, nothing patched."""

    name: ClassVar[str] = "torchrec"

    schedule: Schedule = "sparse-dist"
    """TorchRec's train pipeline. base: TrainPipelineBase. sparse-dist: TrainPipelineSparseDist, which the MLPerf
    reference uses. fused-sparse-dist: TrainPipelineFusedSparseDist; needs a GPU."""
    inplace_copy: bool = False
    """Copy batches into GPU memory that the main stream allocated (TorchRec's enable_inplace_copy_batch)."""
    dense_all_reduce: Literal["fp32", "bf16"] = "fp32"
    """Number format in which the gradients of dense weights are summed over the ranks (TorchRec's
    allreduce_comm_precision); those of data-parallel tables stay fp32. bf16 takes effect over NCCL only."""
    compile_dense: bool = False
    """Compile bottom MLP, cross network and top MLP, forward and backward, by torch.compile; the first iterations then
    take a minute."""

    @property
    def needs_gpu(self) -> str | None:
        """The flag that needs a GPU, with what to choose without one; None if there is no such flag."""
        if self.schedule == "fused-sparse-dist":
            return "--schedule fused-sparse-dist needs a GPU: on this machine choose base or sparse-dist"
        return None


@dataclass(kw_only=True, slots=True, frozen=True)
class FiveStageSwitches(TorchRecModelOptions, HostSwitches):
    """TorchRec's modules under FiveStagePipeline, with its switches and those of the sharders beside it."""

    name: ClassVar[str] = "five-stage"

    trim_input_dist: bool = False
    """Leave out of the input dist what fixed multi-hot sizes make constant: exchanges of splits and lengths, and the
    host's reads of them. Where all tables are sharded table-wise, also leave the copies and the second autograd
    function out of the output dist."""
    graph_dists: bool = False
    """Replay each all-to-all of ids and pooled vectors, with what surrounds it, as a CUDA graph; needs
    trim_input_dist."""
    row_capacity: float | None = None
    """Within --cuda-graph iteration: room for the ids of row-wise and table-row-wise tables, 1.0 if these are spread
    evenly over the rows, 2.0 if some rank's rows are named twice as often. Batches with more ids run eagerly."""

    def __post_init__(self) -> None:
        require(
            self.trim_input_dist or not self.graph_dists,
            "--graph-dists needs --trim-input-dist: only exchanges of fixed sizes can be replayed",
        )
        require(
            self.trim_input_dist or not self.graphs_iterations,
            f"--cuda-graph {self.cuda_graph} needs --trim-input-dist: only exchanges of fixed sizes can be replayed",
        )
        require(
            self.row_capacity is None or (self.graphs_iterations and 1 <= self.row_capacity < math.inf),
            f"--row-capacity {self.row_capacity} must be 1.0 or more, beside --cuda-graph iteration",
        )
        require(
            self.launch_threads == 1 or not self.graphs_iterations,
            f"--cuda-graph {self.cuda_graph} launches an iteration at once: leave --launch-threads at 1",
        )

    @property
    def needs_gpu(self) -> str | None:
        """None: without a GPU, switches that do not apply are off, and the record says so."""
        return None
