"""The batches in flight: read and copied two ahead of the training, and kept as long as the device reads them."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torchrec import KeyedJaggedTensor

from .batch_end import BatchEnd
from .batch_fields import Path, follow
from .feature_processors import with_weights
from .in_flight import InFlight
from .input_dist import Distribution, InputDist
from .iteration_graph import IterationGraph
from .streams import StageStreams

In = TypeVar("In")


def _count_on_host(features: Sequence[KeyedJaggedTensor], copies: Sequence[KeyedJaggedTensor]) -> None:
    """Gives copies of KJTs their lengths per key: cheap here, a read of the device later. The user's own KJTs cache
    nothing, as whoever refills them in place would find it there."""
    for kjt, copy in zip(features, copies, strict=True):
        if kjt.device().type == "cpu" and copy is not kjt and copy.length_per_key_or_none() is None:
            counted = with_weights(kjt, kjt.weights_or_none()).sync()
            copy._length_per_key, copy._offset_per_key = counted.length_per_key(), counted.offset_per_key()


class Incoming(Generic[In]):
    """Batches of successive iterators. README.md draws who owns their memory ("Whose memory a batch is")."""

    def __init__(
        self,
        device: torch.device,
        streams: StageStreams,
        input_dists: InputDist,
        end: BatchEnd,
        pinned_d2h: bool,
        holds: bool,
    ) -> None:
        """pinned_d2h: compute lengths per key while they are on the host. holds: keep references to tensors being read,
        instead of record_stream."""
        self._device, self._streams, self._input_dists, self._end = device, streams, input_dists, end
        self._pinned_d2h, self._holds = pinned_d2h, holds
        self.in_flight: deque[InFlight[In]] = deque()
        self.paths: list[Path] = []
        """The path in a batch of each called module's KJT; empty before the first batch has reached the model."""
        self._form: type | None = None
        self.graph: IterationGraph | None = None
        """The graph of iterations, which needs batches in its own memory."""
        self._held: list[InFlight[In]] = []
        self._spent: list[Distribution] = []
        self._spent_at: torch.cuda.Event | None = None
        self._batches: Iterator[In] | None = None
        self._exhausted = False

    def fill(self, batches: Iterator[In]) -> deque[InFlight[In]]:
        """Brings two batches in flight, if that many exist; returns those in flight. Returns none, and keeps them for
        the next call, where the end of the last iterator is an error that has not been raised."""
        self._settle()
        if batches is not self._batches:
            if self._end.owes_error:
                return deque()
            self._batches, self._exhausted = batches, False
            self._end.begin()
        while len(self.in_flight) < 2 and not self._exhausted:
            self.copy(batches)
            self._settle()
        return self.in_flight

    def copy(self, batches: Iterator[In]) -> None:
        """Starts the copy of the next batch, if any. An iterator is not called again after it has ended."""
        if self._exhausted:
            return
        with self._streams.on("copy"):  # as in TorchRec, the iterator may launch there too
            batch = next(batches, None)
            if batch is None:
                self._end.announce(False)
                self._exhausted = True
                return
            as_on_device = type(batch) is self._form
            if not as_on_device and not hasattr(batch, "to"):
                raise ValueError(
                    f"a batch is a {type(batch).__name__}, which has no method to(device=..., non_blocking=...), as "
                    "TorchRec's pipelines need too: give batches a class that implements torchrec.streamable."
                    "Pipelineable"
                )
            form = self.graph.form_of(batch) if as_on_device and self.graph is not None else None
            on_device = cast(Any, batch).to(device=self._device, non_blocking=True)
            new = InFlight(on_device, None, self._input_dists.new(), self.features_of(on_device), form)
            if self._pinned_d2h and form is None and as_on_device:
                _count_on_host(self.features_of(batch), new.features)
            if not as_on_device and self.graph is not None:
                new.form = self.graph.form_of(on_device)
            self._end.announce(True, new.form, self.graph is None or self.graph.memory.fits(new))
            if self.graph is not None:
                self.graph.stage(new)
            new.copied = self._streams.mark("copy")
            self.in_flight.append(new)

    def features_of(self, batch: In) -> list[KeyedJaggedTensor]:
        """Returns the KJT of each module that is called."""
        return [follow(batch, path) for path in self.paths]

    def found(self, form: type, paths: list[Path]) -> None:
        """Records that the first batch has reached the model. form: its type on the device; on the host, batches may
        have another type, without a KJT."""
        self._form, self.paths = form, paths
        for of in self.in_flight:
            of.features = self.features_of(of.batch)

    def done(self) -> None:
        """Marks the first batch in flight as trained."""
        first = self.in_flight.popleft()
        if self._holds:
            self._held.append(first)

    def drop(self) -> None:
        """Lets go of all. The copy of another pipeline's batch waits for input dists that may still read these."""
        self._streams.hold("copy", self._streams.mark("input_dist"))
        self._held += self.in_flight
        self.in_flight.clear()
        self.release()
        self.release()

    def release(self) -> None:
        """Releases the last batch, and the input dist's tensors of the previous one; README.md draws it. Must be called
        at the beginning of every iteration.

        Also without either batch: after two ends of data a caller may still drop outputs that share a batch's memory.
        """
        if not self._holds and not self._held and not self._spent:
            return
        self._streams.hold("input_dist", self._spent_at)
        self._spent_at = self._streams.mark()
        self._streams.hold("copy", self._spent_at)
        self._spent = [of.distribution for of in self._held]
        self._held.clear()

    def _settle(self) -> None:
        """Drops the last copied batch if another rank has none."""
        if not self._end.settle():
            if not self._exhausted:
                self.in_flight.pop()
            self._exhausted = True
        elif not self._exhausted and self.in_flight and not self._end.one_form:
            self.in_flight[-1].form = None
        if self.graph is not None and not self._end.fits:
            self.graph.make_room()
            self._end.fits = True
