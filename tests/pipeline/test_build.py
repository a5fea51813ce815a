"""What a training imports: TorchRec where its pipelines are asked for, and not before."""

import subprocess
import sys

IMPORTS = """
import sys
import dlrm_bench.bench.run, dlrm_bench.pipeline.static.pipeline, dlrm_bench.pipeline.static_sequences.pipeline
sys.exit("torchrec" in sys.modules)
"""


def test_static_pipelines_start_without_torchrec() -> None:
    """Its import takes a third of the CPU time in which a small run starts and ends."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
