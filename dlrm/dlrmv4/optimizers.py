"""DLRMv4's optimizers on TorchRec's modules: row-wise Adagrad in the tables' backward pass, clipped Adam on all else.

    fuse_table_optimizer(model, config)                 # before sharding
    sharded = DistributedModelParallel(model, ...)
    optimizer = RampedOptimizer(sharded, config)
    pipeline = TrainPipelineSparseDist(sharded, optimizer, device)

TorchRec averages gradients over the ranks, dense ones by DistributedDataParallel and those of rows as they are sent, so
that all are of the global batch's mean loss. Weights are fp32 whatever the network computes in: an update at MLPerf's
rates is far less than bf16 can add to them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_bench.dlrm.config import require
from dlrm_bench.dlrm.dlrmv4.config import OptimizerConfig
from dlrm_bench.dlrm.dlrmv4.model import Dlrmv4Train


def fuse_table_optimizer(model: Dlrmv4Train, config: OptimizerConfig) -> None:
    """Let the tables be updated in their backward pass by row-wise Adagrad, once the model is sharded: each row's state
    grows by the mean of its squared gradient, and the row falls by rate * gradient / (sqrt(state) + eps)."""
    arguments = {"lr": config.rate_after(0), "eps": config.adagrad_eps}
    apply_optimizer_in_backward(RowWiseAdagrad, model.model.embeddings.parameters(), arguments)


def _check_sharding(model: DistributedModelParallel) -> None:
    for name, table in model.state_dict().items():
        if ".embeddings." in name:
            table_name = name.split(".")[-2]
            require(
                isinstance(table, ShardedTensor),
                f"table {table_name} is replicated on all ranks, where its rate cannot follow a ramp: shard it by rows",
            )
            columns = {shard.shard_sizes[1] for shard in table.metadata().shards_metadata}
            require(
                columns == {table.size()[1]},
                f"table {table_name} is sharded by columns: row-wise Adagrad would keep a state for each part of a row "
                "in place of one for the row; shard it by rows, or place it whole on a rank",
            )


class RampedOptimizer:
    """What TorchRec's train pipelines take as an optimizer: it clips, updates and sets the rates of the next iteration.

    The rate of tables must stand before a backward pass, which updates them: it is set at the end of the step before.
    """

    def __init__(self, model: DistributedModelParallel, config: OptimizerConfig, step: int = 0) -> None:
        """step: of the first iteration that will be trained. ValueError where a table is replicated or sharded by
        columns."""
        _check_sharding(model)
        self._config, self._step = config, step
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        self._weights = list(dense.values())
        self._tables = model.fused_optimizer
        self.states = CombinedOptimizer([self._tables, ("dense", KeyedOptimizerWrapper(dense, self._adam))])
        """TorchRec's optimizer of all weights, whose state_dict holds their states."""
        self._set_rates()

    @property
    def step_count(self) -> int:
        """The iteration that comes next, counted from 0."""
        return self._step

    def go_to(self, step: int) -> None:
        """Let `step` be the next iteration, for a run that goes on; states are loaded through `states`."""
        self._step = step
        self._set_rates()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of dense weights; those of tables are never kept."""
        self.states.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Clips the dense gradient's norm and updates dense weights; the backward pass has updated the tables."""
        assert closure is None, "TorchRec's pipelines compute the loss themselves"
        if self._config.clip_norm:
            nn.utils.clip_grad_norm_(self._weights, self._config.clip_norm)
        self.states.step()
        self._step += 1
        self._set_rates()

    def _set_rates(self) -> None:
        for group in self.states.param_groups:
            group["lr"] = self._config.rate_after(self._step)
        self._tables.step()  # gives FBGEMM's kernels the rate, and updates nothing

    def _adam(self, weights: list[nn.Parameter]) -> torch.optim.Adam:
        return torch.optim.Adam(
            weights, lr=self._config.rate_after(self._step), betas=self._config.adam_betas, eps=self._config.adam_eps
        )
