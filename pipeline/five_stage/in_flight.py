"""A batch in flight through the pipeline."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torchrec import KeyedJaggedTensor

from .cached_tables import FetchedRows
from .input_dist import Distribution

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
