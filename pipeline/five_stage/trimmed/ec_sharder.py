"""TorchRec's EmbeddingCollection with an input dist that asks nothing, for sequences of fixed lengths.

    DistributedModelParallel(model, sharders=[TrimmedECSharder(sequence_lengths={"history": 200}), ...], ...)

is all that a user changes. Sequences of other lengths are padded to a capacity, with an id that the model masks. Where
all features of the collection are declared, and tables are sharded table-wise, column-wise or data-parallel, a batch
takes one all-to-all of values, of all sharding types together, and no host read. Otherwise the input dist is TorchRec's
own, whose splits FiveStagePipeline exchanges for all modules together, with one read through pinned memory.

The vectors' way back is TorchRec's: their splits are known on the host.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
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

from ...cuda_graph import GraphedFunction
from .batch_size_cache import BatchSizeCache
from .sharder import own_group
from .static_dist import FirstWait, Group, RankGroup, StaticDist, gather, positions

logger = logging.getLogger(__name__)

_BY_TABLE = (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value)
_LOCAL = ShardingType.DATA_PARALLEL.value


@dataclass(frozen=True, slots=True)
class _Before:
    """Input dist of one sharding type and batch size: this rank's own features, and what goes where."""

    keys: list[str]
    lengths: Tensor
    length_per_key: list[int]
    values_index: Tensor | None
    """Their ids among the input's; None where nobody asks for them."""
    input_splits: list[int]
    output_splits: list[int]


