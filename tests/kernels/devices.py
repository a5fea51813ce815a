"""Where kernel tests run: on the GPU, or else in Triton's interpreter."""

from typing import Any

import numpy as np
import pytest
import torch

from dlrm_bench.kernels._triton import INTERPRETED, triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(triton is None, reason="needs Triton (pip install triton)")


def _as_on_gpus() -> None:
    """Gives the interpreter a GPU's rule for the greater and the smaller of a number and NaN: the number, unless a
    kernel asks for NaN. The interpreter has NaN either way, so that no test on a CPU would see a kernel hide it."""
    from triton.runtime.interpreter import InterpreterBuilder

    builder: Any = InterpreterBuilder
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


if triton is not None and INTERPRETED:
    _as_on_gpus()
