"""Packages made by hand: logs with every event that the rules ask for, a system description, a source file."""

import json
from pathlib import Path
from typing import Any

from dlrm_bench.bench.mlperf.submission.package import RESULT_NAMES, Package
from dlrm_bench.bench.mlperf.submission.system_description import COUNTS, FIELDS

TRAIN_SAMPLES, EVAL_SAMPLES = 4195197692, 89137319
BEGIN_MS = 1_714_641_000_000

EXTRACTS = Path(__file__).parents[3] / "data" / "mlperf_logs" / "nvidia_v4.0_extracts.json"


def write_log(
    path: Path,
    *,
    seed: int | None = 0,
    start_ms: int = BEGIN_MS,
    stop_ms: int = BEGIN_MS + 200_000,
    epoch_num: float = 0.8,
    auc: float = 0.80275,
    status: str = "success",
    **header: Any,
) -> None:
    """One run's log, of the closed division on GBS 55296 where `header`, events before init_stop, says nothing else."""
    values = {
        "submission_benchmark": "dlrm_dcnv2",
        "submission_org": "Example",
        "submission_division": "closed",
        "submission_status": "onprem",
        "submission_platform": "8 x Fast",
        **({} if seed is None else {"seed": seed}),
        "global_batch_size": 55296,
        "opt_name": "adagrad",
        "opt_base_learning_rate": 0.004,
        "opt_adagrad_learning_rate_decay": 0,
        "opt_weight_decay": 0,
        "opt_adagrad_initial_accumulator_value": 0,
        "opt_adagrad_epsilon": 1e-8,
        "opt_learning_rate_warmup_steps": 0,
        "opt_learning_rate_decay_start_step": 0,
        "opt_learning_rate_decay_steps": 0,
        "gradient_accumulation_steps": 1,
        "train_samples": TRAIN_SAMPLES,
        "eval_samples": EVAL_SAMPLES,
    } | header
    before, within = start_ms - 1, {"epoch_num": epoch_num}
    events = [
        (before, "cache_clear", True, {}),
        (before, "init_start", None, {}),
        *((before, key, value, {}) for key, value in values.items()),
        (before, "init_stop", None, {}),
        (start_ms, "run_start", None, {}),
        (start_ms, "epoch_start", None, {"epoch_num": 0}),
        (stop_ms, "eval_start", None, within),
        (stop_ms, "eval_accuracy", auc, within),
        (stop_ms, "eval_stop", None, within),
        (stop_ms, "run_stop", None, {"status": status, **within}),
        (stop_ms, "epoch_stop", None, within),
    ]
    lines = []
    for time, key, value, metadata in events:
        kind = (
            "INTERVAL_START" if key.endswith("_start") else "INTERVAL_END" if key.endswith("_stop") else "POINT_IN_TIME"
        )
        event = {"namespace": "", "time_ms": time, "event_type": kind, "key": key, "value": value}
        lines.append(":::MLLOG " + json.dumps(event | {"metadata": {"file": "run.py", "lineno": 1, **metadata}}) + "\n")
    path.write_text("".join(lines))


def description(**changes: Any) -> dict[str, Any]:
    """A complete system description."""
    known = dict.fromkeys(FIELDS, "x") | dict.fromkeys(COUNTS, "8") | {"submitter": "Example", "division": "closed"}
    known["status"] = "Available on-premise"
    return known | changes


def made_package(folder: Path, name: str = "fast", **changes: Any) -> Package:
    """A closed submission that all checkers accept; ten runs of 200, 201, ... 209 s with seeds 0 to 9."""
    package = Package(folder / "Example", name, "dlrm_dcnv2")
    package.results.mkdir(parents=True)
    for run, log in enumerate(RESULT_NAMES):
        begin = BEGIN_MS + 1_000_000 * run
        facts = {"seed": run, "start_ms": begin, "stop_ms": begin + 200_000 + 1000 * run}
        write_log(package.results / log, **(facts | changes))
    package.description.parent.mkdir(exist_ok=True)
    package.description.write_text(json.dumps(description(division=changes.get("submission_division", "closed"))))
    source = package.implementations / "dlrm-bench" / "run.py"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("pass\n")
    return package


def published(folder: Path, system: str) -> tuple[Package, float]:
    """NVIDIA's ten runs of round 4.0 on a system, with what they published of them, and their scaling factor."""
    facts = json.loads(EXTRACTS.read_text())[system]
    package = made_package(folder, system)
    header = {key: facts[key] for key in ("global_batch_size", "opt_base_learning_rate", "submission_platform")}
    for log, run in zip(RESULT_NAMES, facts["runs"], strict=True):
        times = {"start_ms": run["run_start"], "stop_ms": run["run_stop"]}
        result = {"epoch_num": run["epoch_num"], "auc": run["auc"]}
        write_log(package.results / log, seed=None, submission_org="NVIDIA", **times, **result, **header)
    package.description.write_text(json.dumps(description(status="onprem")))
    return package, facts["scaling_factor"]