class TrimmedEC(ShardedEmbeddingCollection):
    """See the module. Made by TrimmedECSharder. Streams are those of TrimmedEBC."""

    def __init__(self, *args: Any, sequence_lengths: Mapping[str, int], cuda_graph: bool, **kwargs: Any) -> None:
        """args, kwargs: those of ShardedEmbeddingCollection. Collective: makes a process group of its own."""
        super().__init__(*args, **kwargs)
        self._sequence_lengths, self._cuda_graph = sequence_lengths, cuda_graph
        self._static: StaticDist | None = None
        self._input_keys: list[str] = []
        self._before = BatchSizeCache[list[_Before]]()
        self.why_not_trimmed = self._why_not()
        """Why the input dist is TorchRec's own, if it is."""
        if self.why_not_trimmed is not None:
            logger.warning("the input dist of an EmbeddingCollection is TorchRec's own: %s", self.why_not_trimmed)
            return
        device = torch.device("cpu") if self._device is None else self._device
        group = own_group(self._env.process_group)
        self._rank_group = RankGroup(group=group, rank=self._env.rank, world_size=self._env.world_size, device=device)

    @property
    def input_dist_waits(self) -> bool:
        """Whether the host waits for the device between the steps of an input dist."""
        return self.why_not_trimmed is not None

    def graphed(self) -> list[GraphedFunction]:
        """Returns the functions that are replayed as CUDA graphs, or are to be."""
        return [] if self._static is None else self._static.graphed()

    def close(self) -> None:
        """Destroys the CUDA graphs; later batches go without."""
        for graphed in self.graphed():
            graphed.close()

    def input_dist(self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """TorchRec's, trimmed. ValueError where the input is not what the first one was, or not as it was declared;
        lengths are trusted as far as the host does not have them."""
        if self.why_not_trimmed is not None:
            return super().input_dist(ctx, features)
        features = maybe_td_to_kjt(features)
        if (problem := self._misfit(features)) is not None:
            raise ValueError(problem)
        with torch.no_grad():
            if self._static is None:
                self._input_keys = features.keys()
                self._static = StaticDist(
                    self._groups(), self._input_keys, self._sequence_lengths, self._rank_group, self._cuda_graph
                )
                self._has_uninitialized_input_dist = False
            batch = self._static.start(features)
            stride, lengths = features.stride(), features.lengths_or_none()
            size = stride, features.offsets().dtype if lengths is None else lengths.dtype
            before = self._before.get(size, self._rank_group.device, partial(self._lay_out, *size), None)
            awaitables: list[Awaitable[Awaitable[KeyedJaggedTensor]]] = []
            for index, of in enumerate(before):
                ids = features.values() if of.values_index is None else gather(features.values(), of.values_index)
                context = SequenceShardingContext(
                    features_before_input_dist=KeyedJaggedTensor(
                        keys=of.keys, values=ids, lengths=of.lengths, stride=stride, length_per_key=of.length_per_key
                    ),
                    input_splits=of.input_splits,
                    output_splits=of.output_splits,
                    batch_size_per_rank=[stride] * self._rank_group.world_size,
                )
                ctx.sharding_contexts.append(context)
                awaitables.append(FirstWait(batch, index))
        return KJTListSplitsAwaitable(awaitables, ctx, self._module_fqn, list(self._sharding_type_to_sharding))

    def _why_not(self) -> str | None:
        others = [kind for kind in self._sharding_type_to_sharding if kind not in (*_BY_TABLE, _LOCAL)]
        if others:
            return f"{', '.join(others)} tables depend on the ids"
        names = {name for config in self._embedding_configs for name in config.feature_names}
        undeclared = sorted(names - set(self._sequence_lengths))
        if undeclared:
            return f"sequence_lengths has no {', '.join(undeclared)}"
        if self._use_index_dedup:
            return "use_index_dedup asks for the distinct ids"
        if any(config.use_virtual_table for config in self._embedding_configs):
            return "tables are virtual"
        return None

    def _groups(self) -> list[Group]:
        groups = []
        for index, (kind, sharding) in enumerate(self._sharding_type_to_sharding.items()):
            alike = [sharding.feature_names()] * self._rank_group.world_size
            groups.append(
                Group(
                    index=index,
                    features=sharding.feature_names_per_rank() if kind in _BY_TABLE else alike,
                    exchanged=kind != _LOCAL,
                    offset_type=get_embedding_table_offset_type(sharding.embedding_tables()[0].fused_params),
                )
            )
        return groups

    def _lay_out(self, stride: int, dtype: torch.dtype) -> list[_Before]:
        sizes, rank_group, before = self._sequence_lengths, self._rank_group, []
        keys = self._input_keys
        known = self._need_indices and all(key in sizes for key in keys)
        starts = dict(zip(keys, accumulate((sizes.get(key, 0) for key in keys), initial=0), strict=False))
        for group, sharding in zip(self._groups(), self._sharding_type_to_sharding.values(), strict=True):
            names = sharding.feature_names()
            of_names = torch.tensor([sizes[name] for name in names], dtype=torch.int64)
            blocks = [(stride * starts[name], stride * sizes[name]) for name in names]
            sent = [stride * sum(sizes[name] for name in of_rank) for of_rank in group.features]
            before.append(
                _Before(
                    keys=names,
                    lengths=of_names.repeat_interleave(stride).to(rank_group.device, dtype),
                    length_per_key=(of_names * stride).tolist(),
                    values_index=positions(blocks, stride * sum(sizes[key] for key in keys), rank_group.device)
                    if known
                    else None,
                    input_splits=sent,
                    output_splits=[sent[rank_group.rank]] * rank_group.world_size,
                )
            )
        return before

    def _misfit(self, features: KeyedJaggedTensor) -> str | None:
        sizes, keys, stride = self._sequence_lengths, features.keys(), features.stride()
        if features.variable_stride_per_key():
            return "TrimmedECSharder has no variable batch per feature: use EmbeddingCollectionSharder"
        if self._input_keys and keys != self._input_keys:
            return f"the input's keys are {keys}, those of the first one were {self._input_keys}: keep their order"
        if not self._input_keys:
            names = {name for config in self._embedding_configs for name in config.feature_names}
            if missing := names - set(keys):
                return f"the input has no feature {', '.join(sorted(missing))}: the tables look them up"
            if self._need_indices and (undeclared := sorted(set(keys) - set(sizes))):
                return f"need_indices asks for the ids of fixed places: declare {', '.join(undeclared)} too"
        for key, length in zip(keys, features.length_per_key_or_none() or (), strict=False):
            if key in sizes and length != stride * sizes[key]:
                return _wrong(f"feature {key}", length, stride, sizes[key])
        total, found = sum(sizes.get(key, 0) for key in keys), features.values().numel()
        if all(key in sizes for key in keys) and found != stride * total:
            return _wrong("the input", found, stride, total)
        return None


class TrimmedECSharder(EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection into a TrimmedEC; see the module."""

    def __init__(
        self,
        sequence_lengths: Mapping[str, int],
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        """sequence_lengths: ids of every sequence of a feature, padding included. cuda_graph: as TrimmedEBCSharder's.
        ValueError where a length is not a positive integer."""
        super().__init__(fused_params, qcomm_codecs_registry, use_index_dedup)
        wrong = {name: length for name, length in sequence_lengths.items() if type(length) is not int or length < 1}
        if wrong:
            raise ValueError(f"sequence_lengths must be positive integers, not {wrong}")
        self._sequence_lengths, self._cuda_graph = dict(sequence_lengths), cuda_graph

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TrimmedEC:
        """Collective. ValueError where the environment has not one process group."""
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
            sequence_lengths=self._sequence_lengths,
            cuda_graph=self._cuda_graph,
        )

    @property
    def sharded_module_type(self) -> type[TrimmedEC]:
        """The type of module that `shard` makes."""
        return TrimmedEC


def _wrong(what: str, found: int, stride: int, declared: int) -> str:
    return (
        f"{what} has {found} ids in {stride} sequences, sequence_lengths declares {declared} each: pad to it, or leave "
        "a feature of variable lengths out"
    )
