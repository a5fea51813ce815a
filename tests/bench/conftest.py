"""Fixtures of the tests of whole runs."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of a tmpfs, which is there no more after the test."""
    folder = Path(tempfile.mkdtemp(prefix="dlrm-bench-test-", dir="/dev/shm"))
    yield folder / "snapshots"
    shutil.rmtree(folder)
