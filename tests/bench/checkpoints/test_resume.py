"""Runs that resume a checkpoint; the remains of a run that diverges, and of one whose folder is gone."""

import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench import run_files
from dlrm_bench.bench.checkpoints import checkpoints
from dlrm_bench.bench.checkpoints.saved_state import STATE_JSON, checkpoint_name
from dlrm_bench.bench.mlperf.log import check_compliance
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.record import ITERATIONS_NPZ, Record, read_record
from dlrm_bench.bench.run_files import LOG_NAME
from dlrm_bench.dlrm.dcnv2.data.planted import PlantedConfig, generate
from tests.bench.test_run import GBS, ITERATIONS, LOCAL_BATCH, SAMPLES_PER_DAY, assert_aborted, launch, read_events
from tests.launched import Ended, fork, forked_launch, launch_main, wait, wait_until_training


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _, _ = generate(PlantedConfig(path=tmp_path_factory.mktemp("data"), samples_per_day=SAMPLES_PER_DAY))
    return path


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A run to its target that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert launch(data, folder, "--target-auc", "0.6").statuses == [0, 0]
    return read_record(folder / "results" / "x")


@pytest.fixture(scope="module")
def interrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run like `whole` that ended long before its target."""
    folder = tmp_path_factory.mktemp("interrupted")
    saves = ["--checkpoint.path", str(folder / "saved"), "--checkpoint.every", "3"]
    ended = launch(data, folder, "--target-auc", "0.6", "--iterations", "4", *saves)
    assert ended.statuses == [3, 3], ended
    kept = read_record(folder / "results" / "x").run["checkpoints"]
    assert kept is not None
    assert [saved["iteration"] for saved in kept["saved"]] == [3]
    assert kept["resumed"] is None
    return folder / "saved"


def test_a_resumed_run_ends_as_if_nothing_had_happened(data, whole, interrupted, tmp_path):
    ended = launch(data, tmp_path, "--target-auc", "0.6", "--resume", str(interrupted))
    assert ended.statuses == [0, 0], ended
    record = read_record(tmp_path / "results" / "x")
    assert np.array_equal(record.losses, whole.losses[3:])
    assert record.run["training"]["auc"] == whole.run["training"]["auc"]
    assert record.run["training"]["epoch_num"] == whole.run["training"]["epoch_num"]
    with np.load(record.folder / ITERATIONS_NPZ) as arrays:
        assert np.array_equal(arrays["loss_before"], whole.losses[:3])
    log = record.folder / LOG_NAME
    verdict = check_compliance(log, "6.0.0")
    assert verdict.passed, verdict.output
    keys, whole_keys = ([e["key"] for e in read_events(of / LOG_NAME)] for of in (record.folder, whole.folder))
    assert keys == whole_keys


def test_another_pipeline_on_one_rank_goes_on(data, whole, interrupted, tmp_path):
    other = ["--pipeline", "static", "--local-batch-size", str(GBS), "--iterations", "6", "--target-auc", "None"]
    ended = launch(data, tmp_path, *other, "--resume", str(interrupted), ranks=1)
    assert ended.statuses == [0], ended
    np.testing.assert_allclose(read_record(tmp_path / "results" / "x").losses, whole.losses[3:6], rtol=1e-5)


def test_a_larger_batch_goes_on_where_the_samples_are(data, interrupted, tmp_path):
    """And so does the next run: three iterations and two of twice the size are seven of one."""
    saved = tmp_path / "saved"
    shutil.copytree(interrupted, saved)
    saves = ["--checkpoint.path", str(saved), "--resume", str(saved), "--target-auc", "None"]
    one = ["--local-batch-size", str(LOCAL_BATCH), "--checkpoint.every", "1"]
    two = ["--local-batch-size", str(2 * LOCAL_BATCH), "--checkpoint.every", "1"]
    assert launch(data, tmp_path / "1", *saves, *one, "--iterations", "4").statuses == [0, 0]
    assert launch(data, tmp_path / "2", *saves, *two, "--iterations", "3").statuses == [0, 0]
    assert [folder.name for folder in saved.glob("samples-*")] == [checkpoint_name(6 * GBS)]
    ended = launch(data, tmp_path / "3", *saves, *one, "--iterations", "7")
    assert ended.statuses == [0, 0], ended
    record = read_record(tmp_path / "3" / "results" / "x")
    assert len(record.losses) == 1
    with np.load(record.folder / ITERATIONS_NPZ) as arrays:
        assert arrays["samples_before"].tolist() == [GBS * samples for samples in (1, 2, 3, 4, 6)]
        assert arrays["loss_before"].shape == (5,)
    assert f"resumed from x, after iteration 6 ({6 * GBS:,} samples)" in ended.outputs[0]


def test_a_run_by_time_goes_on_for_its_time_again(data, interrupted, tmp_path):
    timed = ["--target-auc", "None", "--iterations", "None", "--min-time", "0.2", "--warmup-iterations", "6"]
    ended = launch(data, tmp_path, *timed, "--resume", str(interrupted))
    assert ended.statuses == [0, 0], ended
    record = read_record(tmp_path / "results" / "x")
    assert 6 < len(record.losses) <= ITERATIONS - 3
    assert len(record.losses) == ITERATIONS - 3 or record.iterations_ms[0, 6:].sum() >= 200


def damaged(saved: Path, folder: Path, what: str) -> Path:
    """A copy of a checkpoint with a flipped bit, with zeros for all that one rank wrote, or with another loss."""
    shutil.copytree(saved, folder)
    if what == "state":
        (state,) = folder.glob(f"*/{STATE_JSON}")
        state.write_text(state.read_text().replace('"losses": [0', '"losses": [1'))
        return folder
    for file in sorted(folder.glob("*/rank-1-*.bin"))[: 1 if what == "bit" else None]:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content if what == "bit" else bytes(len(content)))
    return folder


@pytest.mark.parametrize("what", ["bit", "zeros", "state"])
def test_a_damaged_checkpoint_is_refused_on_every_rank(data, interrupted, tmp_path, what):
    saved = damaged(interrupted, tmp_path / "saved", what)
    ended = launch(data, tmp_path, "--target-auc", "None", "--resume", str(saved))
    assert ended.statuses == [2, 2], ended
    for output in ended.outputs:
        what = r"(rank-1-\d\.bin, bytes \d+ to \d+, of .* are|state\.json is) damaged"
        assert re.search(rf"--resume: .* cannot be read: rank \d: {what}", output)
        assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize(("target", "every"), [("None", "None"), ("0.8", "None"), ("None", "1")])
def test_training_that_diverges(data, tmp_path, target, every):
    """With a checkpoint of the previous iteration, its weights are the ones to keep."""
    saved = tmp_path / "saved"
    bad = ["--optimizer.learning-rate", "1e30", "--target-auc", target, "--checkpoint.path", str(saved)]
    ended = launch(data, tmp_path, *bad, "--checkpoint.every", every)
    assert_aborted(tmp_path, ended)
    assert [folder.name for folder in saved.glob("samples-*")] == [checkpoint_name(GBS)]
    for output in ended.outputs:
        assert "the loss of iteration 2 is nan: the run stops, with the weights as iteration 1 left them" in output
        assert f"these weights in {saved}" in output
        assert "Traceback" not in output
    with np.load(tmp_path / "results" / "x" / ITERATIONS_NPZ) as kept:
        assert np.isfinite(kept["loss"][0])
        assert np.isnan(kept["loss"][1])
        assert kept["latency_ms"].shape[1] >= len(kept["loss"])


def test_a_record_whose_folder_is_gone_is_written_elsewhere(data, tmp_path):
    place = ["--results-dir", str(tmp_path / "results"), "--run-id", "x", "--data.path", str(data)]
    few = ["--target-auc", "None", "--iterations", "3", "--warmup-iterations", "1"]
    ended = forked_launch(2, tmp_path, [*place, *few], before=FolderGone(tmp_path))
    assert ended.statuses == [0, 0], ended
    (rescued,) = tmp_path.glob("dlrm-bench-*/x")
    assert f"No such file or directory: '{tmp_path / 'results' / 'x'}" in ended.outputs[0]
    assert f"the record is in {rescued} instead" in ended.outputs[0]
    assert "Traceback" not in ended.outputs[0]
    assert len(read_record(rescued).losses) == 3
    assert read_events(rescued / LOG_NAME)[-1]["key"] == "epoch_stop"


class FolderGone:
    """Deletes the results before the record is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        build = run_files.build_record
        tempfile.tempdir = str(self.folder)

        def build_record(**given: Any) -> Any:
            shutil.rmtree(self.folder / "results", ignore_errors=True)
            return build(**given)

        run_files.build_record = build_record


