"""TorchRec's EmbeddingBagCollection with an input dist that asks nothing twice: the switch `trim_input_dist`.

    DistributedModelParallel(model, sharders=[TrimmedEBCSharder(multi_hot_sizes={"f0": 3, "f1": 1})], ...)

is all that a user changes: planner, plan, state_dict, KJT in, KeyedTensor out, fused optimizers, codecs and pipelines
stay. Collectives and host reads of a rank for a batch, by sharding type:

| sharding types | features | collectives | host reads |
|---|---|---|---|
| TW, CW, TWCW | all declared | 1: values, of all these types together | 0 |
| DP | all declared | 0 | 0 |
| RW with `rows_to_all` | all declared | 1: the same one | 0 |
| TW, CW, TWCW with an undeclared feature; other RW | any | 2: lengths, values, of all these types together | 1 |
| DP with an undeclared feature | any | 0 | 1, the same |
| TWRW, grid, virtual tables | any | TorchRec's own input dist | TorchRec's |

Weights of bags travel beside their ids, in the same all-to-all.

One undeclared feature makes its whole sharding type dynamic, because splitting the type would cost another collective
and save nothing. Stock TorchRec 1.6.1 takes 3 collectives, 2 host reads and 4 lists put on the device for TW alone, and
7, 5 and 12 for a mixed plan; later versions read more often.

Where TW is the only type with an exchange, the output dist of pooled vectors is trimmed too: see output_dist.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fused_params import get_embedding_table_offset_type
from torchrec.distributed.types import (
    Awaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ..cuda_graph import GraphedFunction
from ..groups import own_group
from .dynamic_dist import DynamicDist
from .output_dist import TrimmedOutputDist
from .owned_rows import why_not_all
from .packed_ids import IdFormat
from .static_dist import FirstWait, Group, InFlight, RankGroup, Sizes, StaticDist

logger = logging.getLogger(__name__)

_BY_TABLE = (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
_LOCAL = ShardingType.DATA_PARALLEL.value
_BY_ROW = ShardingType.ROW_WISE.value


class TrimmedEBC(ShardedEmbeddingBagCollection):
    """See the module. Made by TrimmedEBCSharder.

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
        **kwargs: Any,
    ) -> None:
        """args, kwargs: those of ShardedEmbeddingBagCollection. Collective: makes a process group of its own."""
        self._rows_to_all = rows_to_all
        self._cuda_graph = cuda_graph  # for the output dist, which TorchRec's constructor makes
        super().__init__(*args, **kwargs)
        env, device = self._env, self._device
        if self._has_mean_pooling_callback:
            raise ValueError("TrimmedEBCSharder has no mean pooling on row-wise tables: plan them table-wise, or sum")
        self._rank_group = RankGroup(
            group=own_group(env.process_group),
            rank=env.rank,
            world_size=env.world_size,
            device=torch.device("cpu") if device is None else device,
        )
        self._multi_hot_sizes, self._validate = multi_hot_sizes, validate
        self._has_uninitialized_input_dist: bool = True
        self._input_keys: list[str] = []
        self._ids_per_sample: int | None = None
        self._static: StaticDist | None = None
        self._dynamic: DynamicDist | None = None
        self._stock: dict[int, tuple[nn.Module, list[int], torch.Tensor]] = {}

    @property
    def declared(self) -> Sizes:
        """The numbers of ids that were declared."""
        return Sizes(self._multi_hot_sizes)

    def trimmed_features(self) -> dict[str, list[str]]:
        """Features by the kind of their input dist: "static", "dynamic" or TorchRec's own ("torchrec").

        A feature that tables of several sharding types read may appear under several.
        """
        static, dynamic, others = self._groups()
        names = {"static": _names(static), "dynamic": _names(dynamic)}
        stock = {name for index in others for name in self._embedding_shardings[index].feature_names()}
        return {**names, "torchrec": sorted(stock)}

    def graphed(self) -> list[GraphedFunction]:
        """Returns the functions that are replayed as CUDA graphs, or are to be."""
        graphed = [] if self._static is None else self._static.graphed()
        for output_dist in self._output_dists:
            if isinstance(output_dist, TrimmedOutputDist):
                graphed += output_dist.graphed()
        return graphed

    def close(self) -> None:
        """Destroys the CUDA graphs; later batches run without. NCCL destroys a communicator only after the last graph
        that holds its collectives. FiveStagePipeline closes the modules that it trained."""
        for graphed in self.graphed():
            graphed.close()

    @property
    def input_dist_waits(self) -> bool:
        """Whether the host waits for the device between the steps of an input dist; True before the first batch."""
        return self._static is None or self._dynamic is not None or bool(self._stock)

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """TorchRec's input dist, trimmed. ValueError where the input differs in form from the first one, or from its
        declaration.

        Lengths, and the same stride on all ranks, are trusted unless the sharder validates. Always checked are the
        number of values, and lengths that the host has.
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
            for trimmed in (self._static, self._dynamic):
                if trimmed is not None:
                    batch = trimmed.start(features)
                    in_flight |= {group.index: batch for group in trimmed.groups}
            awaitables: list[Awaitable[Awaitable[KeyedJaggedTensor]]] = []
            for index in range(len(self._sharding_types)):
                context = EmbeddingShardingContext()
                if index in in_flight:
                    awaitables.append(FirstWait(in_flight[index], index))
                    context.batch_size_per_rank = [features.stride()] * self._rank_group.world_size
                else:
                    stock_dist, order, order_tensor = self._stock[index]
                    awaitables.append(stock_dist(features.permute(order, order_tensor)))
                ctx.sharding_contexts.append(context)
        return KJTListSplitsAwaitable(awaitables, ctx, self._module_fqn, self._sharding_types)

    def _create_output_dist(self) -> None:
        """TorchRec's output dist, trimmed where the tables of one sharding type alone are exchanged."""
        super()._create_output_dist()
        exchanged = [index for index, kind in enumerate(self._sharding_types) if kind != _LOCAL]
        if len(exchanged) == 1 and TrimmedOutputDist.can_replace(stock := self._output_dists[exchanged[0]]):
            self._output_dists[exchanged[0]] = TrimmedOutputDist(stock, self._cuda_graph)

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        """Called with the first batch, and with the first one after a change of shards."""
        keys, sizes = list(input_feature_names), self._multi_hot_sizes
        static, dynamic, others = self._groups()
        self._input_keys = keys
        self._ids_per_sample = self._declared(keys)
        self._static = StaticDist(static, keys, Sizes(sizes), self._rank_group, self._cuda_graph) if static else None
        self._dynamic = DynamicDist(dynamic, keys, self._rank_group) if dynamic else None
        self._stock = {}
        for index in others:
            sharding = self._embedding_shardings[index]
            order = [keys.index(name) for name in sharding.feature_names()]
            order_tensor = torch.tensor(order, dtype=torch.int32, device=self._rank_group.device)
            self._stock[index] = (sharding.create_input_dist(), order, order_tensor)
        # TorchRec's pipelines look here for the dists whose splits they fuse.
        self._input_dists = [stock_dist for stock_dist, _, _ in self._stock.values()]
        if others:
            types = ", ".join(self._sharding_types[index] for index in others)
            logger.warning("the input dist of %s is TorchRec's own, with its host reads", types)

    def _groups(self) -> tuple[list[Group], list[Group], list[int]]:
        """Static groups, dynamic groups and the indices of those sharding types that are left to TorchRec."""
        static: list[Group] = []
        dynamic: list[Group] = []
        others: list[int] = []
        for index, (kind, sharding) in enumerate(zip(self._sharding_types, self._embedding_shardings, strict=True)):
            tables = sharding.embedding_tables() if kind in (*_BY_TABLE, _LOCAL, _BY_ROW) else []
            if not tables or any(table.use_virtual_table or table.total_num_buckets for table in tables):
                others.append(index)
                continue
            alike = [sharding.feature_names()] * self._rank_group.world_size
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
        why_not = why_not_all(group.hash_sizes or (), self._rank_group.world_size, (t.fused_params for t in tables))
        if why_not is not None:
            logger.warning("rows_to_all is off for row-wise tables: %s", why_not)
        return why_not is None

    def _declared(self, keys: list[str]) -> int | None:
        """Ids of one sample; None where a key is undeclared."""
        sizes = self._multi_hot_sizes
        return sum(sizes[key] for key in keys) if all(key in sizes for key in keys) else None

    def _misfit(self, features: KeyedJaggedTensor) -> str | None:
        """Returns a fault of an input for which its lengths cannot be checked; None without one."""
        if features.variable_stride_per_key():
            return "TrimmedEBCSharder has no variable batch per feature: use EmbeddingBagCollectionSharder"
        keys, weights = features.keys(), features.weights_or_none()
        if weights is not None and weights.shape != features.values().shape:
            return f"the input has weights {list(weights.shape)} for ids {list(features.values().shape)}: one an id"
        if self._has_uninitialized_input_dist:
            missing = {name for config in self._embedding_bag_configs for name in config.feature_names} - set(keys)
            if missing:
                return f"the input has no feature {', '.join(sorted(missing))}: the tables look them up"
        elif keys != self._input_keys:
            return f"the input's keys are {keys}, those of the first one were {self._input_keys}: keep their order"
        return None

    def _wrong_number(self, features: KeyedJaggedTensor) -> str | None:
        """Returns a fault of the lengths that the host knows without a read; None without one."""
        keys, sizes, stride = features.keys(), self._multi_hot_sizes, features.stride()
        for key, length in zip(keys, features.length_per_key_or_none() or (), strict=False):
            if key in sizes and length != stride * sizes[key]:
                return (
                    f"feature {key} has {length} ids in {stride} samples, multi_hot_sizes declares {sizes[key]} a "
                    "sample: declare its size, or leave a feature of variable lengths out"
                )
        declared = self._declared(keys) if self._has_uninitialized_input_dist else self._ids_per_sample
        values = features.values().numel()
        if declared is not None and values != stride * declared:
            return (
                f"the input has {values} ids in {stride} samples, multi_hot_sizes declares {declared} a sample: "
                "validate=True names a feature of other lengths; leave such out"
            )
        return None

    def _raise_on_all_ranks(self, features: KeyedJaggedTensor, problem: str | None) -> None:
        """ValueError if any rank has a problem, another stride or other types. Collective, and waits."""
        found: list[Any] = [None] * self._rank_group.world_size
        own = features.stride(), str(IdFormat.of(features)), problem
        dist.all_gather_object(found, own, group=self._rank_group.group)
        problems = [f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(found) if text]
        strides, formats = [stride for stride, _, _ in found], [of_rank for _, of_rank, _ in found]
        if len(set(strides)) > 1:
            problems.append(f"the ranks' batches have {strides} samples: give all ranks batches of one size")
        if len(set(formats)) > 1:
            problems.append(f"the ranks' ids and weights are {formats}: give all ranks the same types")
        if problems:
            raise ValueError("; ".join(problems))

    def _broken_promise(self, features: KeyedJaggedTensor) -> str | None:
        """Returns the first bag whose length is not the declared one."""
        lengths = features.lengths().view(len(features.keys()), -1).cpu()
        for key, of_key in zip(features.keys(), lengths, strict=True):
            size = self._multi_hot_sizes.get(key)
            if size is not None and bool((wrong := of_key != size).any()):
                sample = int(wrong.nonzero()[0])
                return (
                    f"feature {key} has length {of_key[sample]} in sample {sample}, multi_hot_sizes declares {size}: "
                    "declare its size, or leave a feature of variable lengths out"
                )
        return None


