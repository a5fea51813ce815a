"""Optimizers as values: the constants of each, and the size of its state.

Learning rates are separate: a pipeline holds its rates on the device, and the training loop may set them.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent: no state."""

    name: ClassVar[str] = "sgd"

    def state_columns(self, columns: int) -> int:
        """Returns the number of fp32 state elements of a table row of `columns` columns."""
        return 0


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Element-wise Adagrad (Duchi et al. 2011, JMLR 12), as torch.optim.Adagrad without decay: a sum of squared
    gradients for each weight."""

    eps: float
    name: ClassVar[str] = "adagrad"

    def state_columns(self, columns: int) -> int:
        """Returns the number of fp32 elements of state of a table row of `columns` columns."""
        return columns


@dataclass(frozen=True, slots=True)
class RowWiseAdagrad:
    """Adagrad with one state element per table row: the accumulated mean of its squared gradients (FBGEMM's
    EXACT_ROWWISE_ADAGRAD, torchrec.optim.RowWiseAdagrad)."""

    eps: float
    name: ClassVar[str] = "rowwise_adagrad"

    def state_columns(self, columns: int) -> int:
        """Returns the number of fp32 elements of state of a table row of `columns` columns."""
        return 1


TableOptimizer = SGD | Adagrad | RowWiseAdagrad
"""The optimizers that update embedding tables."""
