"""Obstacles that keep a model's sharded modules out of the graph of a whole iteration, each with its remedy."""

from collections.abc import Iterator, Sequence
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch.nn.parallel import DistributedDataParallel
from torchrec import KeyedJaggedTensor

from .sharded_modules import Sharded
from .trimmed.ec_sharder import TrimmedEC
from .trimmed.sharder import TrimmedEBC

OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
"""FBGEMM's fused optimizers whose update takes no number from the host but the learning rate."""


def lookup_kernels(modules: Sequence[Sharded]) -> Iterator[tuple[str, Any]]:
    """Returns FBGEMM's modules of this rank's tables that backward updates, with the name of the sharded module."""
    for one in modules:
        for lookup in one.collection._lookups:
            if not isinstance(lookup, DistributedDataParallel):
                yield from ((one.name, of_group.emb_module) for of_group in lookup._emb_modules)


def why_no_iteration(modules: Sequence[Sharded]) -> str | None:
    """Returns what keeps the modules out of the graph, as far as known before the first batch."""
    for one in modules:
        if type(one.module) not in (TrimmedEBC, TrimmedEC):
            return (
                f"{one.name} is a {one.kind}, whose input dist reads the device: shard an EmbeddingBagCollection by "
                "TrimmedEBCSharder(multi_hot_sizes), an EmbeddingCollection by TrimmedECSharder(sequence_lengths)"
            )
        by_dist = one.module.trimmed_features()
        waiting = [*by_dist.get("dynamic", ()), *by_dist.get("torchrec", ())]
        if waiting:
            return (
                f"the input dist of {', '.join(waiting)} of {one.name} depends on the ids: declare the sizes of all "
                "features to the sharder, plan tables table-wise, column-wise or data-parallel, or set rows_to_all"
            )
        if len(one.module.declared.per_batch) > 1:
            return f"batches of {one.name} are of several sizes (batch_ids): a graph is of one, so declare the largest"
        if getattr(one.module, "gives_ids", False):
            return f"{one.name} gives ids with its vectors (need_indices): give the model what it needs of them"
    whys = (_of_kernel(name, kernel) for name, kernel in lookup_kernels(modules))
    return next((why for why in whys if why is not None), None)


def why_no_iteration_of(modules: Sequence[Sharded], features: Sequence[KeyedJaggedTensor]) -> str | None:
    """Returns what keeps the first batch out of the graph. features: of each module."""
    for one, kjt in zip(modules, features, strict=True):
        if kjt.variable_stride_per_key():
            return f"batch sizes differ between the features of {one.name}: give all of them one size"
        keys: list[str] = kjt.keys()
        undeclared = [key for key in keys if key not in one.module.declared]
        if undeclared:
            return (
                f"the KJT of {one.name} has features of undeclared sizes, {', '.join(undeclared)}: declare them "
                "to its sharder, or give them in a KJT of their own"
            )
    return None


def refusal(why: str) -> str:
    """Returns the error for a model that was to be captured whole, and cannot be."""
    return (
        f"FiveStageOptions(cuda_graph='iteration'): {why}. Or set cuda_graph='iteration-or-dense', which then captures "
        "the dense part alone, as far as it can be"
    )


def _of_kernel(name: str, kernel: Any) -> str | None:
    if not isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
        return f"a table of {name} is looked up by {type(kernel).__name__}: plan the compute kernel `fused`"
    if kernel.lxu_cache_weights.numel() or kernel.weights_uvm.numel():
        return f"a table of {name} lies in host memory, behind a cache that the host manages: plan it on the GPU"
    if kernel.optimizer not in OPTIMIZERS or _counts(kernel):
        return (
            f"the fused update of {name}, {kernel.optimizer.value}, counts its steps on the host: choose SGD, Adagrad "
            "or row-wise Adagrad without weight decay by counters"
        )
    if kernel.stochastic_rounding and kernel.weights_precision != SparseType.FP32:
        return f"{name} rounds its weights at random, which no test compares: set stochastic_rounding=False, or fp32"
    return None


def _counts(kernel: Any) -> bool:
    return bool(
        getattr(kernel, "_used_rowwise_adagrad_with_counter", False)
        or getattr(kernel, "_used_rowwise_adagrad_with_global_weight_decay", False)
    )
