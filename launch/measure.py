"""What `dlrm-bench host` and `dlrm-bench limits` start: torchrun ... launch/measure.py KIND [flags of launch/dlrm.py].

host: a profiled run of launch/dlrm.py. limits: the ceilings of this machine. nvtx: a profiled run that emits its ranges
for another profiler: nsys profile torchrun ... launch/measure.py nvtx ... Never for timing.
"""

import sys
from functools import partial
from pathlib import Path

# As in launch/dlrm.py.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from dlrm_bench.dlrm.command_line import leave
from dlrm_bench.launch.dlrm import guarded, parse


def main() -> int:
    """Returns the exit status."""
    what, *flags = sys.argv[1:] or ["nothing"]
    # Neither measurement has an end or a target of its own: what the preset says of them does not matter.
    config = parse([*flags, "--iterations", "1000000", "--target-auc", "None"])
    from dlrm_bench.bench.measure.limits import run_limits
    from dlrm_bench.bench.measure.profiled_run import ProfiledPipeline, profiled_config
    from dlrm_bench.bench.run import run
    from dlrm_bench.dlrm.ranks import Ranks

    ranks = Ranks.from_environment()
    command = ranks.command_line("launch/measure.py", sys.argv[1:])
    if what == "nvtx" and ranks.device.type != "cuda":
        raise ValueError(
            "NVTX ranges need a GPU: for the CPU leave --nvtx out, and read the trace of `dlrm-bench host`"
        )
    if what in ("host", "nvtx"):
        config = profiled_config(config)
        run(config, ranks, command, partial(ProfiledPipeline, config=config, ranks=ranks, nvtx=what == "nvtx"))
    elif what == "limits":
        run_limits(config, ranks, command)
    else:
        raise ValueError(f"{what!r} cannot be measured: host, nvtx or limits can")
    ranks.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(guarded(main))
