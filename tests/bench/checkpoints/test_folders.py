"""Folders of checkpoints and their locks, while ranks of a run outlive one another."""

import os
from pathlib import Path
from typing import Any

from dlrm_bench.bench.checkpoints import checkpoints
from dlrm_bench.bench.checkpoints.checkpoints import Checkpoints
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.bench.checkpoints.test_checkpoints import Held, config, kill, run, save_at, state
from tests.launched import fork, wait, wait_until


def die_on_rank_0(folder: Path, end: Path) -> int:
    """Rank 0 is killed while both write a checkpoint, and rank 1 writes until there is a file `end`."""

    def write(*_: Any) -> None:
        if ranks.rank == 0:
            kill()
        wait_until(end.exists, "the end of rank 1")
        os._exit(0)

    ranks = Ranks.from_environment()
    ranks.init_process_group()
    saving = Checkpoints(config(folder), ranks, Held(ranks, 1), None)  # type: ignore[arg-type]
    checkpoints.write_state = write  # type: ignore[assignment]
    saving.save(1, state(config(folder), 1))
    saving.wait()
    return 1


def test_a_folder_is_that_of_a_run_until_its_last_rank_has_ended(tmp_path):
    saved, first, end = tmp_path / "saved", tmp_path / "first", tmp_path / "end"
    first.mkdir()
    ranks = fork(2, first, die_on_rank_0, saved, end)
    wait_until(lambda: ranks[0].exitcode is not None, "the end of rank 0")
    ended = run(2, tmp_path / "1", save_at, config(saved), 1)
    end.touch()
    assert wait(ranks, first).statuses == [-9, 0]
    assert ended.statuses == [2, 2], ended
    for output in ended.outputs:
        assert f"--checkpoint.path {saved}: another run saves there, or a rank of it has not ended: " in output
    assert run(2, tmp_path / "2", save_at, config(saved), 1).statuses == [0, 0]
