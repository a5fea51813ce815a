"""Options of the pipelines over TorchRec's modules."""

import math
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.tables.plan.constraints import FLAG, Constraints, parse_constraints
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.pipeline.five_stage.options import HostSwitches

Schedule = Literal["base", "sparse-dist", "fused-sparse-dist", "prefetch-sparse-dist"]


@dataclass(kw_only=True, slots=True, frozen=True)
class TorchRecModelOptions:
    """Options of TorchRec's sharded model, for any schedule."""

    row_wise: bool = True
    """Let TorchRec's planner split tables by rows. The sizes of the input dist then depend on the ids, and the host
    must read them."""
    quantized_comms: Literal["none", "bf16", "fp16"] = "none"
    """Number format of pooled vectors in TorchRec's all-to-alls; their gradients are bf16 in both cases. On the CPU
    TorchRec uses bf16 in place of fp16."""

    compile_dense: bool = False
    """Compile the dense parts, forward and backward, with torch.compile: MLPs and interaction, or the layers of a
    sequence model. The first iterations then take a minute."""
    constraints: tuple[str, ...] = ()
    """Your own sharding of single tables for TorchRec's planner (ParameterConstraints), as TABLES=SHARDING:
    `0,9=column-wise:64 20-22=table-wise,hbm:0.2`. SHARDING is table-wise, column-wise, column-wise:COLUMNS, row-wise or
    data-parallel. hbm:SHARE keeps the table in host memory, with a cache of this share of its rows on the GPU (compute
    kernel fused_uvm_caching; hbm:0 fused_uvm, hbm:1 fused)."""

    def check(self, config: TrainingConfig) -> None:
        """Raises ValueError, naming the flag, if these options cannot train `config`."""
        require(
            not config.model.tables.raw_ids,
            "--model.raw-ids: the tables of --pipeline torchrec and five-stage have a declared size; choose --pipeline "
            "static with --dynamic-rows",
        )
        self.constraints_on(config.model.tables)

    def constraints_on(self, tables: Tables) -> Constraints:
        """Returns the user's constraints; ValueError names a malformed word, or one that TorchRec cannot obey."""
        constraints = parse_constraints(self.constraints, tables)
        for table, constraint in constraints.items():
            require(
                self.row_wise or constraint.kind != "row-wise",
                f"{FLAG} {tables.names[table]}={constraint}: --no-row-wise forbids it; leave one of the two out",
            )
        return constraints

    @property
    def prefetches(self) -> bool:
        """Whether caches of tables in host memory are filled a batch ahead."""
        return False

    @property
    def _host_memory_needs_gpu(self) -> str | None:
        word = self.in_host_memory()
        return None if word is None else f"{FLAG} {word} needs a GPU: on this machine leave hbm out"

    def in_host_memory(self) -> str | None:
        """Returns the first word of the constraints that keeps tables in host memory; None if there is none."""
        return next((word for word in self.constraints if not _device_share(word) >= 1), None)


@dataclass(kw_only=True, slots=True, frozen=True)
class TorchRecOptions(TorchRecModelOptions):
    """Stock TorchRec: its own modules under one of its own train pipelines, nothing patched."""

    name: ClassVar[str] = "torchrec"

    schedule: Schedule = "sparse-dist"
    """TorchRec's train pipeline. base: TrainPipelineBase. sparse-dist: TrainPipelineSparseDist, which the MLPerf
    reference uses. fused-sparse-dist: TrainPipelineFusedSparseDist; needs a GPU. prefetch-sparse-dist:
    PrefetchTrainPipelineSparseDist, which fills the caches of tables in host memory (hbm of constraints) a batch ahead;
    needs a GPU, and cannot evaluate."""
    inplace_copy: bool = False
    """Copy batches into GPU memory that the main stream allocated (TorchRec's enable_inplace_copy_batch)."""
    dense_all_reduce: Literal["fp32", "bf16"] = "fp32"
    """Number format in which the gradients of dense weights are summed over the ranks (TorchRec's
    allreduce_comm_precision); those of data-parallel tables stay fp32. bf16 takes effect over NCCL only."""

    def __post_init__(self) -> None:
        require(
            not self.prefetches or self.in_host_memory() is not None,
            f"--schedule prefetch-sparse-dist fills caches of tables in host memory: add {FLAG} TABLES=hbm:SHARE, or "
            "choose sparse-dist",
        )
        require(
            not (self.prefetches and self.inplace_copy),
            "--schedule prefetch-sparse-dist does not support --inplace-copy: leave it out",
        )

    @property
    def prefetches(self) -> bool:
        """Whether caches of tables in host memory are filled a batch ahead."""
        return self.schedule == "prefetch-sparse-dist"

    @property
    def needs_gpu(self) -> str | None:
        """The flag that needs a GPU, with what to choose without one; None if there is no such flag."""
        if self.schedule in ("fused-sparse-dist", "prefetch-sparse-dist"):
            return f"--schedule {self.schedule} needs a GPU: on this machine choose base or sparse-dist"
        return self._host_memory_needs_gpu


@dataclass(kw_only=True, slots=True, frozen=True)
class FiveStageSwitches(TorchRecModelOptions, HostSwitches):
    """TorchRec's modules under FiveStagePipeline, with its switches and those of its sharders."""

    name: ClassVar[str] = "five-stage"

    trim_input_dist: bool = False
    """Skip the parts of the input dist that fixed multi-hot sizes make constant: exchanges of splits and lengths, and
    the host's reads of them. If all tables are sharded table-wise, also skip the copies and the second autograd
    function of the output dist."""
    graph_dists: bool = False
    """Replay each all-to-all of ids and pooled vectors, with the kernels around it, as a CUDA graph; needs
    trim_input_dist."""
    row_capacity: float | None = None
    """Capacity for ids of row-wise and table-row-wise tables in --cuda-graph iteration: 1.0 if ids are spread evenly
    over the rows, 2.0 if some rank's rows are named twice as often. Batches that exceed the capacity run eagerly."""

    def __post_init__(self) -> None:
        word = self.in_host_memory()
        require(
            word is None or self.cuda_graph != "iteration",
            f"{FLAG} {word}: --cuda-graph iteration needs tables in GPU memory; leave hbm out, or choose --cuda-graph "
            "dense",
        )
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
            f"--row-capacity {self.row_capacity} must be 1.0 or more, and needs --cuda-graph iteration",
        )
        require(
            self.graphs_iterations or not self.peer_memory,
            "--peer-memory needs --cuda-graph iteration: collectives that are not in its graph stay as they are",
        )
        require(
            self.launch_threads == 1 or not self.graphs_iterations,
            f"--cuda-graph {self.cuda_graph} replays whole iterations: leave --launch-threads at 1",
        )

    @property
    def needs_gpu(self) -> str | None:
        """The constraint that needs a GPU; other switches are off without one, and the record says so."""
        return self._host_memory_needs_gpu

    @property
    def prefetches(self) -> bool:
        """Whether caches of tables in host memory are filled a batch ahead."""
        return True


def _device_share(word: str) -> float:
    """Returns the hbm:SHARE of a constraint; 1 without one; NaN if it is no number, which `constraints_on` reports."""
    share = re.search(r"hbm:([^,]+)", word)
    try:
        return float(share[1]) if share else 1.0
    except ValueError:
        return math.nan
