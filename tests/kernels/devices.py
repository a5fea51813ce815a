"""Where kernel tests run: on the GPU, or else in Triton's interpreter."""

import pytest
import torch

from dlrm_bench.kernels._triton import triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(triton is None, reason="needs Triton (pip install triton)")
