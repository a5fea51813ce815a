"""The steps of fused tables in graphs of whole iterations: FBGEMM counts them on the host, at every lookup.

The updates of Adam and LAMB divide by bias corrections, powers of the step, which FBGEMM passes as an argument. So a
replay needs the argument changed, as for learning rates (table_rates.py), and the host's count advanced, because no
Python code counts it. A launch in the graph advances the count on the device, which checkpoints store.
"""

from collections.abc import Sequence
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType

COUNTING = (
    EmbOptimType.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
    EmbOptimType.LAMB,
    EmbOptimType.PARTIAL_ROWWISE_LAMB,
)
"""FBGEMM's fused optimizers whose update receives its step from the host, an int64, and besides it only the rate."""


class TableSteps:
    """Step counts of the FBGEMM kernels whose optimizers are in COUNTING."""

    def __init__(self, kernels: Sequence[Any]) -> None:
        self._kernels = [kernel for kernel in kernels if kernel.optimizer in COUNTING]

    def __len__(self) -> int:
        return len(self._kernels)

    @property
    def counted(self) -> list[int]:
        """Returns the current step count of each kernel, as its next lookup will find it. Reads the device if the
        host's count is 0, because FBGEMM then takes it from there."""
        return [int(kernel.iter_cpu) or int(kernel.iter) for kernel in self._kernels]

    def set(self, counted: Sequence[int]) -> None:
        """Makes the next lookups continue from these steps."""
        for kernel, count in zip(self._kernels, counted, strict=True):
            kernel.iter_cpu.fill_(count)
