"""dlrm-bench checkpoint verify: compares all bytes of a checkpoint with the checksums of what was written."""

from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_bench.bench.checkpoints.saved_state import checkpoint_in, read_run_state
from dlrm_bench.dlrm.data.steps import step
from dlrm_bench.dlrm.runtime.command_line import EXIT_BAD_INPUT
from dlrm_bench.pipeline.checkpoint_index import damage, read_index

if TYPE_CHECKING:
    from rich.console import Console


def verify_checkpoint(console: "Console", path: Path) -> int:
    """Prints a line for each defect, or the checkpoint's content; returns the exit status, 2 or 0.

    path: a checkpoint, or a folder, whose newest complete checkpoint is read. ValueError if there is none.
    """
    folder = checkpoint_in(path)
    findings: list[str] = []
    held, well = "", "all well"
    try:
        state = read_run_state(folder)
        held = f"{state['samples']:,} samples trained by {state['run_id']}, "
    except ValueError as error:
        findings.append(str(error))
    try:
        index = read_index(folder)
        held += f"{len(index.tensors)} tensors, {index.nbytes / 1e9:.3g} GB"
        if index.unchecked:
            well = "all there; a snapshot in memory has no checksums"
        with step("verify", index.nbytes, "MB") as advance:
            findings += [f"{folder / line}" for line in damage(folder, index, advance)]
    except ValueError as error:
        findings.append(str(error))
    for line in findings or [f"{folder}: {held}, {well}"]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return EXIT_BAD_INPUT if findings else 0
