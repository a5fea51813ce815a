"""Upgrades configurations of older records to the current form."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from dlrm_bench.bench.config import PIPELINES
from dlrm_bench.dlrm.benchmarks import BENCHMARKS

_FLAT = (
    *("ebc", "cuda_graph", "cuda_graph_fallback", "plan", "row_wise", "avoid_record_streams", "pinned_d2h"),
    *("launch_threads", "trim_input_dist", "graph_dists", "inplace_copy", "quantized_comms", "overlap", "presort_ids"),
    "peer_memory",
)
"""Keys of the pipeline in schema 1, which are beside fields of the run; `pipeline` there is a schedule's name, or
None."""

_FIRST = BENCHMARKS[0].name
"""The only benchmark when records did not yet name theirs."""
_BEFORE: dict[str, dict[str, Any]] = {
    "optimizer": {"embedding": "adagrad"},
    "data": {"random_ids": "uniform"},
}
"""Values of fields in runs that are older than the field."""
_REMOVED = {"data": ("variable_lengths",)}
"""Fields of former versions that had one value in all records."""
_SCHEDULES = {None: "sparse-dist", "stock": "sparse-dist"}
"""Names of TorchRec's default schedule in schema 1."""
_WAY_OUT = "restore the file or leave it out"


def check_readable(file: Path, config: Mapping[str, Any], schema: int) -> None:
    """Checks that a configuration has the keys that `upgraded` reads; ValueError names the file and the field."""
    pipeline = config.get("pipeline")
    if schema == 1:
        if not isinstance(pipeline, str | None):
            raise ValueError(f"{file}: config.pipeline is {pipeline!r}, expected a schedule's name; {_WAY_OUT}")
    elif not isinstance(pipeline, dict) or not isinstance(pipeline.get("name"), str):
        raise ValueError(f"{file}: config.pipeline is {pipeline!r}, expected an object with a name; {_WAY_OUT}")
    for block in _BEFORE:
        if not isinstance(config.get(block, {}), dict):
            raise ValueError(f"{file}: config.{block} is {config[block]!r}, expected an object; {_WAY_OUT}")


def upgraded(config: Mapping[str, Any], schema: int) -> dict[str, Any]:
    """Returns the configuration of run.json in the current schema; options that it does not name get their defaults."""
    options = _options_of_schema_1(config) if schema == 1 else dict(config["pipeline"])
    rest = {name: value for name, value in config.items() if schema != 1 or name not in _FLAT}
    for block, before in _BEFORE.items():
        if block in rest and rest.get("benchmark", _FIRST) == _FIRST:
            rest[block] = before | rest[block]
    for block, removed in _REMOVED.items():
        if block in rest:
            rest[block] = {name: value for name, value in rest[block].items() if name not in removed}
    if "model" in rest:
        rest.setdefault("benchmark", _FIRST)
    if "iterations" in rest:
        rest.setdefault("min_time", None)  # without a number of iterations, runs continued to the end of the epoch
        rest.setdefault("max_time", None)
        rest.setdefault("warmup_time", None)
    if options.get("plan") == "balanced":
        del options["plan"]  # an option of former versions, which had this value in all records
    return rest | {"pipeline": {"name": options["name"], **defaults(options["name"]), **options}}


def defaults(pipeline: str) -> dict[str, Any]:
    """Returns the default of each option of a pipeline, tuples as lists; empty for a pipeline that this version does
    not know."""
    if pipeline not in PIPELINES:
        return {}
    given = {field.name: field.default for field in fields(PIPELINES[pipeline]) if field.default is not MISSING}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def _options_of_schema_1(config: Mapping[str, Any]) -> dict[str, Any]:
    schedule = config.get("pipeline")
    replaced: dict[str, Any] = {}
    if config.get("ebc") == "static":
        name = "static"
        if config.get("cuda_graph_fallback"):
            replaced = {"cuda_graph": "try"}
    elif schedule == "five-stage":
        name = "five-stage"
    else:
        name, replaced = "torchrec", {"schedule": _SCHEDULES.get(schedule, schedule)}
    return {"name": name, **{option: config[option] for option in defaults(name) if option in config}, **replaced}