class Spoils:
    """Does something to the run's folder, on rank 0, while its log is open and before the record is written."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how

    def __call__(self) -> None:
        tempfile.tempdir = str(self.folder)
        build, spoil = run_files.build_record, getattr(self, self.how)

        def build_record(**given: Any) -> Any:
            if os.environ["RANK"] == "0":
                spoil(self.folder / "results" / "x")
            return build(**given)

        run_files.build_record = build_record

    def immutable(self, run: Path) -> None:
        subprocess.run(["chattr", "+i", run], check=True)

    def replaced(self, run: Path) -> None:
        run.rename(run.with_name("moved"))
        run.touch()

    def log_deleted(self, run: Path) -> None:
        (run / LOG_NAME).unlink()

    def log_changed(self, run: Path) -> None:
        (run / LOG_NAME).write_text("mine\n")


FEW = ["--target-auc", "None", "--iterations", "3", "--warmup-iterations", "1"]


def can_be_immutable(folder: Path) -> bool:
    """Whether this user and file system have immutable folders."""
    if shutil.which("chattr") is None:
        return False
    changes = (subprocess.run(["chattr", change, folder], capture_output=True) for change in ("+i", "-i"))
    return all(done.returncode == 0 for done in changes)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "says"), [("immutable", "Operation not permitted"), ("replaced", "Not a directory")])
def test_a_record_whose_folder_takes_no_files_is_written_elsewhere(data, tmp_path, how, says):
    if how == "immutable" and not can_be_immutable(tmp_path):
        pytest.skip("no immutable folders here")
    run = tmp_path / "results" / "x"
    place = ["--results-dir", str(tmp_path / "results"), "--run-id", "x", "--data.path", str(data)]
    try:
        ended = forked_launch(2, tmp_path, [*place, *FEW], before=Spoils(tmp_path, how))
    finally:
        if how == "immutable":
            subprocess.run(["chattr", "-i", run], check=True)
    assert ended.statuses == [0, 0], ended
    (rescued,) = tmp_path.glob("dlrm-bench-*/x")
    assert says in ended.outputs[0]
    assert f"the record is in {rescued} instead" in ended.outputs[0]
    assert len(read_record(rescued).losses) == 3
    assert read_events(rescued / LOG_NAME)[-1]["key"] == "epoch_stop"


@pytest.mark.parametrize(("how", "says"), [("log_deleted", "was deleted"), ("log_changed", "was changed")])
def test_a_log_that_is_deleted_or_changed_during_a_run_is_written_again(data, tmp_path, how, says):
    run = tmp_path / "results" / "x"
    place = ["--results-dir", str(tmp_path / "results"), "--run-id", "x", "--data.path", str(data)]
    ended = forked_launch(2, tmp_path, [*place, *FEW], before=Spoils(tmp_path, how))
    assert ended.statuses == [0, 0], ended
    assert len(read_record(run).losses) == 3
    log = run / LOG_NAME if how == "log_deleted" else next(tmp_path.glob("dlrm-bench-*/x")) / LOG_NAME
    assert f"warning: {run / LOG_NAME} {says} during the run: the run's log is in {log}" in ended.outputs[0]
    assert [read_events(log)[i]["key"] for i in (0, -1)] == ["cache_clear", "epoch_stop"]
    assert how == "log_deleted" or (run / LOG_NAME).read_text() == "mine\n"


class FullDisk:
    """Lets the second save fail as on a disk that is full, whose error names no file."""

    def __call__(self) -> None:
        begin, saves = checkpoints.begin_folder, itertools.count(1)

        def full(*given: Any) -> None:
            if next(saves) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            begin(*given)

        checkpoints.begin_folder = full


def test_a_full_disk_for_checkpoints_is_named_and_the_timings_are_kept(data, tmp_path):
    saved = tmp_path / "saved"
    flags = ["--results-dir", str(tmp_path / "results"), "--run-id", "x", "--data.path", str(data), "--target-auc=None"]
    saves = ["--checkpoint.path", str(saved), "--checkpoint.every", "3", "--loss-interval", "2"]
    ended = forked_launch(2, tmp_path, [*flags, *saves, "--iterations=12", "--warmup-iterations=1"], before=FullDisk())
    assert_aborted(tmp_path, ended)
    assert f"--checkpoint.path {saved}: [Errno 28] No space left on device" in "".join(ended.outputs)
    figures = tmp_path / "results" / "x" / ITERATIONS_NPZ
    assert f"rank 0: its latencies so far, and the losses that were read, are in {figures}" in ended.outputs[0]
    with np.load(figures) as kept:
        assert kept["latency_ms"].shape[0] == 1
        assert kept["latency_ms"].shape[1] >= len(kept["loss"]) >= 6
        assert np.isfinite(kept["loss"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("told", [0, 1])
def test_a_run_that_a_signal_ends_keeps_its_timings(tmp_path, number, told):
    """Whichever rank gets it; as much as rank 0 knows without any other."""
    flags = ["--preset=smoke", "--data.source=random", "--target-auc=None", "--local-batch-size=64", "--run-id=x"]
    flags += ["--iterations=1000000", "--loss-interval=5", f"--results-dir={tmp_path}"]
    processes = fork(2, tmp_path, launch_main, flags)
    wait_until_training(tmp_path / "x" / LOG_NAME, lambda: [process.pid for process in processes])
    os.kill(processes[told].pid, number)
    ended = wait(processes, tmp_path)
    assert ended.statuses[told] == 128 + number, ended
    figures = tmp_path / "x" / ITERATIONS_NPZ
    assert f"are in {figures}" in ended.outputs[0], ended
    with np.load(figures) as kept:
        assert kept["latency_ms"].shape[0] == 1
        assert kept["latency_ms"].shape[1] >= len(kept["loss"]) >= 5
        assert (kept["latency_ms"] > 0).all()
    assert sorted(path.name for path in figures.parent.iterdir()) == [ITERATIONS_NPZ, LOG_NAME]
    assert read_events(figures.parent / LOG_NAME)[-1]["key"] == "epoch_stop"


class KilledInASave:
    """Ends this rank without a word in the middle of its second save."""

    def __init__(self, rank: int) -> None:
        self.rank, self.saves = rank, 0

    def __call__(self) -> None:
        write_state = checkpoints.write_state

        def write(folder: Path, pieces: Any, rank: int, group: Any, on_piece: Any, nice: int) -> None:
            self.saves += 1
            pieces = itertools.count(1)

            def count() -> None:
                on_piece()
                if next(pieces) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            counted = count if (rank, self.saves) == (self.rank, 2) else on_piece
            write_state(folder, pieces, rank, group, counted, nice)

        checkpoints.write_state = write


class SlowDisk:
    """Lets each piece of this rank's files take a number of seconds."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds

    def __call__(self) -> None:
        fdatasync = os.fdatasync

        def sync(descriptor: int) -> None:
            if os.environ["RANK"] == str(self.rank):
                time.sleep(self.seconds)
            fdatasync(descriptor)

        os.fdatasync = sync


