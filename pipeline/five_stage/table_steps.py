"""The steps of fused tables in graphs of whole iterations: FBGEMM counts them on the host, at every lookup.

The updates of Adam and LAMB divide by bias corrections, powers of the step, which FBGEMM hands them as an argument. So
a replay needs the argument changed, as for learning rates (table_rates.py), and the host's count moved on, since no
Python counts it. The count on the device, which checkpoints have, is added to by a launch of the graph.
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
"""FBGEMM's fused optimizers whose update is given its step by the host, an int64, and beside it only the rate."""


class TableSteps:
    """Counts of those of FBGEMM's kernels whose optimizers are COUNTING."""

    def __init__(self, kernels: Sequence[Any]) -> None:
        self._kernels = [kernel for kernel in kernels if kernel.optimizer in COUNTING]

    def __len__(self) -> int:
        return len(self._kernels)

    @property
    def counted(self) -> list[int]:
        """Returns the steps until now, of each kernel, as its next lookup finds them. Reads the device where the host's
        count is 0, which FBGEMM then takes from there."""
        return [int(kernel.iter_cpu) or int(kernel.iter) for kernel in self._kernels]

    def set(self, counted: Sequence[int]) -> None:
        """Makes the next lookups go on from these steps."""
        for kernel, count in zip(self._kernels, counted, strict=True):
            kernel.iter_cpu.fill_(count)
