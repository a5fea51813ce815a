import json
import os
import subprocess
import sys

from dlrm_bench.bench.doctor.leaving import began_path, dead_ranks, ended_early, ended_path, gone, why
from dlrm_bench.bench.doctor.rank_file import rank_path
from tests.launched import wait_until


def test_a_process_that_waits_for_its_parent_is_gone():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    wait_until(lambda: gone(process.pid), "the process has ended")  # before its status is taken
    assert process.wait() == 0
    assert gone(process.pid)
    assert not gone(os.getpid())


def test_only_ranks_without_a_file_are_dead(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    for rank in (0, 1):
        began_path(tmp_path, rank).write_text(json.dumps({"pid": process.pid}))
    began_path(tmp_path, 2).write_text(json.dumps({"pid": os.getpid()}))
    rank_path(tmp_path, 0).write_text(json.dumps({"complete": True}))
    assert dead_ranks(tmp_path) == [1]
    assert not ended_early(tmp_path)
    assert "was killed or crashed" in why(tmp_path, 1)
    ended_path(tmp_path, 1).write_text(json.dumps({"steps": 3, "status": 5, "file": "a.py", "line": 7}))
    assert why(tmp_path, 1).startswith("called os._exit(5) at a.py:7 after 3 iterations")
    rank_path(tmp_path, 0).write_text(json.dumps({"complete": False}))
    assert ended_early(tmp_path)
