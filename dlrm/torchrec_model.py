"""A benchmark's model as TorchRec's pipelines take it: what pipeline/torchrec/ asks of a benchmark."""

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
        """Returns an optimizer of `parameters`, which already has its state.

        skip: returns a flag on the device, fp32 [], that is 1 from the step on that must change nothing. Gradients are
        zeros in such a step, so that an optimizer without momentum need not ask for it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSizes:
    """Numbers of ids that are the same in every batch: what lets the sharders of the drop-in trim input dists."""

    bags: Mapping[str, int] = field(default_factory=dict)
    """Ids in every bag of a feature of an EmbeddingBagCollection."""
    sequences: Mapping[str, int] = field(default_factory=dict)
    """Ids in every sequence of a feature of an EmbeddingCollection."""
    batches: tuple[Mapping[str, int], ...] = ()
    """Number of ids of each feature of an EmbeddingCollection in a whole batch, one mapping for each size of padded
    batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecModel:
    """A benchmark's model, unsharded. The tables' optimizer is the configuration's; their weights are filled by
    dlrm/tables/initial_weights.py, in the order of the module's parameters."""

    module: nn.Module
    """forward(batch) returns (loss, (loss, logits, labels)), the latter detached. Tables of its EmbeddingBagCollections
    and EmbeddingCollections are on the meta device; dense weights have their initial values, equal on all ranks."""
    prefix: str = ""
    """Prefix of names of weights in `module` that keys of saved state lack."""
    table_prefix: str = ""
    """Prefix of names of tables in `module` that names in records lack."""
    batch: Callable[[Any], Any]
    """Returns the input of `forward`, a torchrec Pipelineable in the (pinned) memory of one of the data set's batches;
    reader threads call it."""
    zeros: Callable[[], HostBatch]
    """Returns a batch of zeros in host memory, as the data set would."""
    dense_optimizer: MakesOptimizer
    dense_states: Mapping[str, str]
    """Suffix of the key of each saved state of the dense optimizer, after the weight's key."""
    dense_updates_tables: bool = False
    """Whether the dense optimizer is the tables' too, so that it updates data-parallel tables along with the rest."""
    constraints: Mapping[str, ParameterConstraints] | None = None
    """Constraints for TorchRec's planner, by table; for models of EmbeddingBagCollections alone. None: tables are
    sharded table-wise, over the ranks in turn."""
    by_rows: bool = False
    """Whether each table is split by rows over all ranks, as tables larger than a rank's memory require; without
    constraints."""
    drops_repeats: bool = False
    """Whether a rank asks for the rows of an EmbeddingCollection that its batch names once each (use_index_dedup), on
    GPUs: FBGEMM has no such operator for CPUs."""
    before_step: Callable[[int], None] | None = None
    """Called before each training step with its iteration, counted from 1 over all runs of a training: seeds what the
    module draws at random. None where it draws nothing."""
    sizes: DeclaredSizes = field(default_factory=DeclaredSizes)
    compiled: tuple[nn.Module, ...] = ()
    """Parts of `module` that torch.compile can take, in which TorchRec's trace finds no sharded module."""
    casts: bool = False
    """Whether `module` computes in the configuration's precision by itself, without autocast."""
