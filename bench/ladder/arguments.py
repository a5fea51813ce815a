"""The flags of dlrm-bench ladder, separate from the modules that it imports when it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True, slots=True, frozen=True)
class LadderCommand:
    """Runs the rungs of a ladder in rounds, in balanced order (A B C, C B A, ...), each run in fresh processes; prints
    and writes the result.

    Flags from --preset on are flags of launch/dlrm.py and apply to all rungs.
    """

    rungs: str = "stock"
    """Name of a ladder of the preset's benchmark. Every benchmark has stock (in each precision), full (every
    optimisation), ends (first and last rung of full) and same (one rung twice: A/A). Some benchmarks have more; the
    error for an unknown name lists the ladders of the preset's benchmark: main (full with fewer rungs), baselines
    (the references, stock in its variants, and the last rung), reference (MLPerf's reference tuned on this GPU, stock
    and the last rung), static (full's first two rungs, fused kernels, the static pipeline), static-ends (stock, fused
    kernels and the last rung of static), recompute (the last rung with and without --model.recompute-layers),
    dynamic-rows (the last rung without and with --dynamic-rows, and with --model.raw-ids if the model has the flag),
    five-stage (each rung adds one switch), five-stage-trim-first (the same switches in another order), drop-in (stock,
    the last rung of five-stage, and one graph for the whole iteration, by collectives and by --peer-memory), exchange
    (that graph alone, both ways), tiers (half of the rows in host memory, by TorchRec and by --table-memory, and none),
    cached-tables (rows in host memory behind TorchRec's caches, fetched a batch ahead by its own pipeline and by
    five-stage), fp8 (the last rung without and with --fp8; for some benchmarks also the first), reading (the last rung
    on random batches and on the day files of --data.path), same-pipelines (one rung of each pipeline twice) and cpu
    (runs without a GPU)."""
    rounds: int | Literal["auto"] = 5
    """Number of runs of each rung; one round proves nothing. auto: until a difference of --detect can be found."""
    detect: str = "2%"
    """Smallest difference that --rounds auto must be able to find, with a probability of 80 %."""
    max_rounds: int = 40
    """Maximum number of rounds for --rounds auto."""
    max_minutes: float | None = None
    """End with the last round that is expected to end within this number of minutes after the start of this command, or
    of a command that resumes it; the first round has no limit."""
    host: bool = False
    """Profile each rung once, after all rounds: CPU time, launches, syncs, copies, GPU idle fraction."""
    nproc: int | None = None
    """Number of processes of a run; by default one for each GPU, or two without a GPU."""
    launch: str | None = None
    """Command that starts each run instead of local ranks; the flags of launch/dlrm.py follow it. In a Slurm
    allocation: launch/slurm/train.sbatch."""
    seed: int = 0
    """Seed of the order within a round."""
    results_dir: Path = Path("results")
    """Folder in which the ladder's folder is created."""
    resume: Path | None = None
    """Folder of an interrupted ladder, which continues with its own plan; excludes all other flags. After the last
    round it makes the missing profiled runs of --host alone."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Runs the ladder; returns the exit status."""
        from dlrm_bench.bench.ladder.ladder_command import ladder_command

        return ladder_command(console, forwarded, self)

    def given(self) -> list[str]:
        """Returns the names of the flags that are not at their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]
