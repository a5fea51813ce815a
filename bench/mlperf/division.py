"""Which MLPerf division a run's log may name: closed is only what trains MLPerf's model on its data by its rules."""

from dataclasses import fields

from dlrm_bench.bench.config import Division, RunConfig
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.data.dataset import Dataset


def division_of(config: RunConfig, dataset: Dataset) -> tuple[Division, list[str]]:
    """Returns the division that the log names, and why it is not closed where --mlperf.division asks for that."""
    if config.mlperf.division == "open":
        return "open", []
    ruleset = named(config.benchmark).ruleset
    if ruleset is None:
        return "open", [f"MLPerf has no rules for {config.preset}"]
    run = {field.name: getattr(config, field.name) for field in fields(config)}
    obstacles = list(ruleset.obstacles(config, run, dataset))
    return ("open" if obstacles else "closed"), obstacles
