"""Checkpoints that are written while training goes on, killed, out of room, and read by other layouts."""

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.bench import checkpoints
from dlrm_bench.bench.checkpoints import STATE_JSON, Checkpoints, RunState, find_checkpoint
from dlrm_bench.bench.config import CheckpointConfig, RunConfig, as_json
from dlrm_bench.bench.instruments.schedule import plan_schedule
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.state import StateBlocks, TensorBlock
from tests.launched import Ended, fork, wait

ROWS, COLUMNS = 50, 8
GBS = 16
TABLE = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


class Held:
    """The state of a pipeline: a table in columns, one share a rank, and a dense tensor that every rank holds."""

    def __init__(self, ranks: Ranks, value: float) -> None:
        width = COLUMNS // ranks.world_size
        self.columns = slice(ranks.rank * width, (ranks.rank + 1) * width)
        self.shares = [TABLE[:, self.columns].clone() + value for _ in range(2)]
        self.dense = torch.full((3,), value)
        self._ranks, self._width = ranks, width

    def state_blocks(self) -> StateBlocks:
        def blocks(mine: Tensor) -> list[TensorBlock]:
            shape, rank = (ROWS, self._width), self._ranks.rank
            return [
                TensorBlock(r, (0, r * self._width), shape, mine if r == rank else None)
                for r in range(self._ranks.world_size)
            ]

        weights = {"table": blocks(self.shares[0]), "dense": [TensorBlock.whole(self.dense)]}
        return StateBlocks(weights, {"table": blocks(self.shares[1])})

    def take_blocks(self, blocks: StateBlocks) -> None:
        self.dense = self.dense.clone()

    def train(self) -> None:
        for share in (*self.shares, self.dense):
            share.add_(1000)

    def is_of(self, value: float) -> bool:
        return all(torch.equal(share, TABLE[:, self.columns] + value) for share in self.shares) and bool(
            (self.dense == value).all()
        )


def config(folder: Path, resume: Path | None = None, world_size: int = 2, **changes: Any) -> RunConfig:
    small = replace(preset("launch-bound"), iterations=100, precision="fp32", local_batch_size=GBS // world_size)
    return replace(small, checkpoint=CheckpointConfig(every=1, path=folder), resume=resume, **changes)


def state(of: RunConfig, iteration: int) -> RunState:
    losses = [1 / (i + 3) for i in range(iteration)]
    return RunState(
        iteration=iteration,
        samples=iteration * GBS,
        losses=losses,
        auc=0.5,
        mlperf_log="",
        run_id="first",
        config=as_json(of),
    )


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_twice(folder: Path, trouble: str | None) -> int:
    """Iteration 1 is saved well, `trouble` strikes the second time."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    held = Held(ranks, 1)
    saving = Checkpoints(config(folder), ranks, held, None)  # type: ignore[arg-type]
    saving.save(state(config(folder), 1))
    held.train()  # in the meantime
    saving.wait()
    if trouble == "killed while writing":
        checkpoints.write_state = kill  # type: ignore[assignment]
    elif trouble == "killed before the new name":
        checkpoints._sync = kill  # type: ignore[assignment]
    elif trouble == "killed before the old one is deleted":
        checkpoints.shutil.rmtree = kill  # type: ignore[assignment]
    elif trouble == "disk full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if ranks.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    saving.save(state(config(folder), 2))
    held.train()
    try:
        saving.wait()
    except ValueError as error:
        print(error)
        return 2
    return 0


def load(folder: Path) -> int:
    """Ends with the iteration that was found; 100 if the state is not of it."""
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    wanted = config(folder, folder, ranks.world_size)
    resumed = find_checkpoint(wanted, plan_schedule(wanted, None, ranks.world_size))
    assert resumed is not None
    held = Held(ranks, -1)
    Checkpoints(wanted, ranks, held, resumed)  # type: ignore[arg-type]
    assert resumed.state.losses == state(wanted, resumed.first).losses
    assert not list(folder.glob("*.partial"))
    return resumed.first if held.is_of([1, 1001][resumed.first - 1]) else 100


def run(world_size: int, folder: Path, function: Any, *args: Any) -> Ended:
    folder.mkdir(exist_ok=True)
    return wait(fork(world_size, folder, function, *args), folder)


@pytest.mark.parametrize(
    ("trouble", "kept"),
    [
        (None, 2),
        ("killed while writing", 1),
        ("killed before the new name", 1),
        ("killed before the old one is deleted", 2),
        ("disk full", 1),
    ],
)
def test_the_last_complete_checkpoint_survives(tmp_path, trouble, kept):
    saved = tmp_path / "saved"
    ended = run(2, tmp_path / "save", save_twice, saved, trouble)
    if trouble is None:
        assert ended.statuses == [0, 0], ended
        assert [folder.name for folder in saved.glob("iteration-*")] == ["iteration-00000002"]
    elif trouble == "disk full":
        assert ended.statuses == [2, 2], ended
        for output in ended.outputs:
            assert "the checkpoint of iteration 2 could not be written: rank 1: [Errno 27] File too large" in output
            assert f"the last complete one is {saved / 'iteration-00000001'}" in output
    else:
        assert ended.statuses[0] == -9
    world_size = 1 if trouble == "disk full" else 2  # another number of ranks can read it too
    assert run(world_size, tmp_path / "load", load, saved).statuses == [kept] * world_size


def test_what_cannot_be_resumed_is_refused(tmp_path):
    given = config(tmp_path)
    schedule = plan_schedule(given, None, 2)

    def saved(**changes: Any) -> Path:
        folder = tmp_path / "iteration-00000007"
        folder.mkdir(exist_ok=True)
        content = {name: getattr(state(given, 7), name) for name in RunState.__slots__}  # type: ignore[attr-defined]
        (folder / STATE_JSON).write_text(json.dumps(content | changes))
        return folder

    def found(**changes: Any) -> Any:
        return find_checkpoint(config(tmp_path, tmp_path, **changes), schedule)

    with pytest.raises(ValueError, match="there is no complete checkpoint"):
        found()
    folder = saved()
    assert found().first == 7
    assert found().folder == folder
    with pytest.raises(ValueError, match="it was trained with --seed 0, and this run has 5"):
        found(seed=5)
    with pytest.raises(
        ValueError, match=r"it was trained with --optimizer\.learning-rate 0\.004, and this run has 0\.1"
    ):
        found(optimizer=replace(given.optimizer, learning_rate=0.1))
    saved(samples=7 * GBS + 1)
    with pytest.raises(ValueError, match="no whole number of global batches of 16: choose another --local-batch-size"):
        found()
    saved(samples=100 * GBS)
    with pytest.raises(ValueError, match="it has trained all of the 100 iterations asked for"):
        found()
    saved(more=1)
    with pytest.raises(ValueError, match="is not of this version"):
        found()
    (folder / STATE_JSON).write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is corrupt at byte 0"):
        found()
