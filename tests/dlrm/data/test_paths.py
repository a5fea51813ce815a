"""Messages about paths that lead to no file."""

import os
from pathlib import Path

import pytest

from dlrm_bench.dlrm.data.paths import why_not


def test_a_path_that_leads_nowhere_says_why(tmp_path: Path) -> None:
    for name, target in (("a", "b"), ("b", "a"), ("dangling", "gone")):
        (tmp_path / name).symlink_to(target)
    assert why_not(tmp_path / "absent") == "does not exist"
    assert why_not(tmp_path / "a") == "cannot be reached (Too many levels of symbolic links)"
    assert why_not(tmp_path / "dangling") == "is a link to gone, which does not exist"
    assert why_not(tmp_path) == "is a directory"
    os.mkfifo(tmp_path / "pipe")
    assert why_not(tmp_path / "pipe") == "is neither a file nor a directory"
    (tmp_path / "file").touch()
    assert why_not(tmp_path / "file") == "is not a directory"
    assert why_not(tmp_path / "file" / "within") == "cannot be reached (Not a directory)"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(0)
    assert why_not(tmp_path / "closed" / "file") == "cannot be reached (Permission denied)"
