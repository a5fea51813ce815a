"""Obstacles that keep a TorchRec pipeline's iteration out of one CUDA graph, as far as its model shows.

This runs in the examined process, which has TorchRec; TorchRec's types and the trimmed ones are known by their names,
so that neither is imported. What only batches or a capture show, such as a forward that reads a KJT, is not seen here.
"""

from collections.abc import Iterator
from typing import Any

import torch

from .capture_model import of_model
from .capture_update import of_optimizer

_BAGS, _SEQUENCES = "ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"
_PROCESSED = "ShardedFeatureProcessedEmbeddingBagCollection"
_TRIMMED = ("TrimmedEBC", "TrimmedEC")
_BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")
_IN_HOST_MEMORY = ("uvm", "ssd", "key_value", "virtual")
_KERNEL = "SplitTableBatchedEmbeddingBagsCodegen"
COUNTING = ("adam", "partial_row_wise_adam", "lamb", "partial_row_wise_lamb")
"""FBGEMM's fused optimizers that are given their step by the host."""
UPDATES = ("exact_sgd", "exact_adagrad", "exact_row_wise_adagrad", *COUNTING)
"""FBGEMM's fused optimizers that a graph takes."""
_CUDA = 12040
"""The first version of CUDA in which the numbers of a captured graph's kernels can be changed."""


def of_pipeline(pipeline: Any) -> list[str]:
    """Returns the changes that a pipeline's model and optimizer need; empty without sharded modules."""
    model: Any = getattr(pipeline, "_model", None)
    if not hasattr(model, "named_modules"):
        return []
    root: Any = getattr(model, "module", model)
    sharded = _sharded_modules(root)
    if not sharded:
        return []
    found = [said for name, module in sharded.items() for said in _of_module(name, module)]
    found += of_model(model, root, {name: (module, _collection(module)) for name, module in sharded.items()})
    found += of_optimizer(getattr(pipeline, "_optimizer", None))
    return list(dict.fromkeys(found))


def _sharded_modules(root: Any) -> dict[str, Any]:
    """Returns the outermost sharded modules by name."""
    found: dict[str, Any] = {}
    for name, module in root.named_modules():
        if "ShardedModule" in _types(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name or "the model"] = module
    return found


def _types(module: Any) -> set[str]:
    return {base.__name__ for base in type(module).__mro__}


def _collection(module: Any) -> Any:
    """Returns the module with the tables; for feature processors the one inside."""
    return module._embedding_bag_collection if _PROCESSED in _types(module) else module


def _of_module(name: str, module: Any) -> Iterator[str]:
    types, collection = _types(module), _collection(module)
    if not types & {_BAGS, _SEQUENCES, _PROCESSED}:
        yield f"{name} is a {type(module).__name__}, which no graph of an iteration takes"
        return
    plan = list(collection.module_sharding_plan.values())
    by_rows = any(of.sharding_type in _BY_ROWS for of in plan)
    trimmed = type(collection).__name__ in _TRIMMED
    if not trimmed:
        yield f"{name} needs bags or sequences of declared sizes: {_sharder(types)}"
    if by_rows and _PROCESSED in types:
        yield (
            f"{name} has feature processors and tables that are split by rows: plan them table-wise, column-wise or "
            "data-parallel"
        )
    elif by_rows and _SEQUENCES in types:
        yield f"{name} has sequences of tables that are split by rows: plan them table-wise or column-wise"
    elif by_rows and not trimmed:
        yield f"{name} has tables that are split by rows: TrimmedEBCSharder(row_capacity=1.0)"
    elif trimmed and (features := collection.reading_features()):
        rows = ", give bags that are split by rows TrimmedEBCSharder's row_capacity" if by_rows else ""
        yield f"{name} reads the sizes of {', '.join(features)}: declare all sizes{rows}, or plan tables table-wise"
    if any(word in of.compute_kernel for of in plan for word in _IN_HOST_MEMORY):
        yield f"{name} has tables in host memory: plan them on the GPU"
    if getattr(collection, "_need_indices", False):
        yield f"{name} gives ids with its vectors (need_indices)"
    if getattr(collection, "validates", False):
        yield f"{name} looks at every length of every batch: leave out TrimmedEBCSharder's validate=True"
    if trimmed and (undeclared := [key for key in collection._input_keys if key not in collection.declared]):
        yield f"{name} is given features of undeclared sizes, {', '.join(undeclared)}: declare them, or leave them out"
    yield from _of_kernels(name, collection)


def _sharder(types: set[str]) -> str:
    if _SEQUENCES in types:
        return "TrimmedECSharder(sequence_lengths)"
    bags = "TrimmedEBCSharder(multi_hot_sizes)"
    return f"FeatureProcessedEmbeddingBagCollectionSharder({bags})" if _PROCESSED in types else bags


def _of_kernels(name: str, collection: Any) -> Iterator[str]:
    """Yields what is wrong with the modules that look up this rank's tables, but for replicated tables."""
    lookups = [of for of in collection._lookups if "DistributedDataParallel" not in _types(of)]
    for kernel in [group.emb_module for of in lookups for group in of._emb_modules]:
        if _KERNEL not in _types(kernel):
            yield f"{name} has a table that is looked up by {type(kernel).__name__}: plan the compute kernel `fused`"
            continue
        optimizer = kernel.optimizer.value
        counters = ("_used_rowwise_adagrad_with_counter", "_used_rowwise_adagrad_with_global_weight_decay")
        if optimizer not in UPDATES or any(getattr(kernel, counter, False) for counter in counters):
            yield f"{name} is updated by {optimizer} with numbers of the host: take SGD, Adagrad, Adam or LAMB"
        elif optimizer in COUNTING and _steps_stay():
            yield f"{name} is updated by {optimizer}, whose step a graph follows with newer versions of torch and CUDA"
        if kernel.stochastic_rounding and kernel.weights_precision.value != "fp32":
            yield f"{name} rounds its weights at random: set stochastic_rounding=False, or fp32"


def _steps_stay() -> bool:
    """Whether the numbers of a captured graph's kernels cannot be changed with this torch, or this driver."""
    if not torch.cuda.is_available():  # nothing is captured here
        return False
    of_torch: Any = torch._C
    return not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec") or of_torch._cuda_getDriverVersion() < _CUDA
