"""A batch on its way through the pipeline."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torchrec import KeyedJaggedTensor

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
    fits: bool = False
    """Whether it has, on all ranks, the form that graphs of whole iterations are made for."""
    distributed: torch.cuda.Event | None = field(default=None)
