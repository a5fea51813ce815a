"""TorchRec's EmbeddingCollection with a trimmed input dist, for sequences of declared lengths.

    DistributedModelParallel(model, sharders=[TrimmedECSharder(sequence_lengths={"history": 200}), ...], ...)

is all that a user changes if every sequence has the same number of ids. Sequences of other lengths are padded: each to
a capacity, with an id that the model masks; or all together, to a fixed number of ids per batch, `batch_ids`, by
additional sequences after those of the samples, which the model leaves out. The latter takes far fewer ids if lengths
vary, and fewer still with a choice of such numbers: every batch then has the smallest that fits on all ranks.

If all features of the collection are declared, and tables are sharded table-wise, column-wise or data-parallel, a batch
takes one all-to-all of values, for all sharding types together, and no host read. Otherwise the input dist is
TorchRec's own, whose splits FiveStagePipeline exchanges for all modules together, with one read through pinned memory.

Lookups use bags of at most 16 ids, whatever the sequences are: FBGEMM's kernel has one warp look up a bag, id after id,
and no later step needs the bags.

The output dist is TorchRec's: its splits are known on the host.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.fused_params import get_embedding_table_offset_type
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingEnv2D, ShardingType
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ..cuda_graph import GraphedFunction
from ..groups import own_group
from .batch_size_cache import BatchSizeCache
from .static_dist import FirstWait, Group, RankGroup, Sizes, StaticDist, blocks_of, gather, positions

logger = logging.getLogger(__name__)

_BY_TABLE = (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value)
_LOCAL = ShardingType.DATA_PARALLEL.value


@dataclass(frozen=True, slots=True)
class _Before:
    """Input dist of one sharding type and batch size: this rank's features, and the splits."""

    keys: list[str]
    rows: Tensor | None
    """Their indices among the input's keys; None if they are all keys, in order."""
    length_per_key: list[int]
    values_index: Tensor | None
    """Indices of their ids in the input; None if not needed."""
    input_splits: list[int]
    output_splits: list[int]


