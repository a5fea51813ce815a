"""A batch on its way through the pipeline."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torchrec import KeyedJaggedTensor

from .input_dist import Distribution

In = TypeVar("In")


@dataclass(slots=True, eq=False)
class InFlight(Generic[In]):
    """A batch on the device, and what the device still reads of it."""

    batch: In
    copied: torch.cuda.Event | None
    distribution: Distribution
    features: list[KeyedJaggedTensor]
    """What each module that is called is given of it; empty before the first batch has come to the model."""
    fits: bool = False
    """Whether it has, on all ranks, the form that graphs of whole iterations are made for."""
    distributed: torch.cuda.Event | None = field(default=None)
