"""Train DLRM-DCNv2 as a preset says; leave an MLPerf log and a record of its latency.

torchrun --nproc_per_node 2 launch/dlrm.py --preset smoke [--pipeline static] [--field value ...]

--preset takes smoke, mlperf-dcnv2 or launch-bound (dlrm/presets.py) and gives the defaults below. --pipeline takes
torchrec (stock, the default), five-stage or static, and adds the options of that pipeline. Two flags show what a run
would do and stop, without torchrun: --print-config the resolved configuration, --print-plan [RANKS] which rank of the
static pipeline would hold which tables, and its load; RANKS defaults to torchrun's WORLD_SIZE, or else 8.
"""

import argparse
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

# Python puts this folder first on the path; the package dlrm_bench is this file's own, whatever pip has installed.
sys.path[0] = str(Path(__file__).resolve().parents[1])

# Kernels of many streams and communicators are in flight; in the eight hardware queues that CUDA takes by default they
# could queue behind one another.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# torchrec and fbgemm warn at every start of what their users cannot change; `python -W default` shows it.
if not sys.warnoptions:
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    logging.getLogger("dlrm_bench").setLevel(logging.WARNING)  # such as that a switch does not apply

from dlrm_bench.bench.config import RunConfig, as_json
from dlrm_bench.bench.flags import parse_run
from dlrm_bench.dlrm.command_line import EXIT_BAD_INPUT, EXIT_FAILED, leave
from dlrm_bench.pipeline.torchrec.options import TorchRecOptions

# What needs torch is imported once the flags are read: --help and a wrong flag answer at once.


def parse(arguments: list[str]) -> RunConfig:
    """The configuration of a command line; exits after --help and --print-*. ValueError names a bad flag."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="smoke")
    first.add_argument("--pipeline", default=TorchRecOptions.name)
    first.add_argument("--print-config", action="store_true")
    first.add_argument("--print-plan", type=int, nargs="?", metavar="RANKS", const=os.environ.get("WORLD_SIZE", "8"))
    chosen, rest = first.parse_known_args(arguments)
    config = parse_run(chosen.preset, chosen.pipeline, rest, __doc__, os.environ.get("LOCAL_RANK", "0") == "0")
    if chosen.print_config:
        print(json.dumps(as_json(config), indent=2))
        sys.exit()
    if chosen.print_plan is not None:
        from dlrm_bench.bench.plan_table import print_plan

        print_plan(config, chosen.print_plan)
        sys.exit()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python sets it: a run ends by errors
    return config


def main() -> int:
    """Train as the command line says; returns the exit status."""
    config = parse(sys.argv[1:])
    from dlrm_bench.bench.run import run
    from dlrm_bench.bench.summary import print_summary
    from dlrm_bench.dlrm.ranks import Ranks

    ranks = Ranks.from_environment()
    outcome = run(config, ranks, ranks.command_line("launch/dlrm.py", sys.argv[1:]))
    status = print_summary(outcome, ranks)
    ranks.destroy_process_group()
    return status


def guarded(work: Callable[[], int]) -> int:
    """The exit status of `work`; prints what went wrong, and on which rank."""
    where = f"rank {os.environ.get('RANK', '-')}"
    try:
        return work()
    except ValueError as error:
        print(f"{where}: error: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    except Exception:
        print(f"{where} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return EXIT_FAILED


if __name__ == "__main__":
    leave(guarded(main))
