"""Runs whose ranks are killed and started again: training goes on from memory, with the losses of one left alone."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench.checkpoints import checkpoints, restarts, snapshots
from dlrm_bench.bench.checkpoints.restarts import check_restarts, restarted
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.record import ITERATIONS_NPZ, Record, read_record
from dlrm_bench.bench.run_files import LOG_NAME
from dlrm_bench.dlrm.tables.tiers import tiered_rows
from tests.bench.checkpoints.test_snapshots import in_memory
from tests.launched import PATIENCE_S, Ended, end, forked_launch, ranks_naming, torchrun, wait_until

FLAGS = ["--preset=smoke", "--data.source=random", "--target-auc=None", "--local-batch-size=32"]


def flags(folder: Path, run_id: str, iterations: int) -> list[str]:
    place = [f"--results-dir={folder}", f"--run-id={run_id}", "--warmup-iterations=5", "--loss-interval=5"]
    return [*FLAGS, *place, f"--iterations={iterations}"]


def snapshot_flags(memory: Path, every: int) -> list[str]:
    return [f"--snapshot.path={memory}", f"--snapshot.every={every}", "--resume=auto"]


def losses(folder: Path) -> np.ndarray:
    """Those of a whole training, of which a run did the last part."""
    record: Record = read_record(folder)
    with np.load(folder / ITERATIONS_NPZ) as arrays:
        before = arrays["loss_before"] if "loss_before" in arrays else np.zeros(0, np.float32)
    return np.concatenate([before, record.losses])


class AllKilled:
    """Ends every rank, without a word, once it has taken a number of snapshots."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> None:
        take = snapshots.Snapshots.take

        def take_and_die(this: snapshots.Snapshots, *given: Any) -> Any:
            taken = take(this, *given)
            self.number -= 1
            if self.number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return taken

        snapshots.Snapshots.take = take_and_die  # type: ignore[method-assign]


@pytest.mark.slow
def test_all_ranks_killed_and_the_same_command_again(tmp_path, memory):
    assert forked_launch(2, tmp_path, flags(tmp_path, "whole", 12)).statuses == [0, 0]
    takes = snapshot_flags(memory, 3)
    killed = forked_launch(2, tmp_path, [*flags(tmp_path, "killed", 12), *takes], before=AllKilled(2))
    assert killed.statuses == [-9, -9], killed
    assert "--resume auto: there is no snapshot or checkpoint yet: training begins" in killed.outputs[0]
    ended = forked_launch(2, tmp_path, [*flags(tmp_path, "again", 12), *takes])
    assert ended.statuses == [0, 0], ended
    found = f"--resume auto: continues from the snapshot in memory {memory}/samples-"
    assert found in ended.outputs[0]
    assert found not in ended.outputs[1]
    assert f"# {found}" in (tmp_path / "again" / LOG_NAME).read_text()
    assert np.array_equal(losses(tmp_path / "again"), losses(tmp_path / "whole"))
    assert len(read_record(tmp_path / "again").losses) == 6
    assert not memory.exists()


@pytest.mark.slow
def test_torchrun_restarts_the_ranks_after_one_was_killed(tmp_path, memory):
    """Its store has the addresses of the ended ranks, which would be waited for."""
    iterations = 250
    assert forked_launch(2, tmp_path, flags(tmp_path, "whole", iterations)).statuses == [0, 0]
    process = torchrun(
        tmp_path / "output.txt",
        [*flags(tmp_path, "x", iterations), *snapshot_flags(memory, 10)],
        ("--standalone", "--nproc_per_node=2", "--max-restarts=1"),
    )
    try:
        wait_until(lambda: len(list(memory.glob("samples-*"))) == 2, "two snapshots are taken")
        (rank,) = [pid for pid in ranks_naming(str(memory)) if "RANK=1" in environment(pid)]
        os.kill(rank, signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "output.txt").read_text()
    finally:
        end([process], str(memory))
    output = (tmp_path / "output.txt").read_text()
    assert f"--resume auto: continues from the snapshot in memory {memory}/samples-" in output
    assert "resumed from x, after iteration" in output
    assert np.array_equal(losses(tmp_path / "x-restart-1"), losses(tmp_path / "whole"))
    assert not memory.exists()


class FullMemory:
    """Gives the state of a run, which a snapshot has beside its pieces, too little room."""

    def __call__(self) -> None:
        open_slot = snapshots.open_slot
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        def without_room(*given: Any) -> Path:
            resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
            try:
                return open_slot(*given)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        snapshots.open_slot = without_room


