"""The MLPerf division that a run's log may name, and the unit in which it counts: by the ruleset of its benchmark."""

from dataclasses import fields

from dlrm_bench.bench.config import Division, RunConfig
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.data.dataset import Dataset


def division_of(config: RunConfig, dataset: Dataset, global_batch_size: int) -> tuple[Division, list[str]]:
    """Returns the division that the log names, and why it is open if --mlperf.division asks for closed, which requires
    that MLPerf's model is trained on its data by its rules."""
    if config.mlperf.division == "open":
        return "open", []
    ruleset = named(config.benchmark).ruleset
    if ruleset is None:
        return "open", [f"MLPerf has no rules for {config.preset}"]
    run = {field.name: getattr(config, field.name) for field in fields(config)}
    run["global_batch_size"] = global_batch_size
    obstacles = list(ruleset.obstacles(config, run, dataset))
    if getattr(config.pipeline, "evict_rows", False):
        obstacles.append("--evict-rows: evicted rows start from new weights, unlike rows of full tables")
    return ("open" if obstacles else "closed"), obstacles


def counted_samples(config: RunConfig, dataset: Dataset) -> int | None:
    """Returns the samples of the epoch if the benchmark's logs count samples; None if they count epochs."""
    ruleset = named(config.benchmark).ruleset
    return dataset.train_samples if ruleset is not None and ruleset.counts_samples else None
