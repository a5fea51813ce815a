"""Fixtures of all tests: GPU tests are skipped with a reason where there is no GPU, and functions run on several
ranks."""

import faulthandler
import functools
import gc
import logging
import os
import pickle
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from dlrm_bench.bench.ladder import launching
from dlrm_bench.bench.ladder.launching import start_server
from tests.interpreter import prepare_interpreter
from tests.launched import free_port, rank_environment

# NVML is asked, as in start_server: a process that asks CUDA itself is no process to fork ranks from.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
if not torch.cuda.is_available():
    # Triton decides at its first import whether it interprets, and torchrec and fbgemm_gpu import it too.
    os.environ.setdefault("TRITON_INTERPRET", "1")

prepare_interpreter()

# Workers and ranks share the cores; OpenMP's threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# As in launch/dlrm.py, before CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from torchrec.distributed.planner.proposers import GridSearchProposer  # noqa: E402 - it imports Triton

# Of six tables TorchRec's planner rates all 4,096 plans, in a second of every rank 0. Of a real model's 26 it rates
# what its other proposers name, as here.
GridSearchProposer.__init__.__defaults__ = (100,)

# Imports of every rank of a test that the fork server has not made.
launching._PRELOADED += ["pytest", "hypothesis", "tests.conftest"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow, as CI does")


def pytest_configure() -> None:
    gc.disable()  # up to the end of collection, which makes a million objects that stay

    from hypothesis import HealthCheck, settings  # not in every rank, which imports this file

    # Hypothesis' own limits on time say only how busy the machine is.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files that start processes take longest, and none of them may be the last that one worker is left with.
    items.sort(key=lambda item: not _starts_processes(item.path))
    gpus = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), this machine has {gpus}"))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: --slow runs it"))


@functools.cache
def _starts_processes(file: Path) -> bool:
    return re.search("run_ranks|tests.launched|subprocess", file.read_text(encoding="utf-8")) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws does not depend on the tests that its worker ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # the CPU's alone: torch.manual_seed would keep a stack for CUDA each time
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    if "dlrm_bench.dlrm.dlrmv4.data.builder" in sys.modules:  # the tests to come may build batches in ranks
        launching._PRELOADED.append("tests.dlrm.dlrmv4.compiled_loops")


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest's own last collections would look through all that was imported, for seconds


class _ResultPickler(pickle.Pickler):
    """Pickles a view as its own elements, not as all of the memory that it is a view of."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            return value.detach().clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    gpu: bool,
    nodes: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    results: Path,
) -> None:
    gc.freeze()  # what was imported: collections touch it, and so copy a fork's memory, to no end
    if gpu:
        # The wait for a rank that never comes to a collective has no end: print where all threads are, and leave.
        faulthandler.dump_traceback_later(float(os.environ.get("RANK_LIMIT_S", 600)), exit=True)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= rank_environment(rank, world_size, port, nodes)
    logging.getLogger().setLevel(logging.WARNING)  # Python's own: launch/dlrm.py, which the server imports, sets one
    torch.set_num_threads(1)
    from dlrm_bench.dlrm.runtime.ranks import Ranks

    ranks = Ranks.from_environment()
    if gpu and nodes > 1:  # of one machine
        gpus = torch.cuda.device_count()
        if world_size > gpus:  # which the nodes use in turn; NCCL refuses two ranks of one host on one GPU
            os.environ |= {"NCCL_HOSTID": f"node-{ranks.node}", "NCCL_SOCKET_IFNAME": "lo"}
        ranks = replace(ranks, device=torch.device("cuda", rank % gpus))
    ranks.init_process_group()
    with (results / str(rank)).open("wb") as file:
        _ResultPickler(file).dump(function(ranks, *args))
    torch.distributed.barrier()
    if gpu:  # NCCL takes half a minute to destroy the communicators of a dozen pipelines, and nothing is learnt by it
        os._exit(0)
    torch.distributed.destroy_process_group()


def _run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, gpu: bool = False, nodes: int = 1
) -> list[Any]:
    # Forks of a server that has imported everything start in a tenth of a second, fresh processes in five. The server's
    # Triton is compiled where there is a GPU, and interpreted where there is none: ranks without the GPU are fresh.
    method = "spawn" if torch.cuda.is_available() and not gpu else "forkserver"
    if method == "forkserver":
        start_server()
    with TemporaryDirectory() as folder:
        results = Path(folder)
        arguments = (world_size, free_port(), gpu, nodes, function, args, results)
        mp.start_processes(_rank_main, arguments, nprocs=world_size, start_method=method)
        return [pickle.loads((results / str(rank)).read_bytes()) for rank in range(world_size)]


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """run_ranks(world_size, function, *args, gpu=False, nodes=1): what function(ranks, *args) returned on each rank.

    Ranks run on the CPU with gloo, or on GPUs with NCCL, each on its own; all on this machine, however many nodes they
    take it for. Nodes share its GPUs where there are fewer than ranks: the driver then runs processes in turn, which
    says nothing about time, and NCCL sends through sockets between the nodes.
    The function must be importable (top level of a test module), arguments and results picklable.
    """
    return _run_ranks
