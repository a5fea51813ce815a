"""The batches in flight: read and copied two ahead of the training, and held as long as the device reads them."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast

import torch
from torchrec import KeyedJaggedTensor

from .batch_end import BatchEnd
from .batch_fields import Path, follow
from .in_flight import InFlight
from .input_dist import Distribution, InputDist
from .iteration_graph import IterationGraph
from .streams import StageStreams

In = TypeVar("In")


class Incoming(Generic[In]):
    """Batches of one iterator after the other. README.md draws whose memory they are ("Whose memory a batch is")."""

    def __init__(
        self,
        device: torch.device,
        streams: StageStreams,
        input_dists: InputDist,
        end: BatchEnd,
        pinned_d2h: bool,
        holds: bool,
    ) -> None:
        """pinned_d2h: count lengths per key while they are on the host. holds: keep references to tensors being read,
        in place of record_stream."""
        self._device, self._streams, self._input_dists, self._end = device, streams, input_dists, end
        self._pinned_d2h, self._holds = pinned_d2h, holds
        self.in_flight: deque[InFlight[In]] = deque()
        self.paths: list[Path] = []
        """The place in a batch of each called module's KJT; empty before the first batch has come to the model."""
        self._form: type | None = None
        self.graph: IterationGraph | None = None
        """The graph of iterations, which asks for batches in their own memory."""
        self._held: list[InFlight[In]] = []
        self._spent: list[Distribution] = []
        self._spent_at: torch.cuda.Event | None = None
        self._batches: Iterator[In] | None = None
        self._exhausted = False

    def fill(self, batches: Iterator[In]) -> None:
        """Has two batches in flight, if there are as many."""
        self._settle()
        if batches is not self._batches:
            self._batches, self._exhausted = batches, False
            self._end.begin()
        while len(self.in_flight) < 2 and not self._exhausted:
            self.copy(batches)
            self._settle()

    def copy(self, batches: Iterator[In]) -> None:
        """Starts the copy of the next batch, if there is one. An iterator is not asked again once it has ended."""
        if self._exhausted:
            return
        with self._streams.on("copy"):  # as in TorchRec the iterator, too, may launch there
            batch = next(batches, None)
            if batch is None:
                self._end.announce(False)
                self._exhausted = True
                return
            as_on_device = type(batch) is self._form
            features = self.features_of(batch) if as_on_device else []
            form = self.graph.form_of(batch) if as_on_device and self.graph is not None else None
            if self._pinned_d2h and form is None:
                for kjt in features:
                    if kjt.device().type == "cpu":
                        kjt.sync()  # lengths per key: cheap here, a read of the device later
            on_device = cast(Any, batch).to(device=self._device, non_blocking=True)
            new = InFlight(on_device, None, self._input_dists.new(), self.features_of(on_device), form)
            if not as_on_device and self.graph is not None:
                new.form = self.graph.form_of(on_device)
            self._end.announce(True, new.form)
            if self.graph is not None:
                self.graph.stage(new)
            new.copied = self._streams.mark("copy")
            self.in_flight.append(new)

    def features_of(self, batch: In) -> list[KeyedJaggedTensor]:
        """Returns the KJT of each module that is called."""
        return [follow(batch, path) for path in self.paths]

    def found(self, form: type, paths: list[Path]) -> None:
        """The first batch has come to the model. form: its type on the device; on the host batches may have another,
        without a KJT."""
        self._form, self.paths = form, paths
        for of in self.in_flight:
            of.features = self.features_of(of.batch)

    def done(self) -> None:
        """Marks the first one in flight as trained."""
        first = self.in_flight.popleft()
        if self._holds:
            self._held.append(first)

    def drop(self) -> None:
        """Lets go of all."""
        self._held += self.in_flight
        self.in_flight.clear()
        self.release()
        self.release()

    def release(self) -> None:
        """Lets go of the last batch, and of what the input dist made of the one before; README.md draws it. To be
        called at the beginning of every iteration.

        Without either, too: after two ends of data a caller may still let go of outputs that share a batch's memory.
        """
        if not self._holds and not self._held and not self._spent:
            return
        self._streams.hold("input_dist", self._spent_at)
        self._spent_at = self._streams.mark()
        self._streams.hold("copy", self._spent_at)
        self._spent = [of.distribution for of in self._held]
        self._held.clear()

    def _settle(self) -> None:
        """Drops the batch copied last where another rank has none."""
        if not self._end.settle():
            if not self._exhausted:
                self.in_flight.pop()
            self._exhausted = True
        elif not self._exhausted and self.in_flight and not self._end.one_form:
            self.in_flight[-1].form = None
