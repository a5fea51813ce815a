"""The baseline: a model as TorchRec itself trains it, nothing patched.

TrainPipelineSparseDist is the schedule of MLPerf's reference. TorchRec's other public options are also available, so
that a gain can be measured against the best that a TorchRec user can have. Its other train pipelines are left out:

- TrainPipelineSemiSync trains on embeddings that miss the last update: another algorithm.
- TrainPipelinePT2 compiles the model and overlaps nothing: one stream, blocking copies.
- TrainPipelineSparseDistCompAutograd compiles the backward, with verbose logs enabled: an experiment.
- TrainPipelineSparseDistLite saves memory for less overlap than TrainPipelineSparseDist, and is not exported, like
  everything in experimental_pipelines.
- EvalPipelineSparseDist does not train, and StagedTrainPipeline schedules stages that its user has to write.
"""

from typing import Any

import torch
from torchrec.distributed import PrefetchTrainPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from torchrec.distributed.train_pipeline import TrainPipelineFusedSparseDist
from torchrec.distributed.types import ShardingType

from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.torchrec_model import TorchRecModel
from dlrm_bench.pipeline.interface import check_device
from dlrm_bench.pipeline.torchrec.model import TorchRecPipeline
from dlrm_bench.pipeline.torchrec.options import TorchRecOptions
from dlrm_bench.pipeline.torchrec.sharding import Sharders, quantized_codecs

_SCHEDULES = {
    "base": TrainPipelineBase,
    "sparse-dist": TrainPipelineSparseDist,
    "fused-sparse-dist": TrainPipelineFusedSparseDist,
    "prefetch-sparse-dist": PrefetchTrainPipelineSparseDist,
}


class StockPipeline(TorchRecPipeline):
    """A model under one of TorchRec's own schedules; see pipeline/interface.py."""

    def __init__(
        self, config: TrainingConfig, of_benchmark: TorchRecModel, options: TorchRecOptions, ranks: Ranks
    ) -> None:
        """Collective, with the same configuration on every rank; needs an initialised process group.

        ValueError if the schedule needs a GPU and there is none, or no part of the model can be compiled.
        """
        check_device(options, ranks.device)
        self._options = options
        fused = options.schedule == "fused-sparse-dist"
        drops_repeats = of_benchmark.drops_repeats and ranks.device.type == "cuda"
        sharders = Sharders.of_torchrec(quantized_codecs(options, ranks.device), drops_repeats)
        # The fused schedule looks up the next batch beside the dense optimizer, which updates data-parallel tables:
        # "the assumption made here is the embedding is updated in the fused backward" (its docstring).
        left_out = {ShardingType.DATA_PARALLEL} if fused else ()
        super().__init__(
            config, of_benchmark, options, ranks, sharders, left_out, _data_parallel(options, ranks.device)
        )

    def warm_up(self, evaluates: bool) -> None:
        """See TorchRecPipeline. ValueError under a schedule that prefetches, if the run will evaluate: an evaluation's
        lookup would take the cached rows that FBGEMM holds for the next training batch."""
        if evaluates and self._options.prefetches:
            raise ValueError(
                "--schedule prefetch-sparse-dist has already fetched rows of the next training batch, so it cannot "
                "evaluate: choose sparse-dist, or leave --target-auc out"
            )
        super().warm_up(evaluates)

    def set_learning_rate(self, value: float) -> None:
        """See TorchRecPipeline. ValueError under a schedule whose tables would get the rate a step late: FBGEMM gives
        a lookup the rate for its own update."""
        if self._options.schedule == "fused-sparse-dist":
            raise ValueError(
                "--schedule fused-sparse-dist looks up tables a batch ahead, with the previous learning rate: for a "
                "rate that changes, choose --schedule sparse-dist"
            )
        super().set_learning_rate(value)

    def close(self) -> None:
        """Does nothing."""

    def describe(self) -> dict[str, Any]:
        """Returns the model's description, and the switches that do not apply here."""
        off = {}
        if self._options.inplace_copy and self._device.type == "cpu":
            off["inplace_copy"] = "batches stay where they are on the CPU"
        if self._options.dense_all_reduce == "bf16" and self._device.type == "cpu":
            off["dense_all_reduce"] = "PyTorch's all-reduce of gradients in bf16 needs NCCL"
        return {**super().describe(), "switched_off": off}

    def _schedule(self, training: bool) -> Any:
        schedule = _SCHEDULES[self._options.schedule]
        if self._options.prefetches:  # not all TorchRec versions support in-place copies for this schedule
            return schedule(self._model, self._optimizer, self._device)
        return schedule(
            self._model, self._optimizer, self._device, enable_inplace_copy_batch=self._options.inplace_copy
        )


def _data_parallel(options: TorchRecOptions, device: torch.device) -> DataParallelWrapper:
    """Returns the wrapper that replicates the dense network: DistributedDataParallel's all-reduce in fp32 or bf16."""
    in_bf16 = options.dense_all_reduce == "bf16" and device.type == "cuda"
    return DefaultDataParallelWrapper(allreduce_comm_precision="bf16" if in_bf16 else None)
