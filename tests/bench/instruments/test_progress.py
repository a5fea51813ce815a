"""Progress bars: their content and times, and that no iteration is timed while they are drawn."""

import io
import math
import os
import pty
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.checkpoints.checkpoints import Checkpoints
from dlrm_bench.bench.instruments.clock import IterationClock
from dlrm_bench.bench.instruments.losses import LossHistory
from dlrm_bench.bench.instruments.progress import StillBar
from dlrm_bench.bench.instruments.schedule import Schedule
from dlrm_bench.bench.mlperf.log import MLPerfLog
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.run import Run
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.bench.profile.test_profiled_run import Nothing

CPU = torch.device("cpu")


class Terminal(io.StringIO):
    """Records at every write the activity of the run."""

    clock: IterationClock

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[int, bool]] = []
        """(iterations so far, whether the clock ran)"""

    def write(self, text: str) -> int:
        self.writes.append((self.clock.iterations, bool(self.clock._marks)))
        return super().write(text)


class Trained(Run):
    """A run whose evaluations are worth nothing, and which notes when they are made."""

    def evaluate(self, epoch_num: float) -> float:
        assert isinstance(self.bar._console.file, Terminal)
        EVALUATED.append(len(self.bar._console.file.writes))
        return 0.5


EVALUATED: list[int] = []


def trained(terminal: Terminal, *, shown: bool = True) -> Run:
    """30 iterations, evaluated after every tenth."""
    terminal.clock = IterationClock(CPU)
    config = replace(preset("smoke"), loss_interval=1000)
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=CPU)
    run = Trained(
        config=config,
        ranks=ranks,
        dataset=Nothing(),  # type: ignore[arg-type]
        schedule=Schedule(global_batch_size=1, iterations=30, evaluate_every=10, iterations_per_epoch=math.inf),
        pipeline=Nothing(),  # type: ignore[arg-type]
        log=MLPerfLog(None),
        clock=terminal.clock,
        losses=LossHistory(CPU, 1000),
        bar=StillBar(30, "starts", Console(file=terminal, force_terminal=True, width=100), shown),
        folder=Path("nothing is written there"),
        checkpoints=Checkpoints(config, ranks, Nothing(), None),  # type: ignore[arg-type]
    )
    run.losses.finish = lambda: []  # type: ignore[method-assign]  # no process group here
    EVALUATED.clear()
    with run.bar:
        run.train()
    return run


def test_no_iteration_draws() -> None:
    terminal = Terminal()
    threads = threading.active_count()
    trained(terminal)
    assert threading.active_count() == threads
    assert not any(timed for _, timed in terminal.writes)
    assert {iterations for iterations, _ in terminal.writes} == {0, 10, 20, 30}
    for text in ("starts", "training, AUC 0.50000", "10/30", "30/30"):
        assert text in terminal.getvalue()


def test_between_an_evaluation_and_the_next_iteration_nothing_is_drawn() -> None:
    """Other ranks would start theirs and wait in it for the one that draws."""
    terminal = Terminal()
    trained(terminal)
    for place, iterations in zip(EVALUATED, (10, 20, 30), strict=True):
        assert terminal.writes[place - 1][0] == iterations  # drawn before the evaluation
        assert place == len(terminal.writes) or terminal.writes[place][0] > iterations or iterations == 30


def test_other_ranks_draw_nothing() -> None:
    terminal = Terminal()
    trained(terminal, shown=False)
    assert terminal.writes == []


@pytest.mark.parametrize("interactive", [True, False])
def test_only_a_terminal_sees_it(interactive: bool) -> None:
    """Whatever FORCE_COLOR says, which CI services set; a log stays quiet."""
    program = """
from dlrm_bench.bench.instruments.progress import StillBar, stderr_console
with StillBar(2, "runs", stderr_console()) as bar:
    bar.show(1, "first")
"""
    ours, theirs = pty.openpty() if interactive else os.pipe()
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=theirs, check=True, env=environment)
    os.close(theirs)
    try:
        output = os.read(ours, 10000).decode()
    except OSError:  # a terminal that nothing was written to
        output = ""
    os.close(ours)
    assert ("1/2" in output) == interactive
    assert interactive or output == ""
    if interactive:
        assert output.rindex("\x1b[?25h") > output.index("\x1b[?25l")  # a killed run leaves the cursor shown
        assert output.index("\x1b[?25h") < output.index("1/2")