class TrimmedEC(ShardedEmbeddingCollection):
    """See the module's docstring. Created by TrimmedECSharder. Streams as for TrimmedEBC."""

    def __init__(self, *args: Any, sizes: Sizes, cuda_graph: bool, **kwargs: Any) -> None:
        """args, kwargs: those of ShardedEmbeddingCollection. Collective: creates a separate process group."""
        super().__init__(*args, **kwargs)
        self._sizes, self._cuda_graph = sizes, cuda_graph
        self._static: StaticDist | None = None
        self._input_keys: list[str] = []
        self._before = BatchSizeCache[list[_Before]]()
        self.why_not_trimmed = self._why_not()
        """Reason why the input dist is TorchRec's own; None if it is trimmed."""
        if self.why_not_trimmed is not None:
            logger.warning("the input dist of an EmbeddingCollection is TorchRec's own: %s", self.why_not_trimmed)
            return
        device = torch.device("cpu") if self._device is None else self._device
        group = own_group(self._env.process_group)
        self.rank_group = RankGroup(group=group, rank=self._env.rank, world_size=self._env.world_size, device=device)
        """The ranks among which ids are exchanged, if the input dist is trimmed."""

    @property
    def declared(self) -> Sizes:
        """The declared numbers of ids."""
        return self._sizes

    @property
    def gives_ids(self) -> bool:
        """Whether each vector comes with its id (need_indices)."""
        return bool(self._need_indices)

    def trimmed_features(self) -> dict[str, list[str]]:
        """Returns features by the kind of their input dist: "static" or TorchRec's own ("torchrec")."""
        names = sorted({name for config in self._embedding_configs for name in config.feature_names})
        return {"static" if self.why_not_trimmed is None else "torchrec": names}

    def reading_features(self) -> list[str]:
        """Returns features whose input dist reads the device."""
        return self.trimmed_features().get("torchrec", [])

    @property
    def input_dist_waits(self) -> bool:
        """Whether the host waits for the device between the steps of an input dist."""
        return self.why_not_trimmed is not None

    def graphed(self) -> list[GraphedFunction]:
        """Returns the functions that are, or will be, replayed as CUDA graphs."""
        return [] if self._static is None else self._static.graphed()

    def close(self) -> None:
        """Destroys the CUDA graphs; later batches run without them."""
        for graphed in self.graphed():
            graphed.close()

    def input_dist(self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Runs TorchRec's input dist, trimmed. ValueError if the input differs in form from the first one, or from its
        declaration; lengths that the host does not have are trusted."""
        if self.why_not_trimmed is not None:
            return super().input_dist(ctx, features)
        features = maybe_td_to_kjt(features)
        kind = self._kind(features)
        if (problem := self._misfit(features, kind)) is not None:
            raise ValueError(problem)
        with torch.no_grad():
            if self._static is None:
                self._input_keys = features.keys()
                self._static = StaticDist(
                    self._groups(), self._input_keys, self._sizes, self.rank_group, self._cuda_graph, pooled=False
                )
                self._has_uninitialized_input_dist = False
            batch = self._static.start(features, kind)
            stride, lengths = features.stride(), features.lengths()
            make = partial(self._lay_out, stride, kind)
            before = self._before.get((stride, kind, lengths.dtype), self.rank_group.device, make, None)
            per_key = lengths.view(len(self._input_keys), stride)
            awaitables: list[Awaitable[Awaitable[KeyedJaggedTensor]]] = []
            for index, of in enumerate(before):
                ids = features.values() if of.values_index is None else gather(features.values(), of.values_index)
                context = SequenceShardingContext(
                    features_before_input_dist=KeyedJaggedTensor(
                        keys=of.keys,
                        values=ids,
                        lengths=gather(per_key, of.rows).view(-1),
                        stride=stride,
                        length_per_key=of.length_per_key,
                    ),
                    input_splits=of.input_splits,
                    output_splits=of.output_splits,
                    batch_size_per_rank=[stride] * self.rank_group.world_size,
                )
                ctx.sharding_contexts.append(context)
                awaitables.append(FirstWait(batch, index))
        return KJTListSplitsAwaitable(awaitables, ctx, self._module_fqn, list(self._sharding_type_to_sharding))

    def _why_not(self) -> str | None:
        others = [kind for kind in self._sharding_type_to_sharding if kind not in (*_BY_TABLE, _LOCAL)]
        if others:
            return f"{', '.join(others)} tables depend on the ids"
        names = {name for config in self._embedding_configs for name in config.feature_names}
        undeclared = sorted(name for name in names if name not in self._sizes)
        if undeclared:
            return f"neither sequence_lengths nor batch_ids declares {', '.join(undeclared)}"
        if self._use_index_dedup:
            return "use_index_dedup needs the distinct ids"
        if any(config.use_virtual_table for config in self._embedding_configs):
            return "tables are virtual"
        return None

    def _groups(self) -> list[Group]:
        groups = []
        for index, (kind, sharding) in enumerate(self._sharding_type_to_sharding.items()):
            alike = [sharding.feature_names()] * self.rank_group.world_size
            groups.append(
                Group(
                    index=index,
                    features=sharding.feature_names_per_rank() if kind in _BY_TABLE else alike,
                    exchanged=kind != _LOCAL,
                    offset_type=get_embedding_table_offset_type(sharding.embedding_tables()[0].fused_params),
                    width=self._embedding_dim,
                )
            )
        return groups

    def _lay_out(self, stride: int, kind: int) -> list[_Before]:
        rank_group, before, keys = self.rank_group, [], self._input_keys
        ids = partial(self._sizes.ids, stride=stride, kind=kind)
        known = self._need_indices and all(key in self._sizes for key in keys)
        for group, sharding in zip(self._groups(), self._sharding_type_to_sharding.values(), strict=True):
            names = sharding.feature_names()
            sent = [sum(map(ids, of_rank)) for of_rank in group.features]
            before.append(
                _Before(
                    keys=names,
                    rows=positions([(keys.index(name), 1) for name in names], len(keys), rank_group.device),
                    length_per_key=list(map(ids, names)),
                    values_index=positions(*blocks_of(names, keys, ids), rank_group.device) if known else None,
                    input_splits=sent,
                    output_splits=[sent[rank_group.rank]] * rank_group.world_size,
                )
            )
        return before

    def _kind(self, features: KeyedJaggedTensor) -> int:
        """Returns the kind of this batch among the sizes' kinds, by its number of ids; 0 if no kind matches."""
        kinds = range(len(self._sizes.per_batch))
        if len(kinds) == 1 or any(key not in self._sizes for key in features.keys()):  # noqa: SIM118 no dict
            return 0
        found = features.values().numel()
        return next((kind for kind in kinds if self._total(features, kind) == found), 0)

    def _total(self, features: KeyedJaggedTensor, kind: int) -> int:
        return sum(self._sizes.ids(key, features.stride(), kind) for key in features.keys())  # noqa: SIM118

    def _misfit(self, features: KeyedJaggedTensor, kind: int) -> str | None:
        sizes, keys, stride = self._sizes, features.keys(), features.stride()
        if features.variable_stride_per_key():
            return "TrimmedECSharder does not support batch sizes per feature: use EmbeddingCollectionSharder"
        if self._input_keys and keys != self._input_keys:
            return f"the input's keys are {keys}, but the first input's were {self._input_keys}: keep their order"
        if not self._input_keys:
            names = {name for config in self._embedding_configs for name in config.feature_names}
            if missing := names - set(keys):
                return f"the input lacks the features {', '.join(sorted(missing))}, which the tables look up"
            undeclared = sorted(key for key in keys if key not in sizes)
            if self._need_indices and undeclared:
                return f"need_indices needs the ids at fixed places: declare {', '.join(undeclared)} too"
            if len(sizes.per_batch) > 1 and undeclared:
                return f"several batch_ids are distinguished by their total: declare {', '.join(undeclared)} too"
        for key, length in zip(keys, features.length_per_key_or_none() or (), strict=False):
            if key in sizes and length != sizes.ids(key, stride, kind):
                return _wrong(f"feature {key}", length, stride, [sizes.ids(key, stride, kind)])
        if all(key in sizes for key in keys) and self._total(features, kind) != features.values().numel():
            declared = [self._total(features, of) for of in range(len(sizes.per_batch))]
            return _wrong("the input", features.values().numel(), stride, declared)
        return None


class TrimmedECSharder(EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection into a TrimmedEC; see the module's docstring."""

    def __init__(
        self,
        sequence_lengths: Mapping[str, int] | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
        cuda_graph: bool = False,
        batch_ids: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    ) -> None:
        """sequence_lengths: number of ids in every sequence of a feature, padding included. batch_ids: number of ids of
        a feature in every batch of every rank, padding included; or several such mappings, one of which applies to a
        batch on all ranks: each rank identifies it by its number of ids. cuda_graph: as for TrimmedEBCSharder.
        ValueError if a length is not a positive integer, a feature has both, or the mappings cannot be distinguished or
        name different features."""
        super().__init__(fused_params, qcomm_codecs_registry, use_index_dedup)
        kinds = [batch_ids] if isinstance(batch_ids, Mapping) else batch_ids or [{}]
        per_bag, per_batch = dict(sequence_lengths or {}), [dict(kind) for kind in kinds]
        self._sizes, self._cuda_graph = Sizes(per_bag, per_batch), cuda_graph
        for name, sizes in (("sequence_lengths", per_bag), *(("batch_ids", of) for of in per_batch)):
            wrong = {feature: size for feature, size in sizes.items() if type(size) is not int or size < 1}
            if wrong:
                raise ValueError(f"{name} must be positive integers, not {wrong}")
        if both := sorted(per_bag.keys() & per_batch[0].keys()):
            raise ValueError(f"{', '.join(both)} is in sequence_lengths and in batch_ids: declare it in only one")
        if any(of.keys() != per_batch[0].keys() for of in per_batch):
            raise ValueError("batch_ids name different features: name the same features in all mappings")
        totals = [sum(of.values()) for of in per_batch]
        if len(set(totals)) < len(totals):
            raise ValueError(f"batch_ids have the totals {totals}, which distinguish batches: make them differ")

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TrimmedEC:
        """Returns the sharded collection. Collective. ValueError if the environment has several process groups."""
        if env.process_group is None or isinstance(env, ShardingEnv2D):
            raise ValueError("TrimmedECSharder shards over one process group: use EmbeddingCollectionSharder")
        return TrimmedEC(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
            sizes=self._sizes,
            cuda_graph=self._cuda_graph,
        )

    @property
    def sharded_module_type(self) -> type[TrimmedEC]:
        """The type of module that `shard` returns."""
        return TrimmedEC


def _wrong(what: str, found: int, stride: int, declared: list[int]) -> str:
    return (
        f"{what} has {found} ids in {stride} sequences, TrimmedECSharder was told {' or '.join(map(str, declared))} in "
        "all: pad to that, or leave the feature out of sequence_lengths and batch_ids"
    )
