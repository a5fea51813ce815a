"""The five-stage pipeline for TorchRec models: a drop-in for TrainPipelineSparseDist.

It needs torch, torchrec and pipeline/cuda_graph.py, and nothing else of this project.
"""

from .options import FiveStageOptions
from .pipeline import FiveStagePipeline
from .trimmed.ec_sharder import TrimmedECSharder
from .trimmed.sharder import TrimmedEBCSharder

__all__ = ["FiveStageOptions", "FiveStagePipeline", "TrimmedEBCSharder", "TrimmedECSharder"]
