"""The constants of one rank's batches, from which every fixed shape of an iteration follows."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Sizes and number format of one rank's work in an iteration."""

    samples: int
    """The local batch size."""
    dtype: torch.dtype
    """The format of activations, pooled vectors, their gradients and the dense network's working weights: fp32 or bf16.
    Master weights, tables and optimizer state are fp32."""
    parts: int = 1
    """Number of equal ranges of samples that pass through the iteration one after another; divides `samples`."""

    def __post_init__(self) -> None:
        assert self.samples % self.parts == 0, f"{self.samples} samples cannot be split into {self.parts} equal parts"

    @property
    def part_samples(self) -> int:
        """Number of samples of a part."""
        return self.samples // self.parts

    @property
    def rows(self) -> tuple[slice, ...]:
        """Returns the rows of each part in a matrix of the local batch."""
        size = self.part_samples
        return tuple(slice(part * size, (part + 1) * size) for part in range(self.parts))
