"""A training pipeline for TorchRec models that replaces TrainPipelineSparseDist, with little work for the host.

1 input dist               of batch i+1, beside stages 2 to 5 of batch i; meanwhile batch i+2 is copied to the device
2 embedding forward        lookup and all-to-all of the pooled vectors; cached_tables.py describes what follows it
3 dense forward/backward   everything else in the model's forward, the loss, and the backward down to the pooled vectors
4 embedding backward       all-to-all of their gradient and the fused table update
5 dense update             the user's optimizer, beside 4
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import DistributedModelParallel

from .batch_end import EVALUATES, BatchEnd
from .cached_tables import CachedTables
from .dense_graph import DenseGraph
from .dense_update import DenseUpdate
from .embedding_outputs import EmbeddingOutputs, Lookups, embedding_backward
from .feature_processors import FeatureProcessors
from .graph_obstacles import why_not_graphed
from .groups import give_back, of_any_rank, ready_group
from .in_flight import InFlight
from .incoming import Incoming
from .input_dist import InputDist, Step
from .iteration_graph import IterationGraph
from .iteration_obstacles import refusal, why_no_iteration
from .launching_thread import LaunchingThread
from .optimizers import communicates, steps_on
from .options import FiveStageOptions, few_queues
from .replicated_tables import ReplicatedTables
from .sharded_modules import find_inputs, sharded_modules
from .streams import StageStreams, stage
from .switches import Switches

__all__ = ["FiveStageOptions", "FiveStagePipeline"]

In = TypeVar("In")
Out = TypeVar("Out")

_DEFAULTS = FiveStageOptions()


class FiveStagePipeline(Generic[In, Out]):
    """Trains as TrainPipelineSparseDist does, from the same model, optimizer and batches.

    model(batch) returns (losses, output); the KJT that the model passes to each of its sharded modules is the batch or
    a field of it. Between calls the model is unmodified: it can be called, saved and loaded, and another pipeline can
    evaluate it.

    Without record_stream the caching allocator does not know which streams read a batch: this class keeps references to
    what is read, and has streams wait before its memory is used again. README.md draws the four streams ("Whose memory
    a batch is").

    With launch_threads=2, kernels of several communicators are in flight, in an order that differs between ranks. They
    must not share hardware queues: set CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        options: FiveStageOptions = _DEFAULTS,
    ) -> None:
        """Collective over the model's ranks. ValueError if the model has no sharded module, or one of a kind that is
        not in sharded_modules.TAKEN."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._model, self._optimizer, self._device, self._options = model, optimizer, device, options
        self._switches = Switches(options)
        self._modules = sharded_modules(model)
        self._lookups: Lookups | None = None
        self._streams = StageStreams(device, records=not options.avoid_record_streams)
        ranks = dist.get_process_group_ranks(model._env.process_group)
        processed = any(one.has_processors for one in self._modules)
        self._update_last = processed or any(steps_on(optimizer, one.module) for one in self._modules)
        self._thread: LaunchingThread | None = None
        self._group = None
        if options.launch_threads == 2:
            self._group = ready_group(model._env.process_group, device)
            self._thread = LaunchingThread("five-stage", device)
        self._update_on_thread = self._thread is not None and not self._update_last and not communicates(optimizer)
        self._input_dists = InputDist(self._modules, device, self._group, options.pinned_d2h)
        self._end = end = BatchEnd(model._env.process_group, options.uneven_end)
        holds = options.avoid_record_streams or options.graphs_iterations
        self._incoming = Incoming[In](device, self._streams, self._input_dists, end, options.pinned_d2h, holds)
        self._graph: DenseGraph | None = None
        self._graphed_update: DenseUpdate | None = None
        self._say_what_is_off()
        graphed = options.cuda_graph != "none" and "cuda_graph" not in self._switches.off
        self._by_graph: IterationGraph | None = None
        self._whole = graphed and options.graphs_iterations
        self._processors = FeatureProcessors(self._modules, apart=graphed, captured=self._whole)
        self._not_whole: str | None = None
        if self._whole and (why := of_any_rank(why_no_iteration(self._modules), model._env.process_group)) is not None:
            self._no_iteration(why)
        self._peer_memory = self._whole and self._switches.peers(model._env.process_group, device)
        self._replicated = ReplicatedTables(self._modules if self._whole else ())
        self._caches = CachedTables(self._modules, model._env.process_group, device)
        self._fetched: torch.cuda.Event | None = None
        if graphed:
            sharded = [one.module for one in self._modules]
            within = [*self._processors.parameters, *self._replicated.parameters]
            self._graph = DenseGraph(model.module, sharded, device, ranks, within, not self._whole)
            if not self._whole:
                self._graph_update()
        # DistributedDataParallel reduces their gradients with all others: stages 3 and 4 are one backward then.
        self._joined = processed and not graphed
        self._switches.warn_if("%s", few_queues(options, device.type))
        self._updated: torch.cuda.Event | None = None
        self._failed = self._closed = self._trained = False

    def progress(self, batches: Iterator[In]) -> Out:
        """Trains on the next batch, or in eval mode only runs the model; returns its output. Reads two batches ahead.

        StopIteration after `batches` has ended and every batch read has been returned; ValueError on every rank if
        ranks have different numbers of batches, unless options.uneven_end says otherwise; if the caller gives another
        iterator before that, with the first call on it, which trains nothing. An exception within, of either thread,
        leaves the iteration unfinished: the pipeline then accepts no more batches.
        """
        if self._failed or self._closed:
            ended = "was closed" if self._closed else "failed in an iteration: make a new one"
            raise RuntimeError(f"this pipeline {ended}")
        try:
            self._incoming.release()
            in_flight = self._incoming.fill(batches)
            if self._lookups is None and in_flight:
                self._find_inputs(in_flight[0])
            # Backward passes run on this thread: when they ran on autograd's own thread, a trace on 4 x H200 had 0.57
            # ms around the embedding backward in which neither thread launched anything.
            with torch.autograd.set_multithreading_enabled(False):
                output = self._iteration(batches) if in_flight else None
        except BaseException as error:
            self._failed = True
            if isinstance(error, StopIteration):
                raise RuntimeError("StopIteration within an iteration, which is not the end of the batches") from error
            if isinstance(error, torch.OutOfMemoryError) and self._graph is not None:
                error.add_note((self._by_graph or self._graph).memory.what_it_holds)
            raise
        if output is None:
            self._end.end()
        return output[0]

    @property
    def switched_off(self) -> dict[str, str]:
        """Requested options that are off, or partly off, with the reasons known so far."""
        why = [self._not_whole, getattr(self._by_graph or self._graph, "why_eager", None)]
        if self._graphed_update is not None and self._graphed_update.why_not is not None:
            why.append(f"the dense update: {self._graphed_update.why_not}")
        said = "; ".join(filter(None, why))
        return {**self._switches.off, "cuda_graph": said} if said else dict(self._switches.off)

    def describe(self) -> dict[str, Any]:
        """Returns, for cuda_graph="iteration", what the graph holds, how often it was captured and replayed, and what
        ran without it and why; "why_not" where there is no such graph although one was requested. Otherwise empty."""
        why = self.switched_off.get("cuda_graph") if self._options.graphs_iterations else None
        without = {} if why is None else {"in_graph": [], "why_not": why}
        return without if self._by_graph is None else self._by_graph.describe()

    def close(self) -> None:
        """Drops the batches in flight, ends the launching thread, destroys graphs and leaves process groups to later
        pipelines. So does the end of a `with` block, except for groups after an error that other ranks may not have. To
        be called on all ranks after the same batch, before the process group is destroyed, which waits for graphs."""
        self._close(groups=True)

    def _close(self, groups: bool) -> None:
        if self._thread is not None:  # after a failure maybe in a collective that no other rank enters
            self._thread.close(wait=not self._failed)
        self._closed = True
        for of in self._incoming.in_flight if not self._failed else ():
            self._caches.drop(of.rows)
        self._incoming.drop()
        trimmed = [one.collection for one in self._modules if self._trained and hasattr(one.collection, "graphed")]
        for graphed in (self._by_graph, self._graph, self._graphed_update, *trimmed):
            if graphed is not None and not self._failed:  # closing waits for the device
                graphed.close()
        if groups and not self._failed:
            self._end.close()
            give_back(self._group, getattr(self._graph, "group", None))

    def __enter__(self) -> "FiveStagePipeline[In, Out]":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # An Exception between calls, StopIteration above all, leaves no iteration unfinished: it is not a failure. An
        # exit of the process may hit other ranks within an iteration, whose end this rank must not wait for.
        self._failed = self._failed or not isinstance(error, Exception | None)
        try:
            self._close(groups=isinstance(error, StopIteration | None))
        except RuntimeError as closing:
            if error is None:
                raise
            error.add_note(f"and the pipeline could not be closed: {closing}")

    # The five stages

    def _iteration(self, batches: Iterator[In]) -> tuple[Out]:
        in_flight, train = self._incoming.in_flight, self._model.training
        now, ahead = in_flight[0], in_flight[1] if len(in_flight) > 1 else None
        self._end.runs(EVALUATES)
        if train:
            self._trained = True
            inside = self._by_graph is not None and self._by_graph.updates
            if not inside:
                self._zero_grad()  # also passes the tables' learning rate from the optimizer to the lookup
            if self._by_graph is not None:
                why = self._end.runs(self._by_graph.why_not_now(now, ahead))
                if why is None:
                    return (self._whole_iteration(self._by_graph, now, ahead, batches),)
                if self._by_graph.failure is not None:
                    self._no_iteration(why)
            if inside:
                self._zero_grad()
        if self._whole:
            self._streams.hold("input_dist", self._streams.mark())  # collectives after those of the last graph
        self._input_dist(now, "features")
        distributing = self._launch_input_dist(ahead)
        self._incoming.copy(batches)
        outputs = self._embedding_forward(now)
        if self._caches and ahead is not None:
            self._fetch(ahead, distributing)
        output, grads = self._dense_forward_backward(now, outputs, train)
        if ahead is not None and distributing is None:
            self._input_dist(ahead, "values")
        self._streams.wait(self._fetched)
        if train:
            self._update(outputs, grads)
        if distributing is not None:
            distributing.result()
        self._incoming.done()
        return (output,)

    def _whole_iteration(
        self, graph: IterationGraph, now: InFlight[In], ahead: InFlight[In] | None, batches: Iterator[In]
    ) -> Out:
        """Runs all stages by one graph, except the dense update if that is not in the graph."""

        def distribute() -> None:
            self._streams.hold("input_dist", self._streams.mark())  # collectives after those of the last graph
            self._input_dist(now, "features")
            self._streams.wait(now.distributed)

        for of in filter(None, (now, ahead)):
            of.await_copy(self._streams)
        output = graph.train(now, ahead, distribute)
        if not graph.updates:
            self._dense_update(self._streams.mark())
            self._streams.wait(self._updated)
        self._incoming.copy(batches)
        self._incoming.done()
        return cast(Out, output)

    def _zero_grad(self) -> None:
        if self._graph is None:
            self._optimizer.zero_grad()
        else:
            self._graph.gradients.zero(self._optimizer.zero_grad)

    def _launch_input_dist(self, ahead: InFlight[In] | None) -> "Future[None] | None":
        """Launches all of it on the second thread; with one thread, only as much as waits for nothing."""
        if ahead is None:
            return None
        if self._thread is not None:
            return self._thread.submit(self._input_dist, ahead, "features")
        self._input_dist(ahead, "splits" if self._input_dists.waits else "features")
        return None

    def _input_dist(self, of: InFlight[In], until: Step) -> None:
        if of.distribution.done:
            return
        with stage("input_dist", self._device), self._streams.on("input_dist", after=of.copied):
            self._streams.record(of.batch)
            of.distribution.advance(of.features, until)
            of.distributed = self._streams.mark("input_dist")

    def _embedding_forward(self, now: InFlight[In]) -> EmbeddingOutputs:
        with stage("embedding_forward", self._device):
            self._streams.wait(now.distributed)
            distribution, lookups = now.distribution, cast(Lookups, self._lookups)
            self._streams.record(now.batch, *distribution.contexts, *distribution.features)
            called, train = lookups.called, self._model.training
            with (
                self._replicated.looked_up() if train else nullcontext(),
                self._caches.looked_up(called, now.rows, train),
            ):
                awaited = self._processors.look_up(called, distribution.contexts, distribution.features)
            if self._caches:
                self._streams.hold("fetch", self._streams.mark())
            return EmbeddingOutputs(lookups.names, [output.wait() for output in awaited])

    def _fetch(self, ahead: InFlight[In], distributing: "Future[None] | None") -> None:
        """Fetches rows of the next batch into caches, for which the host waits here for its input dist. The caches may
        be used again after `_fetched`; cached_tables.py describes the order."""
        if distributing is not None:
            distributing.result()
        self._input_dist(ahead, "features")
        assert self._lookups is not None
        with stage("fetch", self._device), self._streams.on("fetch", after=ahead.distributed):
            self._streams.record(*ahead.distribution.features)
            ahead.rows = self._caches.fetch(self._lookups.called, ahead.distribution.features)
            self._fetched = self._streams.mark("fetch")

    def _dense_forward_backward(
        self, now: InFlight[In], outputs: EmbeddingOutputs, train: bool
    ) -> tuple[Out, list[Tensor | None]]:
        with stage("dense_forward_backward", self._device):
            features, lookups = now.features, cast(Lookups, self._lookups)
            if not train:
                return lookups.call(self._model, now.batch, features, outputs)[1], []
            if self._graph is not None:
                result = self._graph.forward_backward(now.batch, features, lookups, outputs)
                if self._graph.failure is not None:
                    self._switches.switch_off("cuda_graph", f"the dense part cannot be captured: {self._graph.failure}")
                return result
            leaves = outputs if self._joined else outputs.leaves()
            losses, output = lookups.call(self._model, now.batch, features, leaves)
            if self._joined:
                self._streams.wait(self._fetched)
            torch.sum(losses, dim=0).backward()
            return output, [] if self._joined else leaves.grads

    def _embedding_backward(self, outputs: EmbeddingOutputs, grads: list[Tensor | None]) -> None:
        with stage("embedding_backward", self._device):
            embedding_backward(outputs, grads)
            if self._graph is not None:
                self._graph.keep_of_processors([*self._processors.gradients(), *self._replicated.gradients()])

    def _dense_update(self, after: torch.cuda.Event | None) -> None:
        with self._streams.on("dense_update", after):
            if self._graph is not None:
                with stage("dense_forward_backward", self._device):
                    self._graph.all_reduce()
            with stage("dense_update", self._device):
                (self._graphed_update or self._optimizer).step()
            self._updated = self._streams.mark("dense_update")

    def _update(self, outputs: EmbeddingOutputs, grads: list[Tensor | None]) -> None:
        """Runs stage 5 beside stage 4, but after it if the optimizer needs table gradients."""
        gradients = self._streams.mark()
        if self._thread is not None and self._update_on_thread:
            updating = self._thread.submit(self._dense_update, gradients)
            self._embedding_backward(outputs, grads)
            updating.result()
        else:
            self._embedding_backward(outputs, grads)
            self._dense_update(self._streams.mark() if self._update_last else gradients)
        self._streams.wait(self._updated)

    def _find_inputs(self, first: InFlight[In]) -> None:
        self._streams.wait(first.copied)
        paths = find_inputs(self._model.module, self._modules, first.batch, self._device)
        self._lookups, self._switches.alike = Lookups(self._modules, list(paths)), False
        self._input_dists.modules = self._lookups.called
        self._incoming.found(type(first.batch), list(paths.values()))
        if self._options.pinned_d2h and any(kjt.variable_stride_per_key() for kjt in first.features):
            varied = "batch sizes differ between features, which TorchRec's input dist reads"
            self._switches.switch_off("pinned_d2h", varied)
        if self._whole:
            assert self._graph is not None
            dense, group = self._graph, self._model._env.process_group
            parts = (dense, self._processors, self._replicated, self._optimizer, self._input_dists, self._lookups)
            rest = (self._streams, self._device, group, self._peer_memory)
            self._by_graph = self._incoming.graph = IterationGraph(*parts, *rest)
            if (why := of_any_rank(self._by_graph.begin(first.batch, first.features), group)) is not None:
                self._no_iteration(why)

    # Switches that are off

    def _say_what_is_off(self) -> None:
        self._switches.on_host(self._device)
        not_graphed = why_not_graphed(self._model, self._modules, self._device)
        if self._options.cuda_graph != "none" and not_graphed is not None:
            if self._options.cuda_graph == "iteration" and self._device.type == "cuda":
                raise ValueError(refusal(not_graphed))
            self._switches.switch_off("cuda_graph", not_graphed)
        if self._options.launch_threads == 2 and not self._update_on_thread:
            self._switches.half_a_thread(self._update_last)

    def _no_iteration(self, why: str) -> None:
        """Falls back to a graph of the dense part if the options allow it; otherwise raises ValueError."""
        if self._options.cuda_graph == "iteration":
            raise ValueError(refusal(why))
        if self._by_graph is not None:
            self._by_graph.close()
        self._by_graph, self._incoming.graph, self._whole = None, None, False
        if self._graph is not None:
            self._graph.capture_alone()
            self._graph_update()
        self._not_whole = self._switches.no_iteration(why)

    def _graph_update(self) -> None:
        assert self._graph is not None
        self._graphed_update = DenseUpdate(self._optimizer, self._graph.parameters, self._device)
        self._switches.warn_if("cuda_graph is off for the dense update: %s", self._graphed_update.why_not)
