"""FBGEMM's cache of rows in host memory (FUSED_UVM_CACHING), on the CPU, where FBGEMM has none.

FBGEMM's own Python runs as it is: prefetch, forward, the hooks of the backward. Here are the operators beneath it, of a
cache of least recently used rows, with locks. They fail where those for GPUs would read or write the wrong row without
a word: at a location whose line has another row by now, or in host memory where a line has a newer one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fbgemm_gpu import split_embedding_codegen_lookup_invokers as invokers
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    construct_cache_state,
)
from torch import Tensor

from dlrm_bench.pipeline.five_stage.iteration_obstacles import lookup_kernels
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from tests.pipeline.five_stage.adam_on_cpu import _rows, empty_output, fill_output, gradients_of_ids

WAYS = 2
Note = Callable[["Cache", str, str, Any, bool], None]
"""Told of an operator's access to "tags", "lines", "locks", "host", "stats" or a tensor: the cache, operator, what,
which lines or rows, whether it writes."""


def _nothing(*_: Any) -> None:
    pass


class Cache:
    """Of one kernel."""

    note: Note = staticmethod(_nothing)

    def __init__(self, kernel: Any, sets: int, prefetch: bool) -> None:
        """sets: of WAYS lines each."""
        self.kernel, self.sets = kernel, sets
        self.hits = self.misses = self.evictions = self.unplaced = 0
        tables = [EmbeddingLocation.MANAGED_CACHING] * len(kernel.embedding_specs)
        rows = [spec[0] for spec in kernel.embedding_specs]
        state = construct_cache_state(rows, tables, kernel.feature_table_map)
        kernel.cache_hash_size_cumsum = torch.tensor(state.cache_hash_size_cumsum)
        kernel.total_cache_hash_size = torch.tensor(state.total_cache_hash_size)
        kernel.lxu_cache_state = torch.full((sets, WAYS), -1)
        kernel.lxu_state = torch.zeros(sets, WAYS, dtype=torch.int64)
        kernel.lxu_cache_weights = torch.zeros(sets * WAYS, kernel.max_D)
        kernel.lxu_cache_locking_counter = torch.zeros(sets, WAYS, dtype=torch.int32)
        kernel.prefetch_pipeline = kernel.lock_cache_line = kernel.use_uniq_cache_locations_bwd = prefetch
        if prefetch:
            kernel.placeholder_autograd_tensor.register_hook(kernel._sync_stream_post_backward)
            kernel.register_full_backward_pre_hook(kernel._update_cache_counter_and_locations)
        self._starts = state.cache_hash_size_cumsum

    @property
    def tags(self) -> Tensor:
        return self.kernel.lxu_cache_state.view(-1)

    @property
    def locks(self) -> Tensor:
        return self.kernel.lxu_cache_locking_counter.view(-1)

    def host_row(self, name: int) -> Tensor:
        """The row in host memory of a linear index."""
        f = max(f for f in range(len(self._starts) - 1) if self._starts[f] <= name)
        return _rows(self.kernel.weights_host, self.kernel, f)[name - self._starts[f]]

    def line(self, line: int, name: int) -> Tensor:
        """The part of a line that the row of a linear index has."""
        row: Tensor = self.kernel.lxu_cache_weights[line]
        return row[: len(self.host_row(name))]

    def populate(self, names: Tensor, timestep: int, lock: bool) -> None:
        self.note(self, "fetch", "stats", None, True)
        asked = sorted(set(names.tolist()))
        found = {int(tag): line for line, tag in enumerate(self.tags.tolist()) if tag >= 0}
        age, touched = self.kernel.lxu_state.view(-1), []
        for name in (name for name in asked if name in found):
            self.hits += 1
            age[found[name]] = timestep
            touched.append(found[name])
        for name in (name for name in asked if name not in found):
            self.misses += 1
            first = name % self.sets * WAYS
            free = [n for n in range(first, first + WAYS) if age[n] < timestep and (not lock or self.locks[n] == 0)]
            if not free:
                self.unplaced += 1
                continue
            line = min(free, key=lambda n: int(age[n]))
            if (old := int(self.tags[line])) >= 0:
                self.evictions += 1
                self.note(self, "fetch", "host", [old], True)
                self.host_row(old).copy_(self.line(line, old))
            self.note(self, "fetch", "host", [name], False)
            self.note(self, "fetch", "lines", [line], True)
            self.line(line, name).copy_(self.host_row(name))
            self.tags[line], age[line] = name, timestep
            touched.append(line)
        if lock:
            self.locks[touched] += 1
            self.note(self, "fetch", "locks", range(len(self.locks)), True)
        self.note(self, "fetch", "tags", range(len(self.tags)), True)

    def locate(self, names: Tensor, into: Tensor) -> None:
        self.note(self, "locate", "tags", range(len(self.tags)), False)
        found = {int(tag): line for line, tag in enumerate(self.tags.tolist()) if tag >= 0}
        into[: len(names)] = torch.tensor([found.get(name, -1) for name in names.tolist()], dtype=into.dtype)

    def unlock(self, locations: Tensor) -> None:
        lines = sorted({line for line in locations.tolist() if line >= 0})
        self.note(self, "unlock", "locks", range(len(self.locks)), True)
        self.locks[lines] -= 1
        assert (self.locks >= 0).all(), "a line is unlocked more often than it was locked"

    def rows_at(self, names: list[int], locations: list[int]) -> Iterator[Tensor]:
        """The memory of each row."""
        for name, location in zip(names, locations, strict=True):
            if location >= 0:
                assert int(self.tags[location]) == name, f"row {name} is no longer in line {location}"
                yield self.line(location, name)
            else:
                assert name not in self.tags.tolist(), f"row {name} in host memory is stale: a line has it"
                yield self.host_row(name)

    def used(self, operator: str, names: list[int], locations: list[int], writes: bool) -> None:
        """Notes access to rows."""
        pairs = list(zip(names, locations, strict=True))
        self.note(self, operator, "lines", [line for _, line in pairs if line >= 0], writes)
        self.note(self, operator, "host", [name for name, line in pairs if line < 0], writes)

    def flush(self) -> None:
        for line, name in enumerate(self.tags.tolist()):
            if name >= 0:
                self.host_row(name).copy_(self.line(line, name))


class _Lookup(torch.autograd.Function):
    """Pooled, or not, with Adagrad in the backward."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, common: Any, optimizer: Any, momentum: Any) -> Tensor:
        ctx.given = common, optimizer, momentum
        cache = _cache_of(common.lxu_cache_weights)
        if cache is not None:
            cache.note(cache, "lookup", "stats", None, False)
            for of in (common.indices, common.lxu_cache_locations):
                cache.note(cache, "lookup", "tensor", of, False)
            names = _linear(cache.kernel.cache_hash_size_cumsum, common.indices, common.offsets).tolist()
            locations = common.lxu_cache_locations.tolist()
            cache.used("lookup", names, locations, writes=False)
            looked_up = list(cache.rows_at(names, locations))

        def vectors(f: int, ids: Tensor, first: int) -> Tensor:
            if cache is None or not len(ids):
                return _rows(common.host_weights, common, f)[ids]
            return torch.stack(looked_up[first : first + len(ids)])

        out = empty_output(common)
        fill_output(out, common, vectors)
        return out

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (common, optimizer, momentum), (grad,) = ctx.given, grads
        cache = _cache_of(common.lxu_cache_weights)
        sums: dict[int, Tensor] = {}
        of_row: dict[int, tuple[int, int]] = {}
        starts = ctx.given[0].hash_size_cumsum.tolist() if cache is None else cache._starts
        for f in range(len(common.weights_offsets)):
            ids, of_ids = gradients_of_ids(common, f, grad)
            for row, of_id in zip(ids.tolist(), of_ids, strict=True):
                name = starts[f] + row
                sums[name] = sums[name] + of_id if name in sums else of_id.clone()
                of_row[name] = f, row
        names = sorted(sums)
        if cache is None:
            rows = [_rows(common.host_weights, common, f)[row] for f, row in map(of_row.__getitem__, names)]
        else:
            # FBGEMM's hook has put there those of distinct rows; without prefetch_pipeline they are of all ids.
            locations = common.lxu_cache_locations[: len(names)]
            if not cache.kernel.prefetch_pipeline:
                cache.locate(torch.tensor(names), locations := torch.zeros(len(names), dtype=torch.int32))
            for of in (common.indices, common.lxu_cache_locations):
                cache.note(cache, "update", "tensor", of, False)
            cache.used("update", names, locations.tolist(), writes=True)
            rows = list(cache.rows_at(names, locations.tolist()))
        lr = float(common.learning_rate_tensor)
        for name, row in zip(names, rows, strict=True):
            f, index = of_row[name]
            state = _rows(momentum.host, common, f)[index]
            state += sums[name] * sums[name]
            row -= lr * sums[name] / (state.sqrt() + optimizer.eps)
        return (None,) * 4


