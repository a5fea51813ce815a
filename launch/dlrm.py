"""Trains a recommender as configured by a preset; writes an MLPerf log and a record of its latency.

torchrun --nproc_per_node 2 launch/dlrm.py --preset smoke [--pipeline static] [--field value ...]

If pip installed the package, use `-m dlrm_bench.launch.dlrm` instead of `launch/dlrm.py`. The exit status is 0 if the
target was reached or there was none, 1 after a failure, 2 for bad input, 3 if the target was missed, 4 if the
compliance checker refuses the log; torchrun turns every status but 0 into 1.

The flag --preset selects one of the presets below, whose values are the defaults. --pipeline takes torchrec (stock, the
default), five-stage or static, and adds the options of that pipeline. Two flags print and exit, without torchrun:
`--print-config` prints the resolved configuration, --print-plan [RANKS] the tables and the load of each rank under the
static pipeline, or, for models that it does not train, the tables of each rank; RANKS defaults to torchrun's
WORLD_SIZE, or else 8. The plan's times are those of an H200, or, with `--limits FILE` (a limits.json of `dlrm-bench
limits`), of the GPUs measured there. For the plan, --gpus-per-node GPUS sets the size of a node (default 8),
--network-gb-s RATE the network's rate per GPU (default 45 GB/s), and `--host-memory-gb GB` the host memory of a node,
which its GPUs share (default 137 GB for each of them, or as measured for FILE).
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

# Use the package in the tree around this file, a checkout or an installation, regardless of the rest of sys.path.
_tree = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_tree if (_tree / "dlrm_bench").is_dir() else _tree.parent))
import dlrm_bench  # noqa: F401

del sys.path[0]  # so that the tree's modules cannot be imported by second names
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # inserted by Python itself

from dlrm_bench.launch.surroundings import prepare

prepare()

# None of these imports needs torch, which is imported after the flags are read: --help and a wrong flag answer at once.
from dlrm_bench.bench.config import RunConfig, as_json
from dlrm_bench.bench.flags import known_flags, parse_run
from dlrm_bench.bench.instruments.beginning import BEGINNING
from dlrm_bench.dlrm.runtime.command_line import exit_process
from dlrm_bench.launch.failures import guarded
from dlrm_bench.pipeline.torchrec.options import TorchRecOptions


def parse(arguments: list[str]) -> RunConfig:
    """Returns the configuration of a command line; exits after --help and --print-*. ValueError names a bad flag."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--preset", default="smoke")
    first.add_argument("--pipeline", default=TorchRecOptions.name)
    first.add_argument("--print-config", action="store_true")
    first.add_argument("--print-plan", type=int, nargs="?", metavar="RANKS", const=os.environ.get("WORLD_SIZE", "8"))
    first.add_argument("--gpus-per-node", type=int, metavar="GPUS")
    first.add_argument("--network-gb-s", type=float, metavar="RATE")
    first.add_argument("--host-memory-gb", type=float, metavar="GB")
    first.add_argument("--limits", type=Path, metavar="FILE")
    chosen, rest = known_flags(first, arguments)
    config = parse_run(chosen.preset, chosen.pipeline, rest, __doc__ or "", os.environ.get("LOCAL_RANK", "0") == "0")
    if chosen.print_config:
        print(json.dumps(as_json(config), indent=2))
        sys.exit()
    if chosen.print_plan is not None:
        from dlrm_bench.bench.plan.plan_table import costs_at, print_plan, topology_of

        topology = topology_of(chosen.print_plan, chosen.gpus_per_node, chosen.network_gb_s)
        print_plan(config, topology, costs_at(chosen.limits, chosen.host_memory_gb, topology))
        sys.exit()
    for flag in ("limits", "gpus_per_node", "network_gb_s", "host_memory_gb"):
        if getattr(chosen, flag) is not None:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} needs --print-plan: leave it out, or add --print-plan")
    BEGINNING.allow(config.stall_timeout)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Python's default: a run ends by errors
    return config


def main() -> int:
    """Trains with the flags of the command line; returns the exit status."""
    config = parse(sys.argv[1:])
    from dlrm_bench.bench.run import run
    from dlrm_bench.bench.summary import print_summary
    from dlrm_bench.dlrm.runtime.ranks import Ranks
    from dlrm_bench.pipeline.build import pipeline_class

    pipeline_class(config, config.pipeline)  # reports a missing package before anything is written
    ranks = Ranks.from_environment()
    outcome = run(config, ranks, ranks.command_line("launch/dlrm.py", sys.argv[1:]))
    status = print_summary(outcome, ranks)
    ranks.destroy_process_group()
    return status


if __name__ == "__main__":
    exit_process(guarded(main))