SAVES_AT_ITS_END = ["--target-auc", "None", "--iterations", "4", "--checkpoint.every", "4", "--stall-timeout", "6"]


def launch_saving(data: Path, folder: Path, disk: SlowDisk) -> Ended:
    place = ["--results-dir", str(folder / "results"), "--run-id", "x", "--data.path", str(data)]
    flags = [*place, *SAVES_AT_ITS_END, "--warmup-iterations", "1", "--checkpoint.path", str(folder / "saved")]
    return forked_launch(2, folder, flags, before=disk)


@pytest.mark.slow
def test_a_disk_that_does_not_answer_one_rank_is_a_stall_of_all(data, tmp_path):
    """Ranks that waited for the disk would be killed."""
    ended = launch_saving(data, tmp_path, SlowDisk(1, 1000))
    assert ended.statuses == [1, 1], ended
    stalled = "the training has stalled for 6 s (--stall-timeout): rank 1 saves a checkpoint, after iteration 4"
    assert any(stalled in output for output in ended.outputs), ended
    assert not list((tmp_path / "saved").glob("samples-*[0-9]"))


@pytest.mark.slow
def test_a_slow_disk_of_one_rank_is_no_stall(data, tmp_path):
    """Rank 0 waits for longer than --stall-timeout, and sees that rank 1 goes on, with three pieces."""
    ended = launch_saving(data, tmp_path, SlowDisk(1, 2.5))
    assert ended.statuses == [0, 0], ended
    kept = read_record(tmp_path / "results" / "x").run["checkpoints"]
    assert kept is not None
    assert kept["saved"][0]["write_s"] > 6


