"""TorchRec's EmbeddingBagCollection without redundant exchanges in its input dist: the switch `trim_input_dist`.

    DistributedModelParallel(model, sharders=[TrimmedEBCSharder(multi_hot_sizes={"f0": 3, "f1": 1})], ...)

is all that a user changes: planner, plan, state_dict, KJT in, KeyedTensor out, fused optimizers, codecs and pipelines
stay the same. Collectives and host reads of a rank per batch, by sharding type:

| sharding types | features | collectives | host reads |
|---|---|---|---|
| TW, CW, TWCW | all declared | 1: values, of all these types together | 0 |
| DP | all declared | 0 | 0 |
| RW with `rows_to_all` | all declared | 1: the same one | 0 |
| TW, CW, TWCW with an undeclared feature; other RW | any | 2: lengths, values, of all these types together | 1 |
| DP with an undeclared feature | any | 0 | 1, the same |
| TWRW, grid, virtual tables | any | TorchRec's own input dist | TorchRec's |
| RW and TWRW, within `by_capacity` | all declared | 1: messages of a fixed size (capacity_dist.py) | 0 |

Weights of ids are exchanged with their ids, in the same all-to-all.

One undeclared feature makes its whole sharding type dynamic, because splitting the type would cost another collective
and save nothing. Stock TorchRec 1.6.1 takes 3 collectives, 2 host reads and 4 lists put on the device for TW alone, and
7, 5 and 12 for a mixed plan; later versions read more often.

If TW is the only type with an exchange, the output dist of pooled vectors is trimmed too: see output_dist.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

import torch
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv, ShardingEnv2D

from .ebc import TrimmedEBC


class TrimmedEBCSharder(EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection into a TrimmedEBC; see the module's docstring."""

    def __init__(
        self,
        multi_hot_sizes: Mapping[str, int],
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        validate: bool = False,
        cuda_graph: bool = False,
        rows_to_all: bool = False,
        row_capacity: float | None = None,
    ) -> None:
        """multi_hot_sizes: number of ids in every bag of a feature; leave out features whose bags vary.

        rows_to_all: send all ids of row-wise tables of declared sizes to every rank, which looks up its own rows, and
        the others with weight zero. It needs no read of the device, but multiplies lookups by the number of ranks: for
        small batches, or few ranks. Not with feature processors, which replace that weight.

        row_capacity: within FiveStagePipeline's graphs of whole iterations, the capacity for the ids of row-wise and
        table-row-wise tables, of declared sizes, for each pair of ranks: 1.0 if ids are spread evenly over the rows,
        like hashed ones; 2.0 if some rank's rows are named twice as often. A batch with more ids runs eagerly: less
        than one in a million if such ids are drawn independently (capacity.py). Under Adam and weight decay, so does a
        batch that names no row of some rank (capacity_dist.py). Elsewhere these tables' input dist is exact.

        validate: check every length of every batch before anything is exchanged, and the ranks' batch sizes. Costs
        device reads and a separate collective: for finding wrong declarations, not for timing. cuda_graph: on GPUs
        replay each all-to-all, and the kernels around it, as a CUDA graph, if sizes are declared, for batches of the
        first batch's size; all of it then runs on the caller's stream, and the sharded module's `close` must be called
        before the process group is destroyed. ValueError if a size is not a positive integer, a switch is neither True
        nor False, or row_capacity is less than 1 or combined with rows_to_all.
        """
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)
        wrong = {name: size for name, size in multi_hot_sizes.items() if type(size) is not int or size < 1}
        if wrong:
            raise ValueError(f"multi_hot_sizes must be positive integers, not {wrong}")
        for name, switch in (("validate", validate), ("cuda_graph", cuda_graph), ("rows_to_all", rows_to_all)):
            if not isinstance(switch, bool):
                raise ValueError(f"TrimmedEBCSharder's {name} must be True or False, not {switch!r}")
        if row_capacity is not None and not 1 <= row_capacity < inf:
            raise ValueError(f"TrimmedEBCSharder's row_capacity must be 1.0 or more, not {row_capacity!r}")
        if row_capacity is not None and rows_to_all:
            raise ValueError("TrimmedEBCSharder has rows_to_all or row_capacity for row-wise tables: leave one out")
        self._multi_hot_sizes, self._validate, self._cuda_graph = dict(multi_hot_sizes), validate, cuda_graph
        self._rows_to_all, self._row_capacity = rows_to_all, row_capacity

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TrimmedEBC:
        """Returns the sharded collection. Collective. ValueError if the trimmed input dist does not support it."""
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
            row_capacity=self._row_capacity,
        )

    @property
    def sharded_module_type(self) -> type[TrimmedEBC]:
        """The type of module that `shard` returns."""
        return TrimmedEBC
