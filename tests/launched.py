"""Starts launch/dlrm.py for a test: under torchrun, or as ranks forked from a process that has imported everything.

Nothing ends forked ranks when one of them fails: a rank that does not end by itself is a failed test. They
start in a tenth of a second, torchrun in four.
"""

import contextlib
import gc
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.ladder import launching
from dlrm_bench.bench.ladder.launching import start_server

LAUNCHER = str(launching.LAUNCHER)
PATIENCE_S = 180
"""Limit in seconds for work that takes seconds on an idle machine: only a hang takes longer."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit status and output (both streams) of each rank."""

    statuses: list[int | None]
    outputs: list[str]


def free_port() -> int:
    """Not one of those that the kernel gives to outgoing connections: it might give it away before a rank listens."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(1024, first_given)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def rank_environment(rank: int, world_size: int, port: int, nodes: int = 1) -> dict[str, str]:
    """Returns torchrun's environment of a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % (world_size // nodes)),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _rank_main(
    environment: dict[str, str], output: Path, gpu: bool, function: Callable[..., int], args: tuple[Any, ...]
) -> None:
    sink = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ |= environment | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # see tests/conftest.py
    try:
        status = function(*args)
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 0
    sys.stdout.flush()
    os._exit(status)


def fork(
    world_size: int, folder: Path, function: Callable[..., int], *args: Any, gpu: bool = False, nodes: int = 1
) -> list[Any]:
    """Processes that run function(*args), whose result is the exit status; rank r writes to folder/output_r.txt.

    gpu: each rank has its own, else they run on the CPU. nodes: that they take this machine for."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world_size):
        output = folder / f"output_{rank}.txt"
        environment = rank_environment(rank, world_size, store.port, nodes) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        process = context.Process(target=_rank_main, args=(environment, output, gpu, function, args))
        process.start()
        process.store = store  # as torchrun's agent does, this process keeps it for as long as it knows of a rank
        processes.append(process)
    return processes


def wait(processes: Sequence[Any], folder: Path, patience_s: float = PATIENCE_S) -> Ended:
    """Waits for forked ranks; those that do not end are killed, and have status -9."""
    deadline = time.monotonic() + patience_s
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    outputs = [(folder / f"output_{rank}.txt").read_text() for rank in range(len(processes))]
    return Ended([process.exitcode for process in processes], outputs)


def launch_main(arguments: Sequence[str], before: Callable[[], None] | None = None) -> int:
    """main() of launch/dlrm.py, in a forked rank; `before` may break something first."""
    import dlrm_bench.launch.dlrm

    sys.argv = ["launch/dlrm.py", *arguments]
    if before is not None:
        before()
    return dlrm_bench.launch.dlrm.guarded(dlrm_bench.launch.dlrm.main)


def run_script(script: Path, arguments: Sequence[str]) -> int:
    """A script as __main__, in a forked rank."""
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
    return 0


def forked_launch(
    world_size: int,
    folder: Path,
    arguments: Sequence[str],
    before: Callable[[], None] | None = None,
    gpu: bool = False,
    nodes: int = 1,
) -> Ended:
    """Runs launch/dlrm.py on forked ranks to its end."""
    folder.mkdir(exist_ok=True)
    return wait(fork(world_size, folder, launch_main, list(arguments), before, gpu=gpu, nodes=nodes), folder)


def torchrun(output: Path, arguments: Sequence[str], options: Sequence[str] = ("--nproc_per_node=2",)) -> Any:
    """Starts torchrun with launch/dlrm.py and returns its Popen; both streams go to `output`."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, LAUNCHER, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with output.open("wb") as sink:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT)


def ranks_naming(text: str) -> Iterator[int]:
    """Process ids of the ranks, not of torchrun, that have `text` in their command line."""
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command_line.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended
            continue
        if any(text in word for word in words) and "torch.distributed.run" not in words:
            yield int(command_line.parent.name)


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {patience_s} s"
        time.sleep(0.05)


def wait_until_training(log: Path, pids: Callable[[], Iterable[int]]) -> None:
    """Until the run with this MLPerf log trains: it says so, and then each of its ranks computes for a while."""
    wait_until(lambda: log.exists() and "epoch_start" in log.read_text(), "training has begun")
    begun = {pid: _cpu_ticks(pid) for pid in pids()}
    assert begun
    wait_until(lambda: all(_cpu_ticks(pid) - ticks >= 80 for pid, ticks in begun.items()), "the ranks train")


def _cpu_ticks(pid: int) -> int:
    """CPU time of a process, in hundredths of a second: utime and stime in proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def end(processes: Sequence[Any], text: str) -> None:
    """Ends all processes of a test, whatever went wrong."""
    for process in processes:
        process.kill()
        process.wait()
    for pid in list(ranks_naming(text)):
        os.kill(pid, signal.SIGKILL)
