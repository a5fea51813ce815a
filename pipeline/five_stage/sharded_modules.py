"""The sharded modules of a TorchRec model: those that the pipeline runs, and their inputs in the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NoReturn

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import LazyNoWait, ShardedModule

from .batch_fields import Path, copy_of, find_path, forwards_replaced, snapshot

TAKEN = (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """One sharded module of a model."""

    name: str
    """Its path in the model."""
    module: Any

    @property
    def collection(self) -> Any:
        """The module with the input dists and the tables; for feature processors, the module inside."""
        return self.module._embedding_bag_collection if self.has_processors else self.module

    @property
    def has_processors(self) -> bool:
        """Whether feature processors, with their own weights, run in the embedding forward."""
        return isinstance(self.module, ShardedFeatureProcessedEmbeddingBagCollection)

    @property
    def varying(self) -> Sequence[int]:
        """The places of its KJTs whose lengths of looked-up ids differ between batches."""
        found: Sequence[int] = getattr(self.module, "varying_groups", ())
        return found

    @property
    def kind(self) -> str:
        """The type's name."""
        return type(self.module).__name__


def sharded_modules(model: DistributedModelParallel) -> list[Sharded]:
    """Returns the outermost sharded modules of the model. ValueError if there are none, others than TAKEN, or ones that
    would train something else."""
    if isinstance(model, DMPCollection):
        raise ValueError("FiveStagePipeline has no 2D parallelism: wrap the model by DistributedModelParallel")
    found = [
        Sharded(name, module) for name, module in model.module.named_modules() if isinstance(module, ShardedModule)
    ]
    outer = [one for one in found if not any(one.name.startswith(f"{other.name}.") for other in found)]
    wrong = [f"{one.name} is a {one.kind}" for one in outer if not isinstance(one.module, TAKEN)]
    if not outer or wrong:
        raise ValueError(
            f"FiveStagePipeline takes models with {', '.join(kind.__name__ for kind in TAKEN)}; "
            f"{'; '.join(wrong) or 'this one has no sharded module'}. Use TorchRec's TrainPipelineSparseDist for it"
        )
    for one in outer:
        if one.has_processors and getattr(one.collection, "sends_rows_to_all", False):
            raise ValueError(
                f"{one.name} has feature processors, which would replace the weight zero of other ranks' rows: leave "
                "TrimmedEBCSharder's rows_to_all out for it"
            )
    return outer


def find_inputs(model: nn.Module, modules: list[Sharded], batch: Any, device: torch.device) -> dict[Sharded, Path]:
    """Finds the path in `batch`, on `device`, of the KJT that `model(batch)` passes to each module, in the order of
    calls.

    Calls the model, without gradients, until all modules have been called; each call returns zeros. Random numbers and
    buffers are restored afterwards. Modules that are not called are left out. ValueError if no module is called, or one
    twice, or one with a KJT that is not an unchanged part of the batch.
    """
    paths: dict[Sharded, Path] = {}
    batch = copy_of(batch)  # a forward may change it in place, before it trains on it
    put_back = snapshot(model, [one.module for one in modules], device)

    def arrives_at(one: Sharded) -> Callable[..., Any]:
        def arrive(*args: Any, **kwargs: Any) -> Any:
            if one in paths:
                raise _ArrivedError(_twice(one))
            features = next(iter((*args, *kwargs.values())), None)
            path = find_path(batch, features)
            if path is None or not isinstance(features, KeyedJaggedTensor):
                raise _ArrivedError(_no_field(one, features, batch))
            paths[one] = path
            if len(paths) == len(modules):
                raise _ArrivedError(None)
            return LazyNoWait(_zeros(one, features))

        return arrive

    try:
        with forwards_replaced({one.module: arrives_at(one) for one in modules}), torch.no_grad():
            model(batch)
    except _ArrivedError as arrived:
        if arrived.problem is not None:
            raise ValueError(arrived.problem) from None
    finally:
        put_back()
    if not paths:
        names = ", ".join(one.name for one in modules)
        raise ValueError(f"the model's forward does not call {names}: nothing to pipeline")
    return paths


def refuse_call(one: Sharded) -> Callable[..., NoReturn]:
    """Returns a forward for a module that the first batch did not reach."""

    def forward(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"the model calls {one.name}, which it did not call with the first batch: the pipeline has not looked up "
            "its rows. Call every sharded module with every batch"
        )

    return forward


class _ArrivedError(BaseException):  # not an Exception, so that a model's `except Exception` does not catch it
    def __init__(self, problem: str | None) -> None:
        self.problem = problem


def _twice(one: Sharded) -> str:
    return (
        f"the model calls {one.name} twice with one batch, but TorchRec's pipelines and this one look up once: give it "
        "the features of both calls as one KJT, or shard a second module"
    )


def _no_field(one: Sharded, features: Any, batch: Any) -> str:
    return (
        f"the model passes {one.name} a {type(features).__name__} that is not a field of the batch "
        f"({type(batch).__name__}): compute it before the batch reaches the pipeline, whose input dist of the next "
        "batch runs before the model sees it"
    )


def _zeros(one: Sharded, features: KeyedJaggedTensor) -> KeyedTensor | dict[str, JaggedTensor]:
    """Returns zeros in the form of the module's output for `features`."""
    device = features.device()
    if isinstance(one.module, ShardedEmbeddingCollection):
        dim, result = one.module._embedding_dim, {}
        for name in (name for names in one.module._embedding_names_per_sharding for name in names):
            of = features[name.split("@")[0]]
            weights = of.values() if one.module._need_indices else None
            values = torch.zeros(of.values().numel(), dim, dtype=_dtype(one), device=device)
            result[name] = JaggedTensor(values=values, lengths=of.lengths(), weights=weights)
        return result
    collection = one.collection
    names, dims = collection._embedding_names, collection._embedding_dims
    inverse = features.inverse_indices_or_none()
    rows = features.stride() if inverse is None else inverse[1].numel() // len(inverse[0])
    return KeyedTensor(names, dims, torch.zeros(rows, sum(dims), dtype=_dtype(one), device=device))


def _dtype(one: Sharded) -> torch.dtype:
    """Returns the type of the vectors that a module gives, that of all its tables together."""
    if isinstance(one.module, ShardedEmbeddingCollection):
        shardings = list(one.module._sharding_type_to_sharding.values())
    else:
        shardings = one.collection._embedding_shardings
    groups = [
        group for sharding in shardings for rank in sharding._grouped_embedding_configs_per_rank for group in rank
    ]
    dtypes = [(group.fused_params or {}).get("output_dtype", SparseType.FP32).as_dtype() for group in groups]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32
