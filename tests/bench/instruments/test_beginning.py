"""Ranks that get nowhere before their training end, whether torchrun was killed or another rank was stopped."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.instruments import beginning
from dlrm_bench.bench.instruments.beginning import FACTOR, Beginning
from tests.launched import end, ranks_naming, torchrun, wait_until

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
    wait_until(lambda: not list(ranks_naming(str(tmp_path))), "both ranks have ended", 30)
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


def test_a_rank_that_is_stopped_while_it_imports_ends_the_other(started: Callable[..., Any], tmp_path: Path) -> None:
    process = started("--stall-timeout=2")
    stopped = importing(tmp_path)[1]
    os.kill(stopped, signal.SIGSTOP)
    text = (
        f"rank 0: the beginning has stalled for 20 s ({FACTOR} times --stall-timeout): this rank waits for the other "
        f"ranks in init_process_group, rank 1's process {stopped} is stopped\n"
    )
    wait_until(lambda: text in (tmp_path / "output").read_text(), "rank 0 says why it ends", 90)
    assert not (tmp_path / "x").exists()
    os.kill(stopped, signal.SIGKILL)  # torchrun does this half a minute later
    assert process.wait(60) == 1


class Ends:
    """A watch of half a second a step, and why it ended its process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setattr(beginning, "_PERIOD_S", 0.05)
        self.reasons: list[str] = []
        self.ended = threading.Event()
        self.watch = Beginning()
        self.watch.allow(0.05)
        self.watch.ends_by(self._end)
        self.watch.watch()

    def _end(self, reason: str) -> None:
        self.reasons.append(reason)
        self.ended.set()
        self.watch.over()


def test_each_step_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    for i in range(8):
        ends.watch.now(f"does {i}")
        assert not ends.ended.wait(0.1)
    assert ends.ended.wait(10)
    assert ends.reasons[0].startswith(
        "the beginning has stalled for 0.5 s (10 times --stall-timeout): this rank does 7"
    )


def test_what_reads_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(4 << 20))
    ends = Ends(monkeypatch)
    ends.watch.now("reads its checkpoint", by_bytes=True)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        (tmp_path / "shard").read_bytes()
    assert ends.reasons == []
    assert ends.ended.wait(10)
    assert "this rank reads its checkpoint" in ends.reasons[0]


def test_a_training_is_not_of_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    ends.watch.over()
    assert not ends.ended.wait(1)
    without = Ends(monkeypatch)
    without.watch.allow(None)
    assert not without.ended.wait(1)
    without.watch.over()


def test_without_a_launcher_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    before = threading.active_count()
    Beginning().watch()
    assert threading.active_count() == before
