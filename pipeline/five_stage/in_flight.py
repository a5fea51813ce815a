"""A batch in flight through the pipeline."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torchrec import KeyedJaggedTensor

from .cached_tables import FetchedRows
from .input_dist import Distribution
from .streams import StageStreams

In = TypeVar("In")


@dataclass(slots=True, eq=False)
class InFlight(Generic[In]):
    """A batch on the device, and its tensors that the device still reads."""

    batch: In
    copied: torch.cuda.Event | None
    distribution: Distribution
    features: list[KeyedJaggedTensor]
    """The inputs of the called modules; empty before the first batch has reached the model."""
    form: int | None = None
    """The number of its form, the same on all ranks, among those with graphs of whole iterations; None if it has none,
    or forms differ between ranks."""
    distributed: torch.cuda.Event | None = field(default=None)
    rows: list[FetchedRows] = field(default_factory=list)
    """Rows that caches hold for it between fetch and lookup."""
    _awaited: bool = False

    def await_copy(self, streams: StageStreams) -> None:
        """Makes the caller's stream, in which iterations follow one another, wait for the copy, once."""
        if not self._awaited:
            streams.wait(self.copied)
            self._awaited = True