class TrimmedEBCSharder(EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection into a TrimmedEBC; see the module."""

    def __init__(
        self,
        multi_hot_sizes: Mapping[str, int],
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        validate: bool = False,
        cuda_graph: bool = False,
        rows_to_all: bool = False,
    ) -> None:
        """multi_hot_sizes: ids in every bag of a feature; leave out features whose bags vary.

        rows_to_all: send all ids of row-wise tables of declared sizes to every rank, which looks up its own rows, and
        the others with weight zero. It needs no read of the device, and multiplies lookups by the number of ranks: for
        small batches, or few ranks.

        validate: check every length of every batch, and the ranks' batch sizes, before anything is exchanged. It costs
        reads of the device and one more collective: for finding a broken declaration, not for timing. cuda_graph: on
        GPUs replay each all-to-all, and the kernels around it, as a CUDA graph, where sizes are declared, for batches
        of the first one's size; all of it then runs on the caller's stream, and `close` of the sharded module belongs
        before the end of the process group. ValueError where a size is not a positive integer, or a switch neither
        True nor False.
        """
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)
        wrong = {name: size for name, size in multi_hot_sizes.items() if type(size) is not int or size < 1}
        if wrong:
            raise ValueError(f"multi_hot_sizes must be positive integers, not {wrong}")
        for name, switch in (("validate", validate), ("cuda_graph", cuda_graph), ("rows_to_all", rows_to_all)):
            if not isinstance(switch, bool):
                raise ValueError(f"TrimmedEBCSharder's {name} must be True or False, not {switch!r}")
        self._multi_hot_sizes, self._validate, self._cuda_graph = dict(multi_hot_sizes), validate, cuda_graph
        self._rows_to_all = rows_to_all

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TrimmedEBC:
        """Collective. ValueError where the trimmed input dist has no way for the module or the environment."""
        if env.process_group is None or isinstance(env, ShardingEnv2D):
            raise ValueError("TrimmedEBCSharder shards over one process group: use EmbeddingBagCollectionSharder")
        return TrimmedEBC(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            multi_hot_sizes=self._multi_hot_sizes,
            validate=self._validate,
            cuda_graph=self._cuda_graph,
            rows_to_all=self._rows_to_all,
        )

    @property
    def sharded_module_type(self) -> type[TrimmedEBC]:
        """The type of module that `shard` makes."""
        return TrimmedEBC


def _names(groups: list[Group]) -> list[str]:
    return sorted({name for group in groups for features in group.features for name in features})
