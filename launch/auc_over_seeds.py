"""Compares the AUC of the static pipeline in bf16, with peer memory, and of stock TorchRec in TF32, over seeds.

torchrun --nproc_per_node 2 -m dlrm_bench.launch.auc_over_seeds --preset smoke --data.path DIR [--field value ...]

With --pipeline static --precision bf16 --fp8, compares the static pipeline with 8-bit products and in bf16. With
--rungs LADDER ONE OTHER, compares two rungs of a ladder of the preset's benchmark. --seeds N (default 5) pairs of runs
use the seeds from --first-seed FIRST (default 0) on.

All runs use the same planted samples, with different initial weights for each seed: one epoch with an evaluation at the
end, or with --rungs the given --iterations and --evaluations-per-epoch. Each run writes a record. The summary,
auc_over_seeds.json beside them, has the mean difference between runs of the same seed and its 95 % interval by
Student's t, from the second seed on; other seeds need another --results-dir. On the CPU no graph is captured, and
without --rungs stock and static run in fp32.
"""

import argparse
import json
import statistics
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_bench.bench.checkpoints.folders import on_rank_0
from dlrm_bench.bench.config import RunConfig, as_json
from dlrm_bench.bench.flags import known_flags
from dlrm_bench.bench.obstacles import check_machine
from dlrm_bench.bench.records.json_file import write_whole
from dlrm_bench.bench.run import run
from dlrm_bench.bench.stats.statistics import student_t
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.runtime.command_line import exit_process
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.launch.dlrm import parse
from dlrm_bench.launch.failures import guarded
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.torchrec.options import TorchRecOptions

MODULE = "dlrm_bench.launch.auc_over_seeds"


class _Joined(Ranks):
    """Ranks that share one process group over all runs."""

    def init_process_group(self) -> None:
        if not dist.is_initialized():
            Ranks.init_process_group(self)


def main() -> int:
    """Trains the pairs of runs that the command line asks for; returns the exit status."""
    found = Ranks.from_environment()
    ranks = _Joined(**{field.name: getattr(found, field.name) for field in fields(Ranks)})
    seeds, rungs, rest = parse_seeds(sys.argv[1:])
    config, cuda = parse(rest), ranks.device.type == "cuda"
    best_auc = named(config.benchmark).parts().open_data(config).best_auc
    if best_auc is None:
        raise ValueError(
            f"--data.path: give planted data, made by `dlrm-bench data generate --preset {config.preset} ...`"
        )
    # A target that a run reaches only by luck, so that each run trains on all of its samples.
    same: dict[str, Any] = {"target_auc": best_auc, "warmup_iterations": 0}
    if rungs is None:
        same |= {"evaluations_per_epoch": 1, "iterations": None}
    chosen = _sides(config, cuda) if rungs is None else sides_of_rungs(config.benchmark, rungs, rest)
    sides = {side: replace(its, **same) for side, its in chosen.items()}
    ranks.init_process_group()
    for its in sides.values():  # before any run: the first one takes its time
        check_machine(its, ranks)
    file = on_rank_0(ranks, partial(_new_summary, config.results_dir))
    aucs: dict[str, list[float]] = {side: [] for side in sides}
    for seed in seeds:
        for side, its in sides.items():
            aucs[side].append(_auc(replace(its, seed=seed, run_id=f"{side}-{seed}"), ranks))
            if ranks.rank == 0:
                print(f"{side} {seed}: {aucs[side][-1]:.6f}", flush=True)
        if ranks.rank == 0 and seed > seeds[0]:  # after every seed, so that an interrupted run keeps its results
            summary = _summary(aucs) | {
                "first_seed": seeds[0],
                "data": as_json(config)["data"],
                "best_auc": best_auc,
            }
            write_whole(file, json.dumps(summary, indent=1))
    if ranks.rank == 0:
        print(json.dumps(summary, indent=1))
    ranks.destroy_process_group()
    return 0


def _new_summary(results_dir: Path) -> Path:
    """Returns the summary's path. ValueError if that of an earlier comparison is there."""
    file = results_dir / "auc_over_seeds.json"
    if file.exists():
        raise ValueError(
            f"--results-dir: {file} exists, the summary of an earlier comparison or of other seeds: choose another "
            "folder"
        )
    return file


def parse_seeds(arguments: list[str]) -> tuple[range, list[str] | None, list[str]]:
    """Returns the seeds given on a command line, the words after --rungs, and the remaining words. ValueError names a
    bad flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rungs", nargs=3)
    chosen, rest = known_flags(parser, arguments)
    if chosen.seeds < 2:
        raise ValueError(f"--seeds is {chosen.seeds}: an interval needs at least 2")
    if chosen.first_seed < 0:
        raise ValueError(f"--first-seed is {chosen.first_seed}: choose 0 or more")
    return range(chosen.first_seed, chosen.first_seed + chosen.seeds), chosen.rungs, rest


def sides_of_rungs(benchmark: str, names: list[str], arguments: list[str]) -> dict[str, RunConfig]:
    """Returns the configurations of two rungs; `names` has the ladder's name and those of its two rungs. arguments:
    flags of both. ValueError if there is no such ladder or rung, or both are the same."""
    ladder, one, other = names
    rungs = {rung.name: rung for rung in named(benchmark).ladders.get(ladder, ())}
    if one == other or not {one, other} <= rungs.keys():
        ladders = {name: [rung.name for rung in of] for name, of in named(benchmark).ladders.items()}
        raise ValueError(f"--rungs {' '.join(names)}: name a ladder and two of its rungs; {benchmark} has {ladders}")
    return {name: parse([*arguments, *rungs[name].flags]) for name in (one, other)}


def _sides(config: RunConfig, cuda: bool) -> dict[str, RunConfig]:
    """Returns the two configurations to compare, by name."""
    static = StaticOptions(cuda_graph="iteration" if cuda else "none", overlap=cuda, presort_ids=True, peer_memory=True)
    if isinstance(config.pipeline, StaticOptions) and config.pipeline.fp8:
        return {
            "bf16": replace(config, precision="bf16", pipeline=static),
            "fp8": replace(config, precision="bf16", pipeline=replace(static, fp8=True)),
        }
    return {
        "stock": replace(config, precision="tf32" if cuda else "fp32", pipeline=TorchRecOptions()),
        "static": replace(config, precision="bf16" if cuda else "fp32", pipeline=static),
    }


def _auc(config: RunConfig, ranks: Ranks) -> float:
    training = run(config, ranks, ranks.command_line("-m", [MODULE, *sys.argv[1:]])).record["training"]
    assert training is not None
    assert training["auc"] is not None
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # for the next run's tables
    return training["auc"]


def _summary(aucs: dict[str, list[float]]) -> dict[str, Any]:
    (one, of_one), (other, of_other) = aucs.items()
    differences = [b - a for a, b in zip(of_one, of_other, strict=True)]
    pairs, mean = len(differences), statistics.mean(differences)
    half = student_t(0.975, pairs - 1) * statistics.stdev(differences) / pairs**0.5
    return {"auc": aucs, f"{other}_minus_{one}": {"mean": mean, "ci95": [mean - half, mean + half]}}


if __name__ == "__main__":
    exit_process(guarded(main))
