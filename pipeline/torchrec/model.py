"""The parts that every pipeline over TorchRec's modules shares: sharded model, optimizer, batches, state.

DistributedModelParallel, the tables' optimizer fused into the embedding backward, the dense optimizer beside it; parts
that are specific to a model are in the benchmark's TorchRecModel.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch._dynamo
from torch import Tensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.types import CommOp, ParameterSharding, ShardingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from dlrm_bench.dlrm.config import TrainingConfig, check_learning_rate, require
from dlrm_bench.dlrm.data.dataset import HostBatch
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.torchrec_model import TorchRecModel
from dlrm_bench.pipeline.interface import Capacities, StepMetrics
from dlrm_bench.pipeline.state import StateBlocks
from dlrm_bench.pipeline.torchrec.options import TorchRecModelOptions
from dlrm_bench.pipeline.torchrec.planner import table_optimizer
from dlrm_bench.pipeline.torchrec.sharding import Built, Codecs, Sharders, build_sharded
from dlrm_bench.pipeline.torchrec.state import forget_cached_rows, state_blocks

_WARM_UP_BATCHES = 3
_COMPILER = "inductor"
"""The backend of torch.compile."""


class TorchRecPipeline(ABC):
    """A model sharded by TorchRec, under any schedule; see pipeline/interface.py."""

    _caches_casts = True
    """Whether autocast caches its casts of the weights. A captured graph must cast them itself, not read casts made
    before its capture."""

    def __init__(
        self,
        config: TrainingConfig,
        of_benchmark: TorchRecModel,
        options: TorchRecModelOptions,
        ranks: Ranks,
        sharders: Sharders,
        left_out: Collection[ShardingType] = (),
        data_parallel: DataParallelWrapper | None = None,
    ) -> None:
        """Collective, with the same configuration on every rank; needs an initialised process group.

        left_out: sharding types that the planner must not choose. data_parallel: how the dense network is replicated;
        None is TorchRec's default. ValueError if the dense parts are to be compiled, and the benchmark names none.
        """
        require(
            bool(of_benchmark.compiled) or not options.compile_dense,
            "--compile-dense: torch.compile supports no part of this model; leave it out",
        )
        self._config, self._ranks, self._device = config, ranks, ranks.device
        self._of_benchmark = of_benchmark
        built = build_sharded(config, of_benchmark, options, ranks, sharders, left_out, data_parallel)
        self._model, self._plan, self._tables, self._guard = built.model, built.plan, built.tables, built.guard
        self._optimizer = _build_optimizer(built, of_benchmark, config)
        if options.compile_dense:
            _compile(of_benchmark)
        self._codecs: Codecs | None = sharders.bags.qcomm_codecs_registry
        self._iteration = 0
        self._metrics: StepMetrics | None = None
        self._train, self._eval = self._schedule(training=True), self._schedule(training=False)

    @property
    def model(self) -> DistributedModelParallel:
        """The sharded model, for its state_dict."""
        return self._model

    @property
    def optimizer(self) -> CombinedOptimizer:
        """Fused embedding optimizer and dense optimizer together."""
        return self._optimizer

    def prepare(self, batch: HostBatch) -> Pipelineable:
        """Returns the batch as input of the model's forward, over the same memory."""
        return self._of_benchmark.batch(batch)

    def warm_up(self, evaluates: bool) -> None:
        """Evaluates empty batches if the run will evaluate. Trains nothing: a step before the first batch would leave
        batches in the schedule."""
        if evaluates:
            batch = self._of_benchmark.zeros()
            for _ in self.evaluate(map(self.prepare, repeat(batch, _WARM_UP_BATCHES))):
                pass

    def train_step(self, batches: Iterator[Pipelineable]) -> Tensor:
        """Runs one `progress` of the schedule, which may read two batches ahead."""
        self._iteration += 1
        if self._of_benchmark.before_step is not None:
            self._of_benchmark.before_step(self._iteration)
        loss, logits, labels = self._progress(self._train, batches)
        if self._metrics is not None:
            self._metrics.update(torch.sigmoid(logits.detach().float()).flatten(), labels.flatten().float())
        return loss

    def measure(self, metrics: StepMetrics) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        self._metrics = metrics

    def evaluate(self, batches: Iterator[Pipelineable]) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs a second schedule on the same model, like the reference."""
        with self._evaluating():
            while True:
                try:
                    with torch.no_grad():
                        _, logits, labels = self._progress(self._eval, batches)
                except StopIteration:
                    return
                yield logits, labels

    def capacities(self) -> Capacities:
        """See dlrm_bench.pipeline.interface.Pipeline: no shape depends on earlier batches."""
        return {}

    def go_on_after(self, iterations: int, capacities: Capacities) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        self._iteration = iterations

    def tallies(self) -> Tallies:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        return self._guard.tallies

    def set_learning_rate(self, value: float) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline: sets the rate of every parameter group; FBGEMM's fused update
        reads its group's rate in the optimizer's zero_grad, before the backward."""
        if value != 0:  # a ramp begins with 0, which changes no weight
            check_learning_rate(value)
        for group in self._optimizer.param_groups:
            group["lr"] = value

    def take_blocks(self, blocks: StateBlocks) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline: the blocks are the trained memory itself, except for rows of
        tables in host memory that a GPU's cache held before."""
        self._synchronize()
        forget_cached_rows(self._model)

    def state_blocks(self) -> StateBlocks:
        """See dlrm_bench.pipeline.interface.Pipeline; ValueError if a state belongs to the sharding and not to the
        model."""
        self._synchronize()
        optimizer = self._config.optimizer.tables
        return state_blocks(self._model, self._optimizer, self._of_benchmark, self._tables, optimizer)

    @abstractmethod
    def close(self) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline."""

    def describe(self) -> dict[str, Any]:
        """Returns the sharding type and ranks of every table, as planned; formats of quantised collectives."""
        tables = {name: sharding for of_module in self._plan.plan.values() for name, sharding in of_module.items()}
        described: dict[str, Any] = {
            "sharding_plan": {
                name.removeprefix(self._of_benchmark.table_prefix): {
                    "sharding_type": sharding.sharding_type,
                    "compute_kernel": sharding.compute_kernel,
                    "ranks": sharding.ranks,
                    **_cached_share(sharding),
                }
                for name, sharding in tables.items()
            }
        }
        if self._codecs is not None:
            codecs = self._codecs[CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name]
            dtypes = {"forward": codecs.forward.quantized_dtype, "backward": codecs.backward.quantized_dtype}
            described["quantized_comms"] = {way: str(dtype).removeprefix("torch.") for way, dtype in dtypes.items()}
        return described

    @abstractmethod
    def _schedule(self, training: bool) -> Any:
        """Returns a scheduler of model and optimizer with the method `progress`, like TorchRec's train pipelines.

        training: whether to train or to evaluate.
        """

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Sets evaluation mode, and detaches the training's schedule, which keeps its batches in flight."""
        # TorchRec's pipelines, except TrainPipelineBase, rewrite the EBC's forward; only one may do so at a time.
        rewritten = isinstance(self._train, TrainPipelineSparseDist)
        self._synchronize()
        if rewritten:
            self._train.detach()
        self._model.eval()
        try:
            yield
        finally:
            if isinstance(self._eval, TrainPipelineBase):
                self._eval.reset()
            elif rewritten:
                self._eval.detach()
            self._model.train()
            if rewritten:
                # The input dist of the batches in flight is already done: attach without starting it again.
                self._train.attach(sparse_dist=False)

    def _progress(self, schedule: Any, batches: Iterator[Pipelineable]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns loss, logits [B] and labels [B] of the next batch, detached."""
        autocast = torch.autocast(
            self._device.type,
            torch.bfloat16,
            enabled=self._config.precision == "bf16" and not self._of_benchmark.casts,
            cache_enabled=self._caches_casts,
        )
        with autocast:
            return schedule.progress(batches)

    def _synchronize(self) -> None:
        """Waits for every stream: schedules read and update tables on other streams."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _cached_share(sharding: ParameterSharding) -> dict[str, float]:
    """Returns the share of a table's rows that the GPU caches, if the table is in host memory; empty otherwise."""
    share = sharding.cache_params and sharding.cache_params.load_factor
    return {} if share is None else {"cache_load_factor": share}


def _compile(of_benchmark: TorchRecModel) -> None:
    # TorchRec's schedules trace the plain forward with torch.fx, to find the inputs of its sharded modules.
    torch._dynamo.config.error_on_nested_fx_trace = False
    for module in of_benchmark.compiled:
        module.compile(backend=_COMPILER)  # for fixed sizes first, and for any number of samples or tokens if they vary


def _build_optimizer(built: Built, of_benchmark: TorchRecModel, config: TrainingConfig) -> CombinedOptimizer:
    not_fused = dict(in_backward_optimizer_filter(built.model.named_parameters()))
    # TorchRec leaves data-parallel tables to the dense optimizer.
    tables = {name: value for name, value in not_fused.items() if name in built.tables}
    optimizers = [built.model.fused_optimizer, built.guard.gate(not_fused.values())]
    if tables and not of_benchmark.dense_updates_tables:
        not_fused = {name: value for name, value in not_fused.items() if name not in tables}
        kind, arguments = table_optimizer(config.optimizer)
        optimizers.append(KeyedOptimizerWrapper(tables, lambda params: kind(params, **arguments)))
    optimizers.append(
        KeyedOptimizerWrapper(not_fused, lambda params: of_benchmark.dense_optimizer(params, built.guard.skip))
    )
    return CombinedOptimizer(optimizers)
