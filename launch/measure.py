"""Starts the measurements of `dlrm-bench host` and `dlrm-bench limits`: torchrun ... launch/measure.py KIND [flags].

KIND is host (a profiled run of launch/dlrm.py), limits (the ceilings of this machine), or nvtx (a profiled run that
emits its ranges for another profiler: nsys profile torchrun ... launch/measure.py nvtx ...). The flags are those of
launch/dlrm.py. Do not use these runs for timing.
"""

import sys
from functools import partial
from pathlib import Path

_tree = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_tree if (_tree / "dlrm_bench").is_dir() else _tree.parent))
import dlrm_bench  # noqa: F401  # as in launch/dlrm.py, which does the rest

del sys.path[0]

from dlrm_bench.dlrm.runtime.command_line import exit_process
from dlrm_bench.launch.dlrm import parse
from dlrm_bench.launch.failures import guarded


def main() -> int:
    """Runs the measurement given on the command line; returns the exit status."""
    what, *flags = sys.argv[1:] or ["nothing"]
    if what not in ("host", "limits", "nvtx"):
        raise ValueError(f"{what!r} is not a measurement: choose host, nvtx or limits")
    # Both measurements have a fixed length and no target, regardless of the preset.
    config = parse([*flags, "--iterations", "1000000", "--target-auc", "None"])
    from dlrm_bench.bench.limits.measured import run_limits
    from dlrm_bench.bench.profile.profiled_run import ProfiledPipeline, profiled_config
    from dlrm_bench.bench.run import run
    from dlrm_bench.dlrm.runtime.ranks import Ranks

    ranks = Ranks.from_environment()
    command = ranks.command_line("launch/measure.py", sys.argv[1:])
    if what == "nvtx" and ranks.device.type != "cuda":
        raise ValueError("NVTX ranges need a GPU: on the CPU leave --nvtx out, and read the trace of `dlrm-bench host`")
    if what in ("host", "nvtx"):
        config = profiled_config(config)
        run(config, ranks, command, partial(ProfiledPipeline, config=config, ranks=ranks, nvtx=what == "nvtx"))
    else:
        run_limits(config, ranks, command)
    ranks.destroy_process_group()
    return 0


if __name__ == "__main__":
    exit_process(guarded(main))
