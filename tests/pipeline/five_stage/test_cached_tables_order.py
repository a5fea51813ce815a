"""Cross-cutting: what orders fetches into a cache, lookups, updates and the reuse of memory on the GPU, in the
five-stage pipeline and in TorchRec's order.

Both run on the CPU, where all is in order, and their launches are noted by stream: accesses to a cache, and what
streams wait for. tests/races.py then finds accesses that nothing orders. As by CUDA's allocator, a freed tensor's
memory goes back to the stream that it came from, whose next work may write it, unless record_stream named a stream that
is not yet done with it.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

import dlrm_bench.pipeline.five_stage.pipeline
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.input_dist import Distribution
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from dlrm_bench.pipeline.five_stage.streams import StageStreams
from tests.pipeline.five_stage.any_models import MODELS, PLANS, batches, build
from tests.pipeline.five_stage.torchrec_models import drain
from tests.pipeline.five_stage.uvm_on_cpu import Cache, caches_on_cpu
from tests.races import Access, Event, Wait, races

STEPS, TIMEOUT = 7, 600
CALLER = "caller"
Found = dict[str, int]
"""How many pairs of accesses nothing orders, by what they access."""


class Stream:
    """As FBGEMM's hooks use it."""

    def __init__(self, log: Log, name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self._log.events.append(Wait(self.name, (other.name,)))


class Log:
    """The launches of one run."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.streams = [CALLER]
        self._numbers: dict[Any, int] = {}
        self.made_on: dict[str, str] = {}
        self._blocks: dict[int, tuple[StorageWeakRef, str, list[str]]] = {}
        """Of each tensor's storage: itself, the stream that its memory came from, those that record_stream named."""

    @contextmanager
    def on(self, name: str, after: str | None = None) -> Iterator[None]:
        self.streams.append(name)
        if after is not None:
            self.events.append(Wait(name, (after,)))
        self._reuse()
        yield
        self.streams.pop()

    def mark(self, name: str | None = None) -> str:
        """An event is a stream that waits for another, and on which nothing is launched."""
        event = f"event {len(self.events)}"
        self.made_on[event] = name or self.streams[-1]
        self.events.append(Wait(event, (self.made_on[event],)))
        return event

    def note(self, cache: Cache, operator: str, what: str, which: Any, writes: bool) -> None:
        self._reuse()
        if what == "tensor":
            return self.use(which, operator, writes)
        elements = 1 if which is None else sum({1 << int(n) for n in which})
        if elements:
            self._access(self.streams[-1], operator, (what, id(cache)), elements, writes)
        return None

    def use(self, tensor: Tensor, operator: str, writes: bool) -> None:
        self._access(self.streams[-1], operator, ("tensor", self._block(tensor)), 1, writes)

    def record(self, tensor: Tensor, *streams: str) -> None:
        self._blocks[self._block(tensor)][2].extend(streams)

    def _block(self, tensor: Tensor) -> int:
        storage = StorageWeakRef(tensor.untyped_storage())
        self._blocks.setdefault(storage.cdata, (storage, self.streams[-1], []))
        return storage.cdata

    def _reuse(self) -> None:
        """Work of this stream may get what was freed of its memory."""
        now = self.streams[-1]
        for key, (storage, pool, recorded) in list(self._blocks.items()):
            if pool == now and storage.expired():
                del self._blocks[key]
                stream = f"reuse {len(self.events)}"
                self.events.append(Wait(stream, (now, *recorded)))
                self._access(stream, "reuse", ("tensor", key), 1, True)
                del self._numbers["tensor", key]

    def _access(self, stream: str, operator: str, memory: Any, elements: int, writes: bool) -> None:
        number = self._numbers.setdefault(memory, len(self.events))
        self.events.append(Access(stream, f"{operator} {memory[0]}", (number, 0), elements, writes))

    def found(self) -> Found:
        return dict(Counter(race.second[1].operator.split()[-1] for race in races([self.events])))


class Noted(StageStreams):
    """Streams of the five-stage pipeline."""

    log: Log
    left_out = ""
    """A wait that is not there."""

    def on(self, name: str, after: Any = None) -> Any:
        return self.log.on(name, None if self.left_out == "fetch < input dist" and name == "fetch" else after)

    def mark(self, name: str | None = None) -> Any:
        return self.log.mark(name)

    def hold(self, name: str, after: Any) -> None:
        if after is not None and not (self.left_out == "lookup < fetch" and name == "fetch"):
            self.log.events.append(Wait(name, (after,)))

    def wait(self, event: Any) -> None:
        if event is not None and not (self.left_out == "fetch < backward" and self.log.made_on[event] == "fetch"):
            self.log.events.append(Wait(self.log.streams[-1], (event,)))


def begin(ranks: Ranks, model: str = "two towers") -> tuple[Log, Any, Any]:
    signal.alarm(TIMEOUT)
    sharded, optimizer = build(ranks, MODELS[model], PLANS["TW"])
    caches_on_cpu(sharded, 4)
    log = Log()
    Cache.note = staticmethod(log.note)
    torch.cuda.current_stream = lambda *_: Stream(log, log.streams[-1])  # type: ignore[assignment, return-value]
    return log, sharded, optimizer


def given(ranks: Ranks, count: int, seed: int = 1) -> Iterator[Any]:
    """Batches that nobody else holds."""
    made = batches(ranks, count, seed)
    while made:
        yield made.pop(0)


def ours(ranks: Ranks, left_out: str) -> tuple[Found, int]:
    """Trains, evaluates, trains; and how often memory was used again."""
    log, model, optimizer = begin(ranks)
    Noted.log, Noted.left_out = log, left_out
    advance = Distribution.advance

    def noted(of: Distribution, features: Any, until: Any) -> None:
        advance(of, features, until)
        if of.done:
            for kjt in (kjt for of_module in of.features for kjt in of_module):
                kjt._values = kjt._values.clone()  # on one rank it is the batch's own
                log.use(kjt._values, "input dist", True)

    with patch.object(dlrm_bench.pipeline.five_stage.pipeline, "StageStreams", Noted):
        trainer: Any = FiveStagePipeline(model, optimizer, ranks.device)
    with patch.object(Distribution, "advance", noted):
        drain(trainer, given(ranks, STEPS))
        model.eval()
        drain(trainer, given(ranks, STEPS, seed=2))
        model.train()
        drain(trainer, given(ranks, STEPS, seed=3))
    reused = sum(isinstance(event, Access) and event.operator.startswith("reuse") for event in log.events)
    return log.found(), reused


@pytest.mark.parametrize("left_out", ["", "lookup < fetch", "fetch < backward", "fetch < input dist"])
def test_every_wait_is_needed_and_no_other(run_ranks, left_out):
    ((found, reused),) = run_ranks(1, ours, left_out)
    assert bool(found) == bool(left_out), found
    assert reused > 3 * STEPS
    if left_out == "lookup < fetch":
        assert {"stats", "locks", "lines"} <= set(found)
    if left_out == "fetch < backward":
        assert {"tags", "host"} <= set(found)


def stock(ranks: Ranks, train: bool, recorded: bool) -> Found:
    """The launches of PrefetchTrainPipelineSparseDist (1.6.1 and 1.8.0): of prefetch_embeddings, of
    PrefetchPipelinedForward, and of progress, which starts the input dist of batch i+2 last. recorded: with
    record_stream on what the input dist made."""
    log, model, _ = begin(ranks)
    (one, *_), kind = sharded_modules(model), SplitTableBatchedEmbeddingBagsCodegen
    for lookup in one.module._lookups:  # as their plan is on GPUs
        for table in (table for of in lookup._emb_modules for table in of.config.embedding_tables):
            table.compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING
    unused = "TorchRec's _default_stream"  # a stream of its own, on which nothing is launched

    def record_locations(kernel: Any, forward_stream: Stream) -> None:
        for of in kernel.lxu_cache_locations_list:
            log.record(of, forward_stream.name)

    def input_dist(batch: Any) -> tuple[Any, Any]:
        with log.on("data_dist"):
            context = one.module.create_context()
            features = one.module.input_dist(context, batch.bags).wait().wait()
            for kjt in features:
                kjt._values = kjt._values.clone()
                log.use(kjt._values, "input dist", True)
            return context, features

    def prefetch(context: Any, features: Any) -> None:
        with log.on("prefetch", after="data_dist"):
            for kjt in features if recorded else ():
                log.record(kjt._values, "prefetch", unused)
            one.module.prefetch(ctx=context, dist_input=features, forward_stream=Stream(log, unused))

    with patch.object(kind, "_prefetch_tensors_record_stream", record_locations):
        data = given(ranks, STEPS)
        now = input_dist(next(data))
        prefetch(*now)
        ahead: Any = input_dist(next(data))
        while now is not None:
            log.events.append(Wait(CALLER, ("prefetch",)))
            for kjt in now[1] if recorded else ():
                log.record(kjt._values, CALLER)
            pooled = one.module.compute_and_output_dist(*now).wait().values()
            now = ahead
            if ahead is not None:
                prefetch(*ahead)
            if train:
                pooled.sum().backward()
            del pooled
            batch = next(data, None)
            ahead = None if batch is None else input_dist(batch)
    return log.found()


def test_torchrecs_order_races(run_ranks):
    """Its pull request 4191: the input dist of batch i+2 and the prefetch of batch i+1 have no order."""
    (training,), (evaluating,), (unrecorded,) = (
        run_ranks(1, stock, train, recorded) for train, recorded in ((True, True), (False, True), (True, False))
    )
    assert set(training) == {"stats"}  # the lookup reads them while the next prefetch counts
    assert "tensor" in evaluating  # locations are freed for the prefetch while the caller's lookup reads them
    assert "tensor" in unrecorded  # ids are overwritten by the input dist: nothing but record_stream keeps them
