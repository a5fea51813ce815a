"""Seconds from SIGKILL of a rank until the training goes on from its snapshot in memory.

python tests/bench/checkpoints/time_restart.py RANKS FOLDER FLAGS, as in

    python tests/bench/checkpoints/time_restart.py 2 /tmp/killed --preset launch-bound --pipeline static \
        --iterations 100000 --snapshot.every 10000 --snapshot.path /dev/shm/killed

starts FLAGS of launch/dlrm.py under torchrun, kills the last rank two seconds after the first snapshot, and prints
when the restarted run is about to train. Needs no GPU.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dlrm_bench.bench.run_files import LOG_NAME
from tests.launched import LAUNCHER, ranks_naming

_PATIENCE_S = 550
_BEFORE_THE_KILL_S = 2


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> float:
    """Returns the time by the clock at which a condition holds; SystemExit where the run ends before."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit("the run ended, or took too long: raise --iterations, or see its output")
        time.sleep(0.02)
    return time.monotonic()


def rank_of(folder: Path, rank: int) -> int:
    """Returns the process id of a rank."""
    mark = f"RANK={rank}".encode()
    found = [(pid, Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")) for pid in ranks_naming(str(folder))]
    return next(pid for pid, variables in found if mark in variables)


def main(ranks: int, folder: Path, flags: list[str]) -> None:
    """Prints the seconds."""
    folder.mkdir()
    snapshots = Path(flags[flags.index("--snapshot.path") + 1])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    place = ["--results-dir", str(folder), "--run-id", "x", "--resume", "auto"]
    process = subprocess.Popen([*torchrun, "--max-restarts=1", LAUNCHER, *flags, *place])
    wait_for(lambda: any(snapshots.glob("samples-*")), process)
    time.sleep(_BEFORE_THE_KILL_S)
    os.kill(rank_of(folder, ranks - 1), signal.SIGKILL)
    killed, log = time.monotonic(), folder / "x-restart-1" / LOG_NAME
    seconds = wait_for(lambda: log.exists() and "# --resume auto: continues" in log.read_text(), process) - killed
    print(f"trains again {seconds:.1f} s after SIGKILL", flush=True)
    process.terminate()
    process.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