@pytest.mark.parametrize("disk", [False, True])
def test_memory_that_others_have_filled_is_named(tmp_path, memory, disk):
    saves = [f"--checkpoint.path={tmp_path / 'saved'}"] if disk else []
    given = [*flags(tmp_path, "x", 6), *snapshot_flags(memory, 6), *saves]
    ended = forked_launch(2, tmp_path, given, before=FullMemory())
    assert ended.statuses == [2, 2], ended
    for output in ended.outputs:
        assert f"error: [Errno 27] File too large: '{memory}/slot-0/state.json'\n" in output


TIERED = ["--pipeline=static", "--presort-ids", "--peer-memory", "--precision=fp32"]


class KilledBetweenTiers:
    """Ends one rank, without a word, before it exchanges rows with host memory, in the second iteration after a number
    of saves."""

    def __init__(self, rank: int, saves: int) -> None:
        self.rank, self.saves, self.exchanges = str(rank), saves, 0

    def __call__(self) -> None:
        save, exchange = checkpoints.Checkpoints.save, tiered_rows.exchange_rows

        def counted(this: checkpoints.Checkpoints, *given: Any) -> None:
            save(this, *given)
            self.saves -= 1

        def exchange_or_die(*given: Any) -> None:
            self.exchanges += self.saves == 0
            if self.exchanges == 4 and os.environ["RANK"] == self.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            exchange(*given)

        checkpoints.Checkpoints.save = counted  # type: ignore[method-assign]
        tiered_rows.exchange_rows = exchange_or_die


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["checkpoint", "snapshot"])
def test_tables_on_two_tiers_go_on_in_another_share_after_a_kill(tmp_path, memory, saved):
    """Losses are those of a run with all rows on the device. A checkpoint that was still being written is left out."""
    place = memory if saved == "snapshot" else tmp_path / "saved"
    saves = [f"--{saved}.path={place}", f"--{saved}.every=3", "--resume=auto"]

    def launch(run_id: str, *more: str, before: Callable[[], None] | None = None) -> Ended:
        return forked_launch(2, tmp_path / f"of-{run_id}", [*flags(tmp_path, run_id, 12), *TIERED, *more], before)

    whole = launch("whole")
    assert whole.statuses == [0, 0], whole
    killed = launch("killed", *saves, "--table-memory=0.3", before=KilledBetweenTiers(1, 2))
    assert killed.statuses == [1, -9], killed
    assert "rank 0: another rank is gone without giving a reason" in killed.outputs[0]
    assert "Traceback" not in killed.outputs[0]
    ended = launch("again", *saves, "--table-memory=0.8")
    assert ended.statuses == [0, 0], ended
    assert "table tiers" in ended.outputs[0]
    assert np.array_equal(losses(tmp_path / "again"), losses(tmp_path / "whole"))
    assert len(read_record(tmp_path / "again").losses) in ((6,) if saved == "snapshot" else (6, 9))


MADE = ["--pipeline=static", "--presort-ids", "--dynamic-rows=4500", "--evict-rows"]


@pytest.mark.slow
def test_rows_that_are_made_when_they_are_named_go_on_from_memory_after_a_kill(tmp_path, memory):
    """While rows lose their places."""

    def launch(run_id: str, *more: str, before: Callable[[], None] | None = None) -> Ended:
        return forked_launch(2, tmp_path / f"of-{run_id}", [*flags(tmp_path, run_id, 12), *MADE, *more], before)

    whole = launch("whole")
    assert whole.statuses == [0, 0], whole
    assert "lost their places" in whole.outputs[0]
    takes = snapshot_flags(memory, 3)
    killed = launch("killed", *takes, before=AllKilled(2))
    assert killed.statuses == [-9, -9], killed
    saved = tmp_path / "saved"
    ended = launch("again", *takes, f"--checkpoint.path={saved}")
    assert ended.statuses == [0, 0], ended
    assert np.array_equal(losses(tmp_path / "again"), losses(tmp_path / "whole"))
    assert len(read_record(tmp_path / "again").losses) == 6
    assert not memory.exists()
    more = launch("more", "--iterations=14", f"--resume={saved}")
    assert more.statuses == [0, 0], more
    assert np.array_equal(losses(tmp_path / "more")[:12], losses(tmp_path / "whole"))


def environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def test_restarts_without_resume_are_refused_before_the_training(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    check_restarts(preset("smoke"))
    check_restarts(in_memory(tmp_path, None))
    with pytest.raises(ValueError, match=r"--max-restarts 3: .* with --resume auto: add it"):
        check_restarts(in_memory(tmp_path, None, resume=None))


def test_a_restarted_run_has_a_folder_of_its_own(monkeypatch):
    assert restarted("x") == "x"
    monkeypatch.setattr(restarts, "RESTARTS", "2")
    assert restarted("x") == "x-restart-2"
    assert restarted(None) is None
