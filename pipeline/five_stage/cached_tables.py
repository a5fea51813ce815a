"""Tables in host memory behind a cache on the GPU (FUSED_UVM_CACHING): the next batch's rows are fetched into the cache
beside the dense part of the current one.

With CacheParams(prefetch_pipeline=True), FBGEMM locks the cache lines that a batch names until its backward has begun,
and its backward looks up again where the rows are. What remains is order on the GPU. For batch i+1

    lookup i  <  fetch i+1  <  backward i  <  lookup i+1

- A fetch replaces lines whose rows no batch in flight names, and writes them to host memory. The update of batch i-1,
  whose lines its backward unlocks before writing them, must have ended: it has before lookup i.
- FBGEMM's statistics (gather_uvm_cache_stats) are those of the last fetch. Lookup i reads from them whether all of its
  rows are in the cache; if fetch i+1 had begun to count, lookup i would read missing rows from undefined places.
- If batch i names rows that found no free line, and fetch i+1 finds a line for them, backward i updates them in the
  cache and no longer in host memory: so it begins after that fetch. So does anything that the caller does between
  calls.

Between calls FBGEMM's modules do not know of the fetch: they would attribute it to whichever batch comes next, of
another pipeline or of a call of the model. Such a call finds no fetched rows and fetches its own. The rows fetched here
are then given up, as they are if a loaded checkpoint has emptied the cache: the lookup fetches these rows again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import KJTList

from .sharded_modules import Sharded


@dataclass(frozen=True, slots=True, eq=False)
class FetchedRows:
    """Rows that a cache holds for one batch, until its lookup."""

    kernel: Any
    locations: Tensor
    """int32, for each id: its line, or -1 if its row is in host memory only."""
    at: tuple[int, int]
    """The kernel's clocks after the fetch."""

    @property
    def stands(self) -> bool:
        """Whether nobody has used or emptied the cache since the fetch."""
        return self.at == _clocks(self.kernel)

    def give(self) -> None:
        """Makes the kernel's next call look up by these locations."""
        self.kernel.timesteps_prefetched.append(self.kernel.timestep)
        self.kernel.lxu_cache_locations_list.append(self.locations)

    def drop(self) -> None:
        """Unlocks the lines, because no lookup follows."""
        _unlock(self.kernel, self.locations)


class CachedTables:
    """Tables of all sharded modules whose rows are fetched ahead. Modules are unchanged between calls."""

    def __init__(self, modules: Sequence[Sharded], group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective over `group`, whose ranks all launch input dists in one order, with or without such tables."""
        self._groups = {one: list(_groups(one)) for one in modules}
        somewhere = torch.tensor(int(any(self._groups.values())), device=device)
        dist.all_reduce(somewhere, dist.ReduceOp.MAX, group)
        self._somewhere = bool(somewhere.item())

    def __bool__(self) -> bool:
        """Whether any rank has such tables."""
        return self._somewhere

    def fetch(self, modules: Sequence[Sharded], features: Sequence[KJTList]) -> list[FetchedRows]:
        """Fetches, on the current stream, the rows that a batch names. features: of each module, after input dist."""
        rows = []
        for one, of_module in zip(modules, features, strict=True):
            parts = {group.lookup: of_module[group.lookup].split(group.splits) for group in self._groups[one]}
            for group in self._groups[one]:
                named = parts[group.lookup][group.index]
                # TorchRec does not pass batch sizes to lookups of unpooled embeddings either.
                varies = group.pooled and named.variable_stride_per_key()
                group.kernel.prefetch(
                    indices=named.values(),
                    offsets=named.offsets(),
                    batch_size_per_feature_per_rank=named.stride_per_key_per_rank() if varies else None,
                )
                group.kernel.timesteps_prefetched.pop()
                locations = group.kernel.lxu_cache_locations_list.pop()
                rows.append(FetchedRows(group.kernel, locations, _clocks(group.kernel)))
        return rows

    def drop(self, rows: Sequence[FetchedRows]) -> None:
        """Gives up the rows of batches that are not looked up."""
        for of in rows:
            of.drop()

    @contextmanager
    def looked_up(self, modules: Sequence[Sharded], rows: Sequence[FetchedRows], train: bool) -> Iterator[None]:
        """Makes the lookup of a batch, within the block, use its fetched rows. train: a backward follows, in which
        FBGEMM unlocks the lines. ValueError if another pipeline has fetched a batch and not looked it up."""
        kernels = [group.kernel for one in modules for group in self._groups[one]]
        for one in modules:
            if any(group.kernel.timesteps_prefetched for group in self._groups[one]):
                raise ValueError(
                    f"{one.name} holds fetched rows of a batch that another pipeline has not looked up: train that "
                    "pipeline to the end of its data before this one begins"
                )
        for of in rows:
            (of.give if of.stands else of.drop)()
        try:
            yield
        finally:
            for kernel in kernels:  # already empty, unless a lookup failed
                kernel.timesteps_prefetched.clear()
                kernel.lxu_cache_locations_list.clear()
        if not train:
            for kernel in kernels:
                _unlock(kernel, kernel.lxu_cache_locations)


@dataclass(frozen=True, slots=True)
class _Group:
    """Tables of one kernel."""

    lookup: int
    """Index of the KJT with the features, among those of its module's input dist."""
    splits: list[int]
    index: int
    """Index among the KJT's parts by `splits`."""
    pooled: bool
    kernel: Any


def _groups(one: Sharded) -> Iterator[_Group]:
    for i, lookup in enumerate(one.collection._lookups):
        while isinstance(lookup, DistributedDataParallel):
            lookup = lookup.module
        pooled = isinstance(lookup, GroupedPooledEmbeddingsLookup)
        for index, of_group in enumerate(lookup._emb_modules):
            kernel = getattr(of_group, "emb_module", None)
            if _fetches_ahead(kernel):
                yield _Group(i, lookup._feature_splits, index, pooled, kernel)


def _fetches_ahead(kernel: Any) -> bool:
    """Whether the kernel has a cache and does not fetch rows only within its lookup."""
    of_fbgemm = isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen)
    return of_fbgemm and kernel.prefetch_pipeline and kernel.lxu_cache_weights.numel() > 0


def _clocks(kernel: Any) -> tuple[int, int]:
    """Returns the kernel's number of calls, and of fetches since its cache was empty."""
    return kernel.step, kernel.timestep


def _unlock(kernel: Any, locations: Tensor) -> None:
    torch.ops.fbgemm.lxu_cache_locking_counter_decrement(kernel.lxu_cache_locking_counter, locations)
