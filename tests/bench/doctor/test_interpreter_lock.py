"""A process of its own waits for the lock: the watch looks at it from outside."""

import os
import subprocess
import sys

import pytest

from dlrm_bench.bench.doctor.interpreter_lock import LockWatch, Samples, loop_path
from dlrm_bench.bench.doctor.site_folder import SETTINGS

LOOP = """
import json, os, sys, threading
from pathlib import Path
from dlrm_bench.bench.doctor.interpreter_lock import loop_path, runtime_address
folder = Path(sys.argv[1])
go_on = True
def compute():
    while go_on:
        sum(range(1000))
other = threading.Thread(target=compute)
if sys.argv[2] == "contended":
    other.start()
told = {"pid": os.getpid(), "thread": threading.get_native_id(), "runtime": runtime_address()}
(folder / "unfinished").write_text(json.dumps(told))
(folder / "unfinished").rename(loop_path(folder, 0))
while not (folder / "stop").exists():
    sum(range(1000))
go_on = False
"""
ON_LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/syscall"), reason="the kernel tells no system calls")


def watched(tmp_path, kind: str, settings: str, samples: int) -> Samples:
    """The samples of a loop, once there are enough, or none were taken until the process ended."""
    environment = os.environ | {SETTINGS: settings}
    with LockWatch(tmp_path) as watch:
        process = subprocess.Popen([sys.executable, "-c", LOOP, str(tmp_path), kind], env=environment)
        while watch.samples.get("rank0", Samples()).taken < samples:
            assert process.poll() is None
        (tmp_path / "stop").touch()
        assert process.wait() == 0
    return watch.samples.get("rank0", Samples())


@ON_LINUX
def test_waits_for_another_thread_are_seen(tmp_path):
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    for folder in (alone, beside):
        folder.mkdir()
    assert watched(beside, "contended", str(beside), 200).waiting > 0  # how often, the machine's other load decides
    assert watched(alone, "alone", str(alone), 200).waiting == 0


def test_a_number_that_is_another_process_here_is_not_watched(tmp_path):
    """A container's processes have other numbers: this process is no rank of the folder's."""
    loop_path(tmp_path, 0).write_text(f'{{"pid": {os.getpid()}, "thread": {os.getpid()}, "runtime": 4096}}')
    with LockWatch(tmp_path) as watch:
        for _ in range(100):
            assert not watch._end.wait(0.001)
    assert watch.samples == {}


def test_too_few_samples_say_nothing():
    assert Samples(19, 19).share is None
    assert Samples(20, 5).share == 0.25
