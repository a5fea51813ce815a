"""Prints the results of a ladder and their limits in plain words: python -m dlrm_bench.bench.ladder.verdict [FOLDER]

FOLDER is a ladder's, or one of records (by default `results`), whose most recently written ladder is taken. `make
bench` ends with this.
"""

import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from dlrm_bench.bench.compare.notes import TOO_COARSE
from dlrm_bench.bench.ladder.analysis import confidence_in_words, proven, read_judged_ladder
from dlrm_bench.bench.records.ladder import LADDER_JSON, Ladder, RungResult
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.records.schema import RunRecord
from dlrm_bench.bench.stats.repetitions import finds
from dlrm_bench.dlrm.benchmarks import benchmark_of
from dlrm_bench.dlrm.runtime.command_line import exit_status

_PIPELINES = {
    "torchrec": "stock TorchRec, as the MLPerf reference trains",
    "five-stage": "TorchRec's model under this project's five-stage pipeline",
    "static": "this project's own sharded embeddings and dense network, every shape fixed in advance",
}
_NO_GPU = (
    "This machine has no GPU, so these times say nothing about GPUs. The harness is about the time that a CPU needs to "
    "launch a GPU's work; here operators compute on the thread that calls them, and nothing is launched."
)
_STATIC_ON_A_CPU = (
    "The static pipeline can be slower than stock on a CPU, because a CPU lacks what makes it fast on GPUs. It uses "
    "GPU streams and one CUDA graph to overlap work: on a CPU it waits for each collective in turn, while stock "
    "TorchRec reduces gradients on other threads during its backward. Instead of its GPU kernels it runs the plain "
    "PyTorch functions that they are tested against."
)
_RUNGS_FOR_GPUS = (
    "These rungs run on any machine. On GPUs, `dlrm-bench ladder --rungs full --preset launch-bound` shows what each "
    "optimisation gains."
)


def latest_ladder(folder: Path) -> Path:
    """Returns the folder itself if it is a ladder's, else the most recently written ladder in it; ValueError if there
    is none."""
    if (folder / LADDER_JSON).exists():
        return folder
    ladders = [path.parent for path in folder.glob(f"*/{LADDER_JSON}")]
    if not ladders:
        raise ValueError(f"{folder} holds no {LADDER_JSON}: name the folder of a ladder, or run `dlrm-bench ladder`")
    return max(ladders, key=lambda ladder: (ladder / LADDER_JSON).stat().st_mtime)


def verdict(folder: Path) -> list[str]:
    """Returns paragraphs on the ladder in `folder`: its rungs, each compared with the first, then the limits of the
    result."""
    ladder, _ = read_judged_ladder(folder)
    runs = [read_record(folder / rung["record"]).run for rung in ladder["rungs"]]
    paragraphs = [f"{rung['name']}: {_pipeline(rung, run)}." for rung, run in zip(ladder["rungs"], runs, strict=True)]
    paragraphs += [_against(ladder, rung) for rung in ladder["rungs"][1:]]
    paragraphs.append(_losses(ladder))
    if runs[0]["machine"]["gpu"] is None:
        static = any(run["config"]["pipeline"]["name"] == "static" for run in runs)
        return [*paragraphs, _NO_GPU, *([_STATIC_ON_A_CPU] if static else [])]
    benchmark = benchmark_of(runs[0]["config"])
    of_cpus = [rung.name for rung in benchmark.ladders.get("cpu", ())] if benchmark else []
    for_any_machine = [rung["name"] for rung in ladder["rungs"]] == of_cpus
    return [*paragraphs, *([_RUNGS_FOR_GPUS] if for_any_machine else [])]


def _pipeline(rung: RungResult, run: RunRecord) -> str:
    """Returns the rung's pipeline in words; for stock TorchRec its switches too, because only without any is it the
    reference."""
    name = run["config"]["pipeline"]["name"]
    switches = re.sub(r"--(pipeline|precision)[ =]\S+", "", " ".join(rung["flags"])).split()
    if name == "torchrec" and switches:
        return f"stock TorchRec with {' '.join(switches)}"
    return _PIPELINES.get(name, name)


def _against(ladder: Ladder, rung: RungResult) -> str:
    """Returns the proven difference of a rung from the first."""
    first = ladder["rungs"][0]
    times, interval = f"{rung['speedup_vs_first']:.2f} times as fast as {first['name']}", rung["ci95"]
    if interval is None:
        return (
            f"{rung['name']} was {times} in the only round. That proves nothing: one round does not show how much "
            "runs of one rung differ. Use --rounds 5 or more."
        )
    low, high = interval
    runs = f"in {ladder['rounds']} rounds ({confidence_in_words(ladder)} interval {low:.2f} to {high:.2f})"
    if rung["name"] in proven(ladder, "first"):
        return f"{rung['name']} is {'faster' if rung['speedup_vs_first'] > 1 else 'slower'}, proven: {times} {runs}."
    least, found = rung["detectable_interval"], rung["detectable"]
    unproven = f"{rung['name']}: no difference proven, {times} {runs}."
    if least is None or found is None:
        return f"{unproven} The timings are too coarse, as rounds agree to the last digit: {TOO_COARSE}."
    return f"{unproven} Rounds that differ like these {finds((least[0], found, least[1]))}."


def _losses(ladder: Ladder) -> str:
    """Returns a sentence on the losses of the rungs."""
    differences = [rung["loss_difference"] for rung in ladder["rungs"][1:]]
    known = [difference for difference in differences if difference is not None]
    if len(known) < len(differences) or not known:
        return "It is unknown whether all rungs train alike: some losses are missing."
    apart = f"differ by at most {max(known):.0e} of their value" if max(known) else "are equal to the last bit"
    return f"All rungs start from the same weights and train on the same batches: their first losses {apart}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the verdict; returns the exit status, 2 without a ladder."""
    given = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        if len(given) > 1 or any(argument.startswith("-") for argument in given):
            raise ValueError("name one folder: python -m dlrm_bench.bench.ladder.verdict [FOLDER]")
        folder = latest_ladder(Path(given[0] if given else "results"))
        print(f"What {folder} shows:\n")
        for paragraph in verdict(folder):
            print(textwrap.fill(paragraph, 110, initial_indent="  - ", subsequent_indent="    "))
        return 0

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