def _linear(starts: Tensor, indices: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    for cache in (cache for cache in _caches if cache.kernel.cache_hash_size_cumsum is starts):
        cache.note(cache, "fetch", "tensor", indices, False)
    features = len(starts) - 1
    ends = offsets[:: (len(offsets) - 1) // features].tolist()
    parts = [indices[ends[f] : ends[f + 1]].long() + starts[f] for f in range(features)]
    return torch.cat(parts)


_caches: list[Cache] = []


def _cache_of(tensor: Tensor) -> Cache | None:
    """The one whose state the tensor is."""
    for cache in _caches:
        if tensor.numel() and any(
            tensor is of for of in (cache.kernel.lxu_cache_state, cache.kernel.lxu_cache_weights)
        ):
            return cache
    return None


def _the_cache_of(tensor: Tensor) -> Cache:
    cache = _cache_of(tensor)
    assert cache is not None
    return cache


def _locate(names: Tensor, state: Tensor, *_: Any, lxu_cache_locations_output: Tensor, **more: Any) -> Tensor:
    count = more.get("num_uniq_cache_indices")
    cache = _the_cache_of(state)
    cache.note(cache, "locate", "tensor", lxu_cache_locations_output, True)
    cache.locate(names if count is None else names[: int(count)], lxu_cache_locations_output)
    return lxu_cache_locations_output


def _populate(*args: Any) -> None:
    names, state, _, timestep, _, _, _, _, lock, _ = args[6:]
    _the_cache_of(state).populate(names, timestep, lock)


def _unlock(locks: Tensor, locations: Tensor) -> None:
    (cache,) = (cache for cache in _caches if cache.kernel.lxu_cache_locking_counter is locks)
    cache.note(cache, "unlock", "tensor", locations, False)
    cache.unlock(locations)


def _unique(names: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
    found = names.unique()
    return torch.cat([found, names.new_zeros(len(names) - len(found))]), torch.tensor([len(found)]), None


def caches_on_cpu(model: Any, sets: int | None, prefetch: bool = True) -> list[Cache]:
    """In this process: gives each fused kernel of a model on the CPU a cache; with sets=None none, and only the
    arithmetic. The kernels' optimizer must be Adagrad."""
    ops: Any = torch.ops.fbgemm
    fakes = {
        "linearize_cache_indices": _linear,
        "lru_cache_populate": _populate,
        "lxu_cache_lookup": _locate,
        "lxu_cache_locking_counter_decrement": _unlock,
        "get_unique_indices": _unique,
        "lxu_cache_flush": lambda *args: _the_cache_of(args[7]).flush(),
    }
    for name, fake in fakes.items():
        setattr(ops, name, fake)
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment, return-value]
    invokers.lookup_adagrad.invoke = lambda common, of, momentum: _Lookup.apply(
        common.placeholder_autograd_tensor, common, of, momentum
    )
    found = (kernel for _, kernel in lookup_kernels(sharded_modules(model)))
    kernels = [kernel for kernel in found if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen)]
    _caches[:] = [] if sets is None else [*_caches, *(Cache(kernel, sets, prefetch) for kernel in kernels)]
    return [cache for cache in _caches if any(cache.kernel is kernel for kernel in kernels)]
