"""A rank that fails or is told to stop ends all ranks, wherever their main threads are blocked."""

import linecache
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlrm_bench.bench.instruments import abort
from dlrm_bench.bench.instruments.abort import AbortWatch
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.data.loader import Prefetcher
from dlrm_bench.dlrm.dcnv2.data.expansion import FOLDER, open_expansion_tables
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.dlrm.conftest import tiny_model
from tests.launched import PATIENCE_S, fork, wait, wait_until


def tell_when_blocked(file: Path) -> None:
    """Writes the process's id once the main thread is within the call `block()`: that line has no other place where it
    lets another thread run Python."""
    main = threading.main_thread().ident

    def line() -> str:
        frame = sys._current_frames()[main]
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()

    wait_until(lambda: line() == "block()", "the main thread is blocked")
    file.write_text(str(os.getpid()))


def watched(folder: Path, failing_rank: int | None = None, close_fails: bool = False) -> int:
    """Rank 0 waits for a lock, the others for it in a collective; `failing_rank` raises. Closing the log leaves a
    file."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()

    def close_log() -> None:
        (folder / f"closed_{ranks.rank}").touch(exist_ok=False)
        if close_fails:
            raise OSError("no space left")

    with AbortWatch(ranks, close_log):
        dist.barrier()  # none fails before all are watched
        if ranks.rank == failing_rank:
            raise ValueError("bad id 7")
        if ranks.rank == 0:
            taken = threading.Lock()
            taken.acquire()
            block = taken.acquire
        else:
            block = dist.all_reduce(torch.ones(1), async_op=True).wait  # C++: no signal handler written in Python runs
        threading.Thread(target=tell_when_blocked, args=(folder / f"pid_{ranks.rank}",), daemon=True).start()
        block()
    return 0


def pids(folder: Path, world_size: int) -> list[int]:
    files = [folder / f"pid_{rank}" for rank in range(world_size)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), "the ranks are blocked")
    return [int(file.read_text()) for file in files]


def told_why(output: str, reason: str) -> bool:
    """Gloo notices by itself that a peer has gone, often sooner than the reason arrives; NCCL waits for ever."""
    return reason in output or "remote worker" in output or "Connection" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "told"),
    [(signal.SIGTERM, 0), (signal.SIGTERM, 1), (signal.SIGINT, 0), (signal.SIGHUP, 1), (signal.SIGQUIT, 1)],
)
def test_a_signal_to_one_rank_ends_all(tmp_path, number, told):
    processes = fork(2, tmp_path, watched, tmp_path)
    os.kill(pids(tmp_path, 2)[told], number)
    ended = wait(processes, tmp_path)
    other = 1 - told
    assert ended.statuses[told] == 128 + number
    assert ended.statuses[other] == 1
    assert f"rank {told}: stopped by {number.name}" in ended.outputs[told]
    assert told_why(ended.outputs[other], f"rank {other}: rank {told} failed: stopped by {number.name}")
    assert (tmp_path / "closed_0").exists()
    assert (tmp_path / "closed_1").exists()


def test_one_rank_alone_is_told(tmp_path):
    processes = fork(1, tmp_path, watched, tmp_path)
    os.kill(pids(tmp_path, 1)[0], signal.SIGTERM)
    ended = wait(processes, tmp_path)
    assert ended.statuses == [143]
    assert (tmp_path / "closed_0").exists()


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_on_one_rank_ends_all(tmp_path, failing):
    ended = wait(fork(3, tmp_path, watched, tmp_path, failing), tmp_path)
    assert -9 not in ended.statuses
    assert 0 not in ended.statuses
    assert "ValueError: bad id 7" in ended.outputs[failing]
    for rank in {0, 1, 2} - {failing}:
        assert told_why(ended.outputs[rank], f"rank {rank}: rank {failing} failed: ValueError: bad id 7")
        assert (tmp_path / f"closed_{rank}").exists()


def waiting(failing_rank: int, error: type[Exception]) -> int:
    """`failing_rank` raises at once, the others are in a collective with it, and have time to learn why it broke."""
    abort._GRACE_S = PATIENCE_S
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    with AbortWatch(ranks, lambda: None):
        dist.barrier()
        if ranks.rank == failing_rank:
            raise error("no disk")
        dist.all_reduce(torch.ones(1))
    return 0


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_broken_collective_is_not_taken_for_the_reason(tmp_path, error):
    ended = wait(fork(2, tmp_path, waiting, 1, error), tmp_path)
    assert ended.statuses[0] == 1
    assert f"rank 0: rank 1 failed: {error.__name__}: no disk" in ended.outputs[0]
    assert "Traceback" not in ended.outputs[0]
    assert f"{error.__name__}: no disk" in ended.outputs[1]


def killed_alone(folder: Path, killed: int) -> int:
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    with AbortWatch(ranks, (folder / f"closed_{ranks.rank}").touch):
        dist.barrier()
        if ranks.rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    return 0


@pytest.mark.parametrize("killed", [0, 1])
def test_a_peer_that_was_killed_is_told_in_one_line(tmp_path, killed):
    ended = wait(fork(2, tmp_path, killed_alone, tmp_path, killed), tmp_path)
    left = 1 - killed
    assert (ended.statuses[killed], ended.statuses[left]) == (-9, 1)
    (line,) = ended.outputs[left].splitlines()
    assert line.startswith(f"rank {left}: another rank is gone without giving a reason: it was killed")
    assert "Traceback" not in line
    assert (tmp_path / f"closed_{left}").exists()


def fail_in_turn() -> int:
    """Rank 1 raises after it was told of rank 0's error."""
    abort._GRACE_S = PATIENCE_S
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    with AbortWatch(ranks, lambda: None) as watch:
        if ranks.rank == 1:
            assert watch._told.wait(PATIENCE_S)
        raise RuntimeError(f"own trouble of rank {ranks.rank}")
    return 0


