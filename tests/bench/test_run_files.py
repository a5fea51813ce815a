"""Folders of runs that end before their training, and records that are being written as a signal comes."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench import run_files
from dlrm_bench.bench.mlperf.log import MLPerfLog
from dlrm_bench.bench.records import record
from dlrm_bench.bench.records.record import ITERATIONS_NPZ, create_run_folder, read_record, reserve_room, write_record
from dlrm_bench.bench.run_files import LOG_NAME, discard_folder, keep_own_figures
from tests.bench.made_records import write


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


def trained_run(folder: Path) -> Any:
    """Returns a run of two ranks at its end, as far as its files take notice of it."""
    folder.mkdir()
    log = SimpleNamespace(text="", failure=None)
    (folder / LOG_NAME).touch()
    return SimpleNamespace(
        folder=folder,
        place=None,
        log=log,
        ranks=SimpleNamespace(rank=0),
        clock=SimpleNamespace(so_far_ms=lambda: np.ones(60, np.float32)),
        losses=SimpleNamespace(known=[0.5]),
        losses_before=[],
    )


def test_a_signal_while_the_record_is_written_leaves_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = trained_run(tmp_path / "x")
    begun, kept = threading.Event(), threading.Event()

    def slowly(*given: Any) -> None:
        write_iterations(*given)
        begun.set()
        kept.wait(0.5)

    def keep() -> None:
        assert begun.wait(60)
        keep_own_figures(this)
        kept.set()

    made = read_record(write(tmp_path / "made" / "x", np.arange(1, 61)))
    write_iterations = record.write_iterations
    monkeypatch.setattr(record, "write_iterations", slowly)
    signalled = threading.Thread(target=keep)
    signalled.start()
    run_files._write_here(this, lambda folder: write_record(folder, made.run, made.iterations_ms, made.losses))
    signalled.join()
    np.testing.assert_array_equal(read_record(this.folder).iterations_ms, made.iterations_ms)


def test_a_record_on_a_disk_that_does_not_answer_is_left_to_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_files._TURN_S < run_files._PATIENCE_S
    monkeypatch.setattr(run_files, "_TURN_S", 0.1)
    this = trained_run(tmp_path / "x")
    with run_files._WRITING:
        keep_own_figures(this)
    assert f"the files of {this.folder} are still being written" in capsys.readouterr().err
    assert not (this.folder / ITERATIONS_NPZ).exists()
    keep_own_figures(this)
    assert (this.folder / ITERATIONS_NPZ).is_file()
