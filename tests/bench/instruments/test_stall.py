"""A rank without progress ends the run on every rank that can still end; these name it and its activity."""

import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_bench.bench.instruments.abort import AbortWatch
from dlrm_bench.bench.instruments.stall import StallWatch, _Report, _stage
from dlrm_bench.bench.run_files import LOG_NAME
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.data.loader import Prefetcher
from dlrm_bench.dlrm.data.metrics import exact_auc
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.launched import PATIENCE_S, fork, launch_main, wait, wait_until_training

TIMEOUT_S = 6.0
"""Within a sixth of it the store must answer, on a busy machine too."""


def dead_mount() -> Iterator[Batch]:
    threading.Event().wait()
    yield from ()


def training(folder: Path, trouble: str) -> int:
    """The last rank stalls after five iterations."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    done = 0
    with AbortWatch(ranks, (folder / f"closed_{ranks.rank}").touch) as abort:
        stall = StallWatch(ranks, TIMEOUT_S, lambda: (done, done), abort.stop)
        dist.barrier()
        with stall:
            for _ in range(5):  # all within the time to the first look
                dist.all_reduce(torch.ones(1))
                done += 1
            if ranks.rank == ranks.world_size - 1:
                if trouble == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    next(Prefetcher(dead_mount(), lambda batch: batch, 1))
            dist.all_reduce(torch.ones(1))
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "trouble", "found"),
    [
        (2, "stopped", "rank 1's process does not run; at last it trains, after iteration 5"),
        (2, "reader", "rank 1 waits for its reader, after iteration 5"),
        (1, "reader", "rank 0 waits for its reader, after iteration 5"),
    ],
)
def test_a_stall_ends_every_rank_that_runs(tmp_path, world_size, trouble, found):
    processes = fork(world_size, tmp_path, training, tmp_path, trouble)
    processes[0].join(PATIENCE_S)
    if trouble == "stopped":  # torchrun does this
        os.kill(processes[1].pid, signal.SIGKILL)
    ended = wait(processes, tmp_path)
    assert ended.statuses[0] == 1
    assert f"the training has stalled for 6 s (--stall-timeout): {found}" in ended.outputs[0]
    assert (tmp_path / "closed_0").exists()
    if trouble == "reader":
        assert ended.statuses[-1] == 1
        assert (tmp_path / f"closed_{world_size - 1}").exists()


class Held:
    """Something that a stack holds, as a batch or an activation is."""


def test_a_look_at_all_stacks_keeps_none_of_them():
    """Python collects no cycles while a run trains: a frame that its own local holds would stay for hours."""
    looks = []

    def works() -> weakref.ref[Held]:
        held = Held()
        looker = threading.Thread(target=lambda: looks.append(_stage()))
        looker.start()
        looker.join()
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert [works()() for _ in range(3)] == [None] * 3
    finally:
        gc.enable()
    assert len(looks) == 3


def test_a_rank_in_the_auc_is_not_called_one_that_waits_for_its_reader():
    looks: list[str] = []

    class Scores:
        def isnan(self) -> "Scores":
            looker = threading.Thread(target=lambda: looks.append(_stage()))
            looker.start()
            looker.join()
            return self

        def any(self) -> bool:
            return True

    with pytest.raises(ValueError, match="the AUC is undefined"):
        exact_auc(Scores(), torch.zeros(2))  # type: ignore[arg-type]
    assert looks == ["computes the AUC"]


def test_the_rank_that_still_evaluates_is_named_and_not_one_that_waits_in_the_auc(monkeypatch):
    reports = [_Report(9, 30, 20, "computes the AUC"), _Report(9, 28, 20, "trains")]
    later = [replace(report, looks=12) for report in reports]
    monkeypatch.setattr(StallWatch, "_read_twice", lambda _, found: found.extend([reports, later]))
    alone = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    watch = StallWatch(alone, TIMEOUT_S, lambda: (30, 20), lambda _: None)
    watch._ranks = replace(alone, world_size=2)
    assert watch._reason().endswith("(--stall-timeout): rank 1 trains, after iteration 20")


@pytest.mark.multi_gpu
def test_a_stopped_rank_ends_one_whose_gpu_spins_in_a_barrier(tmp_path):
    """Barriers over peer memory wait without end, in kernels."""
    flags = ["--preset", "launch-bound", "--model.table-scale", "0.001", "--precision", "bf16", "--pipeline", "static"]
    flags += ["--cuda-graph", "iteration", "--overlap", "--presort-ids", "--peer-memory", "--iterations", "100000000"]
    flags += ["--results-dir", str(tmp_path), "--run-id", "x", "--stall-timeout", "5"]
    processes = fork(2, tmp_path, launch_main, flags, gpu=True)
    wait_until_training(tmp_path / "x" / LOG_NAME, lambda: [process.pid for process in processes])
    os.kill(processes[1].pid, signal.SIGSTOP)
    processes[0].join(60)
    os.kill(processes[1].pid, signal.SIGKILL)  # torchrun does this
    ended = wait(processes, tmp_path)
    assert ended.statuses[0] == 1, ended
    assert (
        "rank 0: the training has stalled for 5 s (--stall-timeout): rank 1's process does not run" in ended.outputs[0]
    )
    assert '"status": "aborted"' in (tmp_path / "x" / LOG_NAME).read_text()
