"""Obstacles that keep a TorchRec pipeline's iteration out of one CUDA graph, as far as its model shows.

This runs in the examined process, which has TorchRec; types are known by their names, so that nothing is imported.
"""

from collections.abc import Iterator
from typing import Any

_BAGS, _SEQUENCES = "ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"
_TRIMMED = ("TrimmedEBC", "TrimmedEC")
_BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")
_IN_HOST_MEMORY = ("uvm", "ssd", "key_value", "virtual")
_UPDATES = ("exact_sgd", "exact_adagrad", "exact_row_wise_adagrad")
"""FBGEMM's fused optimizers that keep no counts on the host."""


def of_pipeline(pipeline: Any) -> list[str]:
    """Returns the changes that a pipeline's model needs; empty for one that has none of TorchRec's modules."""
    model: Any = getattr(pipeline, "_model", None)
    if not hasattr(model, "named_modules"):
        return []
    sharded = [(name or "the model", module) for name, module in model.named_modules() if _is_sharded(module)]
    found = [said for name, module in sharded for said in _of_module(name.removeprefix("_dmp_wrapped_module."), module)]
    return list(dict.fromkeys(found))


def _is_sharded(module: Any) -> bool:
    return hasattr(module, "module_sharding_plan") and hasattr(module, "_lookups")


def _of_module(name: str, module: Any) -> Iterator[str]:
    names = {base.__name__ for base in type(module).__mro__}
    plan = list(module.module_sharding_plan.values())
    by_rows = any(of.sharding_type in _BY_ROWS for of in plan)
    if not names & {_BAGS, _SEQUENCES}:
        yield f"{name} is a {type(module).__name__}, which no graph of an iteration takes"
    elif not names & set(_TRIMMED):
        sizes = "TrimmedEBCSharder(multi_hot_sizes)" if _BAGS in names else "TrimmedECSharder(sequence_lengths)"
        yield f"{name} needs bags or sequences of declared sizes: {sizes}"
    if by_rows and _SEQUENCES in names:
        yield f"{name} has sequences of tables that are split by rows: plan them table-wise or column-wise"
    elif by_rows and getattr(module, "_row_capacity", None) is None and not getattr(module, "_rows_to_all", False):
        yield f"{name} has tables that are split by rows: TrimmedEBCSharder(row_capacity=1.0)"
    if any(word in of.compute_kernel for of in plan for word in _IN_HOST_MEMORY):
        yield f"{name} has tables in host memory: plan them on the GPU"
    if getattr(module, "_need_indices", False):
        yield f"{name} gives ids with its vectors (need_indices)"
    for optimizer in sorted({of for of in _optimizers(module) if of not in _UPDATES}):
        yield f"{name} is updated by {optimizer}, which counts its steps on the host"


def _optimizers(module: Any) -> Iterator[str]:
    """Yields the names of the fused optimizers of this rank's tables."""
    for lookup in module._lookups:
        for of_group in getattr(getattr(lookup, "module", lookup), "_emb_modules", ()):
            optimizer = getattr(getattr(of_group, "emb_module", None), "optimizer", None)
            if isinstance(name := getattr(optimizer, "value", None), str):
                yield name
