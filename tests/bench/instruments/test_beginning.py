"""Ranks that get nowhere before their training end, whether torchrun was killed or another rank was stopped."""

import errno
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.instruments import beginning
from dlrm_bench.bench.instruments.beginning import FACTOR, Beginning
from tests.launched import PATIENCE_S, end, ranks_naming, torchrun, wait_until

FLAGS = ["--preset=smoke", "--data.source=random", "--target-auc=None", "--iterations=1000000", "--local-batch-size=64"]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts torchrun with two ranks and returns it once both import; whatever it started is ended after the test."""
    processes = []

    def start(*flags: str) -> Any:
        process = torchrun(tmp_path / "output", [*FLAGS, f"--results-dir={tmp_path}", "--run-id=x", *flags])
        processes.append(process)
        wait_until(lambda: len(importing(tmp_path)) == 2, "both ranks import")
        return process

    yield start
    end(processes, str(tmp_path))


def importing(folder: Path) -> dict[int, int]:
    """Process of each rank that has begun to import torch, by rank."""
    found = {}
    for pid in ranks_naming(str(folder)):
        try:
            if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                found[next(int(each[5:]) for each in variables if each.startswith("RANK="))] = pid
        except OSError:  # it has ended
            continue
    return found


def test_ranks_whose_torchrun_is_killed_while_they_import_end(started: Callable[..., Any], tmp_path: Path) -> None:
    process = started()
    process.kill()
    assert not (tmp_path / "x").exists()
    wait_until(lambda: not list(ranks_naming(str(tmp_path))), "both ranks have ended")
    text = (tmp_path / "output").read_text()
    assert [f"rank {rank}: its torchrun was killed" in text for rank in (0, 1)] == [True, True], text


@pytest.mark.parametrize(
    ("parent", "init", "gone"),
    [
        (1, "/usr/lib/systemd/systemd", True),
        (1, PermissionError(errno.EACCES, "Permission denied"), True),
        (1, "/usr/bin/python3.12", False),
        (1, FileNotFoundError(errno.ENOENT, "No such file"), False),
        (7, "/usr/lib/systemd/systemd", False),
    ],
)
def test_a_torchrun_that_was_killed_before_the_first_line(
    monkeypatch: pytest.MonkeyPatch, parent: int, init: str | OSError, gone: bool
) -> None:
    def readlink(path: Path) -> Path:
        assert str(path) == "/proc/1/exe"
        if isinstance(init, OSError):
            raise init
        return Path(init)

    monkeypatch.setattr(Path, "readlink", readlink)
    assert beginning._is_init(parent) == gone


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_it_imports_ends_the_other(started: Callable[..., Any], tmp_path: Path) -> None:
    process = started("--stall-timeout=2")
    stopped = importing(tmp_path)[1]
    os.kill(stopped, signal.SIGSTOP)
    begins = rf"rank 0: the beginning has stalled for 20 s \({FACTOR} times --stall-timeout\): this rank "
    # A busy machine may take as long to import.
    step = r"(waits for the other ranks in init_process_group|imports modules)"
    says = re.compile(rf"{begins}{step}, rank 1's process {stopped} is stopped\n")
    wait_until(lambda: says.search((tmp_path / "output").read_text()) is not None, "rank 0 says why it ends")
    assert not (tmp_path / "x").exists()
    os.kill(stopped, signal.SIGKILL)  # torchrun does this half a minute later
    assert process.wait(PATIENCE_S) == 1


class Looks:
    """A clock that goes on by a period at each look of a watch, which then meets what its process has done since.

    In the place of the module `time`, and of the event that ends the watch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None) -> None:
        monkeypatch.setattr(beginning, "time", self)
        self.now_s = 0.0
        self.reasons: list[str] = []
        self.watch = Beginning()
        self.watch.allow(timeout_s)
        self.watch.ends_by(self.reasons.append)
        self.watch._over = self  # type: ignore[assignment]

    def monotonic(self) -> float:
        return self.now_s

    def is_set(self) -> bool:
        return False

    def wait(self, period_s: float) -> bool:
        """Whether the watch is over: it has given a reason, or the process has no more to do."""
        self.now_s += period_s
        if self.reasons or not self._does:
            return True
        does = self._does.pop(0)
        if does is not None:
            does()
        return False

    def run(self, *does: Callable[[], object] | None) -> None:
        """Watches a process that does this before each look, None for nothing."""
        self._does = [*does]
        self.watch._watch(None)


def test_each_step_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch of five seconds a step, which looks once a second."""
    looks = Looks(monkeypatch, 0.5)
    steps = [lambda i=i: looks.watch.now(f"does {i}") for i in range(8)]
    looks.run(*(do for step in steps for do in (step, None, None, None, None)), *[None] * 10)
    says = "the beginning has stalled for 5 s (10 times --stall-timeout): this rank does 7"
    assert [reason.startswith(says) for reason in looks.reasons] == [True]
    assert looks.now_s == 36 + 5 + 1  # the last step's beginning, its time, and the look that ends it all


def test_the_seconds_of_each_step_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, None)
    watch = looks.watch
    monkeypatch.setattr(watch, "_over", threading.Event())
    for seconds, do in ((3, lambda: watch.now("opens")), (2, lambda: watch.now("builds")), (0.5, watch.over)):
        looks.now_s += seconds
        do()
    assert watch.seconds == {"imports modules": 3, "opens": 2, "builds": 0.5}
    for seconds, do in ((100, lambda: watch.now("opens")), (1, watch.over), (7, watch.over)):
        looks.now_s += seconds
        do()
    assert watch.seconds == {"opens": 1}, "of another training of this process, and nothing in between"


def test_what_reads_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, 0.5)
    moved = [0]
    monkeypatch.setattr(beginning, "_bytes_moved", lambda: moved[0])

    def read() -> None:
        moved[0] += 1 << 20

    looks.run(lambda: looks.watch.now("reads its checkpoint", by_bytes=True), *[read] * 30, *[None] * 10)
    assert len(looks.reasons) == 1
    assert "this rank reads its checkpoint" in looks.reasons[0]
    assert looks.now_s == 31 + 5 + 1


def test_a_process_that_was_stopped_itself_has_its_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, 0.5)

    def stop() -> None:
        looks.now_s += 100

    looks.run(stop, *[None] * 4)
    assert looks.reasons == []


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="this kernel does not count a process's bytes")
def test_bytes_that_are_read_are_counted(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(4 << 20))
    before = beginning._bytes_moved()
    (tmp_path / "shard").read_bytes()
    assert beginning._bytes_moved() - before >= 4 << 20


def test_a_training_is_not_of_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything a stall without a timeout."""
    ended = threading.Event()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(beginning, "_PERIOD_S", 0.05)
    watch = Beginning()
    watch.allow(0.05)
    watch.ends_by(lambda reason: ended.set())
    watch.over()
    watch.watch()
    assert not ended.wait(1)
    looks = Looks(monkeypatch, None)
    looks.run(*[None] * 10_000)
    assert looks.reasons == []


def test_without_a_launcher_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    before = threading.active_count()
    Beginning().watch()
    assert threading.active_count() == before
