"""A benchmark's model for TorchRec's pipelines: the requirements of pipeline/torchrec/ on a benchmark."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchrec.distributed.planner.types import ParameterConstraints

from dlrm_bench.dlrm.data.dataset import HostBatch


class MakesOptimizer(Protocol):
    """Makes the optimizer of dense weights."""

    def __call__(self, parameters: list[nn.Parameter], skip: Callable[[], Tensor], /) -> torch.optim.Optimizer:
        """Returns an optimizer of `parameters`, with its state already allocated.

        skip: returns a flag on the device, fp32 [], that is 1 in every step that must change nothing. Gradients are
        zeros in such a step, so that an optimizer without momentum can ignore the flag.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSizes:
    """Numbers of ids that are the same in every batch; they let the drop-in's sharders trim input dists."""

    bags: Mapping[str, int] = field(default_factory=dict)
    """Ids in every bag of a feature of an EmbeddingBagCollection."""
    sequences: Mapping[str, int] = field(default_factory=dict)
    """Ids in every sequence of a feature of an EmbeddingCollection."""
    batches: tuple[Mapping[str, int], ...] = ()
    """Number of ids of each feature of an EmbeddingCollection in a whole batch, one mapping for each size of padded
    batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecModel:
    """A benchmark's unsharded model. The configuration gives the tables' optimizer; dlrm/tables/initial_weights.py
    fills their weights, in the order of the module's parameters."""

    module: nn.Module
    """forward(batch) returns (loss, (loss, logits, labels)), the latter detached. Tables of its EmbeddingBagCollections
    and EmbeddingCollections are on the meta device; dense weights have their initial values, equal on all ranks."""
    prefix: str = ""
    """Prefix of weight names in `module` that keys of saved state lack."""
    table_prefix: str = ""
    """Prefix of table names in `module` that names in records lack."""
    batch: Callable[[Any], Any]
    """Returns the input of `forward`, a torchrec Pipelineable in the (pinned) memory of one of the data set's batches;
    called by reader threads."""
    zeros: Callable[[], HostBatch]
    """Returns a batch of zeros in host memory, like the data set's."""
    dense_optimizer: MakesOptimizer
    dense_states: Mapping[str, str]
    """Suffix of the key of each saved state of the dense optimizer, appended to the weight's key."""
    dense_updates_tables: bool = False
    """Whether the dense optimizer is also the tables', so that it updates data-parallel tables along with the rest."""
    constraints: Mapping[str, ParameterConstraints] | None = None
    """Constraints for TorchRec's planner, by table; only for models with EmbeddingBagCollections only. None: tables are
    whole, each on the rank that Tables.owners names."""
    by_rows: bool = False
    """Whether each table is split by rows over all ranks, as needed for tables larger than a rank's memory; excludes
    `constraints`."""
    drops_repeats: bool = False
    """Whether a rank requests each distinct row of an EmbeddingCollection only once per batch (use_index_dedup), on
    GPUs: FBGEMM has no such operator for CPUs."""
    before_step: Callable[[int], None] | None = None
    """Called before each training step with its iteration, counted from 1 over all runs of a training: seeds the
    module's random numbers. None if it draws none."""
    sizes: DeclaredSizes = field(default_factory=DeclaredSizes)
    compiled: tuple[nn.Module, ...] = ()
    """Parts of `module` for torch.compile, in which TorchRec's trace finds no sharded module."""
    casts: bool = False
    """Whether `module` computes in the configuration's precision by itself, without autocast."""
