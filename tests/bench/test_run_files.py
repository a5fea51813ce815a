"""Folders of runs that end before their training."""

from pathlib import Path

import pytest

from dlrm_bench.bench.mlperf.log import MLPerfLog
from dlrm_bench.bench.records.record import create_run_folder, reserve_room
from dlrm_bench.bench.run_files import LOG_NAME, discard_folder


@pytest.mark.parametrize("changed", [False, True])
def test_a_log_that_somebody_has_changed_stays(tmp_path: Path, changed: bool) -> None:
    folder = create_run_folder(tmp_path, "x")
    reserve_room(folder, iterations=None, ranks=1)
    log = MLPerfLog(folder / LOG_NAME)
    log.init_start()
    log.close("aborted", 0.0)
    text = (folder / LOG_NAME).read_text() + "# by hand\n" * changed
    (folder / LOG_NAME).write_text(text)
    discard_folder(folder, MLPerfLog(None))  # of another rank
    assert len(list(folder.iterdir())) == 2
    discard_folder(folder, log)
    assert folder.exists() == changed
    assert [file.read_text() for file in folder.glob("*")] == [text] * changed
