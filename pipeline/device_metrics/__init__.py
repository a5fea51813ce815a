"""TorchRec's metrics on the device, without a sync: a drop-in for RecMetricModule.

It needs torch and torchrec, on GPUs also Triton, and nothing else of this project.
"""

from .module import DeviceRecMetrics
from .pending import PendingMetrics

__all__ = ["DeviceRecMetrics", "PendingMetrics"]
