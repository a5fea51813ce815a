"""A folder has one writer."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.dlrm.data.lock import locked


def test_the_lock_of_another_process_ends_with_it(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from dlrm_bench.dlrm.data.lock import locked
with locked(Path({str(tmp_path / "lock")!r})):
    print("held", flush=True)
    input()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ValueError, match=f"{tmp_path}: another process is generating here"),
            locked(tmp_path / "lock"),
        ):
            pass
        other.kill()
        other.wait()
        with locked(tmp_path / "lock"):
            pass


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "lock"):
        pass
    assert f"{tmp_path}: its file system cannot lock a file (Function not implemented): start no other" in caplog.text
