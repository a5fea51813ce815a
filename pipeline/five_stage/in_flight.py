"""A batch on its way through the pipeline."""

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
    """The inputs of the called modules; empty before the first batch has come to the model."""
    form: int | None = None
    """The number of the form that it has, on all ranks, of those that graphs of whole iterations are made for; None
    where it has none, or ranks have different ones."""
    distributed: torch.cuda.Event | None = field(default=None)
    rows: list[FetchedRows] = field(default_factory=list)
    """Rows that caches hold for it, from the fetch to the lookup."""