def test_an_error_that_is_no_collectives_is_not_lost_behind_another_ranks(tmp_path):
    ended = wait(fork(2, tmp_path, fail_in_turn), tmp_path)
    assert all(f"RuntimeError: own trouble of rank {rank}" in output for rank, output in enumerate(ended.outputs))


def broken_alone() -> int:
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    with AbortWatch(ranks, lambda: None):
        raise RuntimeError("out of memory")
    return 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_errors_of_its_own_keep_their_traceback(tmp_path, world_size):
    ended = wait(fork(world_size, tmp_path, broken_alone), tmp_path)
    assert 0 not in ended.statuses
    assert -9 not in ended.statuses
    assert any("Traceback" in output for output in ended.outputs)
    assert all("RuntimeError: out of memory" in output for output in ended.outputs)


def test_a_rank_ends_although_its_log_cannot_be_closed(tmp_path):
    processes = fork(2, tmp_path, watched, tmp_path, None, True)
    os.kill(pids(tmp_path, 2)[1], signal.SIGTERM)
    ended = wait(processes, tmp_path)
    assert -9 not in ended.statuses
    assert ended.statuses[1] == 143
    assert "no space left" in ended.outputs[1]
    assert "rank 0: rank 1 failed: stopped by SIGTERM" in ended.outputs[0]


def test_a_signal_twice_closes_the_log_once(tmp_path):
    processes = fork(1, tmp_path, watched, tmp_path)
    (pid,) = pids(tmp_path, 1)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    ended = wait(processes, tmp_path)
    assert ended.statuses[0] in (130, 143)
    assert "FileExistsError" not in ended.outputs[0]


def test_a_signal_with_a_handler_of_its_own_ends_nothing(monkeypatch):
    """A sampling profiler's timer: every signal reaches the descriptor that the watch reads."""
    ended = threading.Event()
    monkeypatch.setattr(AbortWatch, "_end", lambda self, reason, code, announce: ended.set())
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    try:
        with AbortWatch(ranks, lambda: None):
            signal.raise_signal(signal.SIGALRM)
            assert not ended.wait(0.2)
            signal.raise_signal(signal.SIGTERM)
            assert ended.wait(PATIENCE_S)
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_handlers_are_restored(monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    closed = []
    with AbortWatch(ranks, lambda: closed.append(1)):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert not closed
    with pytest.raises(KeyError), AbortWatch(ranks, lambda: closed.append(1)):
        raise KeyError("x")
    assert closed == [1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("left", [False, True])
def test_a_watch_that_was_left_ends_no_later_run_of_its_process(monkeypatch, left):
    """Its thread still waits for the word of a failed rank, and would end the process before the later run's log."""
    of_rank = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "device": torch.device("cpu")}
    store = SimpleNamespace(wait=lambda *_: None, get=lambda _: b"rank 1 failed")
    ended = []
    monkeypatch.setattr(abort, "connect_store", lambda: store)
    monkeypatch.setattr(abort.time, "sleep", lambda _: None)
    watch = AbortWatch(Ranks(**of_rank), lambda: None)
    monkeypatch.setattr(watch, "_end", lambda reason, code, announce: ended.append(reason))
    if left:
        with watch:
            pass
    watch._watch_ranks()
    assert ended == ([] if left else ["rank 1 failed"])


def test_a_handler_in_c_is_none_that_can_be_put_back():
    """PYTHONFAULTHANDLER=1 sets such ones, of SIGBUS too."""
    code = (
        "import signal, torch\n"
        "from dlrm_bench.bench.instruments.abort import AbortWatch\n"
        "from dlrm_bench.dlrm.runtime.ranks import Ranks\n"
        "assert signal.getsignal(signal.SIGBUS) is None\n"
        "of_rank = dict(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device('cpu'))\n"
        "with AbortWatch(Ranks(**of_rank), lambda: None): pass\n"
        "assert signal.getsignal(signal.SIGBUS) is signal.SIG_DFL\n"
    )
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def expands(folder: Path) -> int:
    """Reads 1-hot ids, whose expansion tables somebody cuts short."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    with AbortWatch(ranks, (folder / "closed").touch):
        tables = open_expansion_tables(folder, (100_000,), (3,))
        (table,) = folder.glob(f"{FOLDER}/*/0.npy")
        os.truncate(table, 5000)
        ids, out = np.arange(100_000, dtype=np.int32), np.empty((100_000, 3), np.int32)
        next(Prefetcher(iter([Batch.empty(1, tiny_model())]), lambda _: tables.expand(0, ids, out), 1))
    return 0


def test_a_mapped_file_that_is_cut_short(tmp_path):
    ended = wait(fork(1, tmp_path, expands, tmp_path), tmp_path)
    assert ended.statuses == [128 + signal.SIGBUS]
    (table,) = tmp_path.glob(f"{FOLDER}/*/0.npy")
    assert f"rank 0: stopped by SIGBUS: {table} is truncated, it has 5000 bytes and was longer" in ended.outputs[0]
    assert (tmp_path / "closed").exists()
