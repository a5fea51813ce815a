"""Obstacles that keep a model's sharded modules out of the graph of a whole iteration, each with its remedy."""

from collections.abc import Iterator, Sequence
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch.nn.parallel import DistributedDataParallel
from torchrec import KeyedJaggedTensor

from . import reasons
from .graph_obstacles import calls_for_python
from .node_parameters import keeps_graphs
from .sharded_modules import Sharded
from .table_steps import COUNTING
from .trimmed.ebc import TrimmedEBC
from .trimmed.ec_sharder import TrimmedEC

OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, *COUNTING)
"""FBGEMM's fused optimizers whose update takes no number from the host but the learning rate, and those of COUNTING
the step."""


def lookup_kernels(modules: Sequence[Sharded]) -> Iterator[tuple[str, Any]]:
    """Returns FBGEMM's modules of this rank's tables that backward updates, with the name of the sharded module."""
    for one in modules:
        for lookup in one.collection._lookups:
            if not isinstance(lookup, DistributedDataParallel):
                yield from ((one.name, of_group.emb_module) for of_group in lookup._emb_modules)


def why_no_iteration(modules: Sequence[Sharded]) -> str | None:
    """Returns what keeps the modules out of the graph, as far as this rank knows before the first batch: it has the
    kernels of its own tables alone."""
    for one in modules:
        if type(one.collection) not in (TrimmedEBC, TrimmedEC):
            return reasons.NOT_TRIMMED(module=one.name, kind=one.kind)
        if one.has_processors and one.module._row_wise_sharded:
            return reasons.PROCESSED_ROWS(module=one.name)
        if one.has_processors and any(map(calls_for_python, one.module._feature_processors.modules())):
            return reasons.PROCESSOR_HOOKS(module=one.name)
        if waiting := one.collection.reading_features():
            return reasons.READS_SIZES(module=one.name, features=", ".join(waiting))
        if getattr(one.collection, "validates", False):
            return reasons.VALIDATES(module=one.name)
        if getattr(one.collection, "gives_ids", False):
            return reasons.GIVES_IDS(module=one.name)
    whys = (_of_kernel(name, kernel) for name, kernel in lookup_kernels(modules))
    return next((why for why in whys if why is not None), None)


def why_no_iteration_of(modules: Sequence[Sharded], features: Sequence[KeyedJaggedTensor]) -> str | None:
    """Returns what keeps the first batch out of the graph. features: of each module."""
    for one, kjt in zip(modules, features, strict=True):
        if kjt.variable_stride_per_key():
            return reasons.VARIABLE_BATCH(module=one.name)
        keys: list[str] = kjt.keys()
        undeclared = [key for key in keys if key not in one.collection.declared]
        if undeclared:
            return reasons.UNDECLARED(module=one.name, features=", ".join(undeclared))
    return None


def refusal(why: str) -> str:
    """Returns the error for a model whose whole iteration cannot be captured although that was requested."""
    return (
        f"FiveStageOptions(cuda_graph='iteration'): {why}. Or set cuda_graph='iteration-or-dense', which then captures "
        "the dense part alone, as far as it can be"
    )


def _of_kernel(name: str, kernel: Any) -> str | None:
    if not isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
        return reasons.OTHER_KERNEL(module=name, kind=type(kernel).__name__)
    if kernel.lxu_cache_weights.numel() or kernel.weights_uvm.numel():
        return reasons.HOST_MEMORY(module=name)
    if kernel.optimizer not in OPTIMIZERS or _counts(kernel):
        return reasons.COUNTS_STEPS(module=name, optimizer=kernel.optimizer.value)
    if kernel.optimizer in COUNTING and not keeps_graphs():
        return reasons.STEPS_STAY(module=name, optimizer=kernel.optimizer.value)
    if kernel.stochastic_rounding and kernel.weights_precision != SparseType.FP32:
        return reasons.ROUNDS_AT_RANDOM(module=name)
    return None


def _counts(kernel: Any) -> bool:
    return bool(
        getattr(kernel, "_used_rowwise_adagrad_with_counter", False)
        or getattr(kernel, "_used_rowwise_adagrad_with_global_weight_decay", False)
    )
