"""The five-stage pipeline for TorchRec models: a drop-in for TrainPipelineSparseDist.

It needs torch and torchrec, and nothing else of this project. Public names are imported on first use: cuda_graph.py and
options.py work without TorchRec.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options import FiveStageOptions
    from .pipeline import FiveStagePipeline
    from .trimmed.ec_sharder import TrimmedECSharder
    from .trimmed.sharder import TrimmedEBCSharder

__version__ = "0.2.0"
__all__ = ["FiveStageOptions", "FiveStagePipeline", "TrimmedEBCSharder", "TrimmedECSharder"]


def __getattr__(name: str) -> Any:
    """Returns a public name (PEP 562), after importing all of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .options import FiveStageOptions
    from .pipeline import FiveStagePipeline
    from .trimmed.ec_sharder import TrimmedECSharder
    from .trimmed.sharder import TrimmedEBCSharder

    public = (FiveStageOptions, FiveStagePipeline, TrimmedEBCSharder, TrimmedECSharder)
    globals().update({each.__name__: each for each in public})
    return globals()[name]