@pytest.mark.multi_gpu
def test_a_run_on_gpus_goes_on_after_a_kill_in_a_save(tmp_path):
    flags = ["--preset", "launch-bound", "--model.table-scale", "0.01", "--precision", "bf16", "--pipeline", "static"]
    flags += ["--cuda-graph", "iteration", "--overlap", "--presort-ids", "--peer-memory", "--stall-timeout", "5"]
    flags += ["--results-dir", str(tmp_path), "--iterations", "90", "--warmup-iterations", "10"]
    saved = tmp_path / "saved"
    saves = ["--checkpoint.path", str(saved), "--checkpoint.every", "30"]
    assert forked_launch(2, tmp_path, [*flags, "--run-id", "whole"], gpu=True).statuses == [0, 0]
    killed = forked_launch(2, tmp_path, [*flags, *saves, "--run-id", "killed"], before=KilledInASave(1), gpu=True)
    assert killed.statuses[1] == -signal.SIGKILL, killed
    assert killed.statuses[0] not in (0, None, -signal.SIGKILL), killed
    gbs = 2 * preset("launch-bound").local_batch_size
    assert sorted(folder.name for folder in saved.glob("samples-*")) == [
        checkpoint_name(30 * gbs),
        f"{checkpoint_name(60 * gbs)}.partial",
    ]
    ended = forked_launch(2, tmp_path, [*flags, *saves, "--resume", str(saved), "--run-id", "resumed"], gpu=True)
    assert ended.statuses == [0, 0], ended
    resumed, whole = read_record(tmp_path / "resumed").losses, read_record(tmp_path / "whole").losses
    assert np.array_equal(resumed, whole[30:])
    assert [folder.name for folder in saved.glob("samples-*")] == [checkpoint_name(90 * gbs)]
