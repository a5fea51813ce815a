"""The sharded EmbeddingBagCollection with trimmed dists; sharder.py describes its costs."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.fused_params import get_embedding_table_offset_type
from torchrec.distributed.types import Awaitable, ShardingType
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ..cuda_graph import GraphedFunction
from ..groups import own_group
from .capacity_dist import CapacityDist, CapacityInFlight, RowGroup, row_group, row_tables
from .dynamic_dist import DynamicDist
from .output_dist import TrimmedOutputDist
from .owned_rows import heeds_zeros, why_not_split
from .packed_ids import IdFormat
from .static_dist import FirstWait, Group, InFlight, RankGroup, Sizes, StaticDist

logger = logging.getLogger(__name__)

_BY_TABLE = (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
_LOCAL = ShardingType.DATA_PARALLEL.value
_BY_ROW = ShardingType.ROW_WISE.value
_ROWS_OF_NODES = ShardingType.TABLE_ROW_WISE.value


class TrimmedEBC(ShardedEmbeddingBagCollection):
    """See sharder.py. Created by TrimmedEBCSharder.

    `input_dist` and both waits of its result belong on one stream, as in TorchRec's pipelines: the first wait launches
    the values' all-to-all, the second makes that stream wait. Batches in flight share no written memory except that of
    CUDA graphs, which that stream orders; with graphs the first wait does everything.
    """

    def __init__(
        self,
        *args: Any,
        multi_hot_sizes: Mapping[str, int],
        validate: bool,
        cuda_graph: bool,
        rows_to_all: bool,
        row_capacity: float | None,
        **kwargs: Any,
    ) -> None:
        """args, kwargs: those of ShardedEmbeddingBagCollection. Collective: creates a separate process group."""
        self._rows_to_all, self._row_capacity = rows_to_all, row_capacity
        self._cuda_graph = cuda_graph  # for the output dist, which TorchRec's constructor creates
        super().__init__(*args, **kwargs)
        env, device = self._env, self._device
        if self._has_mean_pooling_callback:
            raise ValueError("TrimmedEBCSharder does not support mean pooling of row-wise tables: plan them table-wise")
        self.rank_group = RankGroup(
            group=own_group(env.process_group),
            rank=env.rank,
            world_size=env.world_size,
            device=torch.device("cpu") if device is None else device,
        )
        """The ranks among which ids are exchanged."""
        self._multi_hot_sizes, self._validate = multi_hot_sizes, validate
        self._has_uninitialized_input_dist: bool = True
        self._input_keys: list[str] = []
        self._ids_per_sample: int | None = None
        self._static: StaticDist | None = None
        self._dynamic: DynamicDist | None = None
        self._capacity: CapacityDist | None = None
        self._by_capacity: list[CapacityInFlight] | None = None
        self._stock: dict[int, tuple[nn.Module, list[int], torch.Tensor]] = {}

    @property
    def declared(self) -> Sizes:
        """The declared numbers of ids."""
        return Sizes(self._multi_hot_sizes)

    @property
    def validates(self) -> bool:
        """Whether the host checks every batch."""
        return self._validate

    def trimmed_features(self) -> dict[str, list[str]]:
        """Returns features by the kind of their input dist: "static", "dynamic" or TorchRec's own ("torchrec"); those
        of the last two kinds that have a capacity within `by_capacity` are listed as "capacity" too.

        A feature that tables of several sharding types read may occur several times.
        """
        static, dynamic, others = self._groups()
        names = {"static": _names(static), "dynamic": _names(dynamic)}
        stock = {name for index in others for name in self._embedding_shardings[index].feature_names()}
        rows = sorted({name for group in self._row_groups() for name in group.features})
        return {**names, "torchrec": sorted(stock)} | ({"capacity": rows} if rows else {})

    def reading_features(self) -> list[str]:
        """Returns features whose input dist reads the device, even within `by_capacity`."""
        _, dynamic, others = self._groups()
        waiting = {*(group.index for group in dynamic), *others} - set(self.varying_groups)
        return sorted({name for index in waiting for name in self._embedding_shardings[index].feature_names()})

    @property
    def sends_rows_to_all(self) -> bool:
        """Whether ids of other ranks' rows are looked up with weight zero (rows_to_all)."""
        return any(group.hash_sizes is not None for group in self._groups()[0])

    @property
    def varying_groups(self) -> list[int]:
        """The sharding types whose looked-up bags, within `by_capacity`, vary in length between batches."""
        return [group.index for group in self._row_groups()]

    @contextmanager
    def by_capacity(self) -> Iterator[list[CapacityInFlight]]:
        """Makes input dists of tables split by rows, within the block, read nothing from the device, if `row_capacity`
        is set; yields those that start. After both waits, their `overflow` says whether a batch had more ids than
        capacity, or no id where one is needed."""
        if self._row_groups():
            assert not self.reading_features(), "lookups by capacity need declared sizes of all features"
            self._by_capacity = []
        try:
            yield [] if self._by_capacity is None else self._by_capacity
        finally:
            self._by_capacity = None

    def row_capacities(self, stride: int) -> dict[str, int]:
        """Returns, for batches of `stride` samples, the number of a feature's ids that a rank may send to each
        owner."""
        if (by_capacity := self._capacity_dist(())) is None:
            return {}
        return {
            name: room
            for group, rooms in zip(by_capacity.groups, by_capacity.rooms(stride), strict=True)
            for name, room in zip(group.features, rooms, strict=True)
        }

    @property
    def row_capacity_bytes(self) -> int:
        """Bytes that input dists by `row_capacity` keep: indices, and an empty message."""
        return 0 if self._capacity is None else self._capacity.nbytes

    def graphed(self) -> list[GraphedFunction]:
        """Returns the functions that are, or will be, replayed as CUDA graphs."""
        graphed = [] if self._static is None else self._static.graphed()
        for output_dist in self._output_dists:
            if isinstance(output_dist, TrimmedOutputDist):
                graphed += output_dist.graphed()
        return graphed

    def close(self) -> None:
        """Destroys the CUDA graphs; later batches run without them. NCCL does not release a communicator while a graph
        with its collectives exists. FiveStagePipeline closes the modules that it trained."""
        for graphed in self.graphed():
            graphed.close()

    @property
    def input_dist_waits(self) -> bool:
        """Whether the host waits for the device between the steps of an input dist, judging by the first batch."""
        return self._static is None or self._dynamic is not None or bool(self._stock)

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Runs TorchRec's input dist, trimmed. ValueError if the input differs in form from the first one, or from its
        declaration.

        Lengths, and an equal stride on all ranks, are trusted, unless the sharder was told to validate. Only the number
        of values is always checked, and lengths that the host has.
        """
        features = maybe_td_to_kjt(features)
        problem = self._misfit(features)
        if self._validate:
            problem = problem or self._broken_promise(features) or self._wrong_number(features)
            self._raise_on_all_ranks(features, problem)
        elif problem := problem or self._wrong_number(features):
            raise ValueError(problem)
        ctx.inverse_indices = features.inverse_indices_or_none()
        if self._has_uninitialized_input_dist:
            validate_keyed_jagged_tensor(features, self._embedding_bag_configs)
            self._create_input_dist(features.keys())
            self._has_uninitialized_input_dist = False
        with torch.no_grad():
            in_flight: dict[int, InFlight] = {}
            exact = self._by_capacity is None or self._capacity is None
            for trimmed in (self._static, self._dynamic if exact else None):
                if trimmed is not None:
                    batch = trimmed.start(features)
                    in_flight |= {group.index: batch for group in trimmed.groups}
            if self._by_capacity is not None and self._capacity is not None:
                self._by_capacity.append(of_rows := self._capacity.start(features))
                in_flight |= {group.index: of_rows for group in self._capacity.groups}
            awaitables: list[Awaitable[Awaitable[KeyedJaggedTensor]]] = []
            for index in range(len(self._sharding_types)):
                context = EmbeddingShardingContext()
                if index in in_flight:
                    awaitables.append(FirstWait(in_flight[index], index))
                    context.batch_size_per_rank = [features.stride()] * self.rank_group.world_size
                else:
                    stock_dist, order, order_tensor = self._stock[index]
                    awaitables.append(stock_dist(features.permute(order, order_tensor)))
                ctx.sharding_contexts.append(context)
        return KJTListSplitsAwaitable(awaitables, ctx, self._module_fqn, self._sharding_types)

    def _create_output_dist(self) -> None:
        """Creates TorchRec's output dist, trimmed if exactly one sharding type has exchanged tables."""
        super()._create_output_dist()
        exchanged = [index for index, kind in enumerate(self._sharding_types) if kind != _LOCAL]
        if len(exchanged) == 1 and TrimmedOutputDist.can_replace(stock := self._output_dists[exchanged[0]]):
            self._output_dists[exchanged[0]] = TrimmedOutputDist(stock, self._cuda_graph)

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        """Creates the input dist, with the first batch, and with the first one after a change of shards."""
        keys, sizes = list(input_feature_names), self._multi_hot_sizes
        static, dynamic, others = self._groups()
        self._input_keys = keys
        self._ids_per_sample = self._declared(keys)
        self._static = StaticDist(static, keys, Sizes(sizes), self.rank_group, self._cuda_graph) if static else None
        self._dynamic = DynamicDist(dynamic, keys, self.rank_group) if dynamic else None
        self._capacity = self._capacity_dist(keys)
        self._stock = {}
        for index in others:
            sharding = self._embedding_shardings[index]
            order = [keys.index(name) for name in sharding.feature_names()]
            order_tensor = torch.tensor(order, dtype=torch.int32, device=self.rank_group.device)
            self._stock[index] = (sharding.create_input_dist(), order, order_tensor)
        # TorchRec's pipelines look here for the dists whose splits they fuse.
        self._input_dists = [stock_dist for stock_dist, _, _ in self._stock.values()]
        if others:
            types = ", ".join(self._sharding_types[index] for index in others)
            logger.warning("the input dist of %s is TorchRec's own, with its host reads", types)

    def _groups(self) -> tuple[list[Group], list[Group], list[int]]:
        """Returns static groups, dynamic groups and the indices of the sharding types left to TorchRec."""
        static: list[Group] = []
        dynamic: list[Group] = []
        others: list[int] = []
        for index, (kind, sharding) in enumerate(zip(self._sharding_types, self._embedding_shardings, strict=True)):
            tables = sharding.embedding_tables() if kind in (*_BY_TABLE, _LOCAL, _BY_ROW) else []
            if not tables or any(table.use_virtual_table or table.total_num_buckets for table in tables):
                others.append(index)
                continue
            alike = [sharding.feature_names()] * self.rank_group.world_size
            group = Group(
                index=index,
                features=sharding.feature_names_per_rank() if kind in _BY_TABLE else alike,
                exchanged=kind != _LOCAL,
                hash_sizes=[t.num_embeddings for t in tables for _ in t.feature_names] if kind == _BY_ROW else None,
                offset_type=get_embedding_table_offset_type(tables[0].fused_params),
            )
            declared = all(name in self._multi_hot_sizes for name in _names([group]))
            fixed = kind != _BY_ROW or (self._rows_to_all and self._rows_can_go_to_all(group, tables))
            (static if declared and fixed else dynamic).append(group)
        return static, dynamic, others

    def _rows_can_go_to_all(self, group: Group, tables: Sequence[Any]) -> bool:
        """Whether ids of weight zero have rows to name, and leave these rows unchanged."""
        why_not = why_not_split(group.hash_sizes or (), self.rank_group.world_size)
        return self._is_on("rows_to_all", why_not or heeds_zeros(table.fused_params for table in tables))

    def _row_groups(self) -> list[RowGroup]:
        """Returns the groups of tables split by rows that have a capacity."""
        groups = []
        for index, (kind, sharding) in enumerate(zip(self._sharding_types, self._embedding_shardings, strict=True)):
            tables = row_tables(sharding) if self._row_capacity and kind in (_BY_ROW, _ROWS_OF_NODES) else []
            if not tables or any(table.use_virtual_table or table.total_num_buckets for table in tables):
                continue
            offset_type = get_embedding_table_offset_type(tables[0].fused_params)
            heeds = heeds_zeros(table.fused_params for table in tables) is not None
            group = row_group(index, sharding, self.rank_group.world_size, offset_type, named_only=heeds)
            declared = all(name in self._multi_hot_sizes for name in group.features)
            if declared and self._is_on("row_capacity", why_not_split(group.hash_sizes, group.parts)):
                groups.append(group)
        return groups

    def _capacity_dist(self, keys: Sequence[str]) -> CapacityDist | None:
        groups = self._row_groups()
        if not groups or not all(key in self._multi_hot_sizes for key in keys):
            return None
        assert self._row_capacity is not None, "groups with a capacity need row_capacity"
        return CapacityDist(groups, keys, self.declared, self.rank_group, self._row_capacity)

    def _is_on(self, option: str, why_not: str | None) -> bool:
        if why_not is not None:
            _warn_once("%s is off for tables split by rows: %s", option, why_not)
        return why_not is None

    def _declared(self, keys: list[str]) -> int | None:
        """Returns the number of ids of one sample; None if a key is undeclared."""
        sizes = self._multi_hot_sizes
        return sum(sizes[key] for key in keys) if all(key in sizes for key in keys) else None

    def _misfit(self, features: KeyedJaggedTensor) -> str | None:
        """Returns an error in an input that prevents checking its lengths."""
        if features.variable_stride_per_key():
            return "TrimmedEBCSharder does not support batch sizes per feature: use EmbeddingBagCollectionSharder"
        keys, weights = features.keys(), features.weights_or_none()
        if weights is not None and weights.shape != features.values().shape:
            return f"the input has weights {list(weights.shape)} for ids {list(features.values().shape)}: one per id"
        if self._has_uninitialized_input_dist:
            missing = {name for config in self._embedding_bag_configs for name in config.feature_names} - set(keys)
            if missing:
                return f"the input lacks the features {', '.join(sorted(missing))}, which the tables look up"
        elif keys != self._input_keys:
            return f"the input's keys are {keys}, but the first input's were {self._input_keys}: keep their order"
        return None

    def _wrong_number(self, features: KeyedJaggedTensor) -> str | None:
        """Returns an error in the lengths that the host can find without a read."""
        keys, sizes, stride = features.keys(), self._multi_hot_sizes, features.stride()
        for key, length in zip(keys, features.length_per_key_or_none() or (), strict=False):
            if key in sizes and length != stride * sizes[key]:
                return (
                    f"feature {key} has {length} ids in {stride} samples, but multi_hot_sizes declares {sizes[key]} a "
                    "sample: declare its true size, or leave a feature of variable lengths out"
                )
        declared = self._declared(keys) if self._has_uninitialized_input_dist else self._ids_per_sample
        values = features.values().numel()
        if declared is not None and values != stride * declared:
            return (
                f"the input has {values} ids in {stride} samples, but multi_hot_sizes declares {declared} per sample: "
                "validate=True names features of other lengths; leave these out"
            )
        return None

    def _raise_on_all_ranks(self, features: KeyedJaggedTensor, problem: str | None) -> None:
        """Raises ValueError if any rank has a problem, another stride or other types. Collective; waits."""
        found: list[Any] = [None] * self.rank_group.world_size
        own = features.stride(), str(IdFormat.of(features)), problem
        dist.all_gather_object(found, own, group=self.rank_group.group)
        problems = [f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(found) if text]
        strides, formats = [stride for stride, _, _ in found], [of_rank for _, of_rank, _ in found]
        if len(set(strides)) > 1:
            problems.append(f"the ranks' batches have {strides} samples: give all ranks equal batch sizes")
        if len(set(formats)) > 1:
            problems.append(f"the ranks' ids and weights are {formats}: give all ranks the same types")
        if problems:
            raise ValueError("; ".join(problems))

    def _broken_promise(self, features: KeyedJaggedTensor) -> str | None:
        """Returns an error naming the first bag whose length is not the declared one."""
        lengths = features.lengths().view(len(features.keys()), -1).cpu()
        for key, of_key in zip(features.keys(), lengths, strict=True):
            size = self._multi_hot_sizes.get(key)
            if size is not None and bool((wrong := of_key != size).any()):
                sample = int(wrong.nonzero()[0])
                return (
                    f"feature {key} has length {of_key[sample]} in sample {sample}, not {size} as in multi_hot_sizes: "
                    "declare its true size, or leave a feature of variable lengths out"
                )
        return None


@cache
def _warn_once(message: str, *arguments: str) -> None:
    logger.warning(message, *arguments)


def _names(groups: list[Group]) -> list[str]:
    return sorted({name for group in groups for features in group.features for name in features})
