"""The flags that repeat a recorded run."""

from collections.abc import Iterator, Mapping
from typing import Any

from dlrm_bench.bench.config import as_json
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.config_form import check_config
from dlrm_bench.bench.records.record import RUN_JSON, Record
from dlrm_bench.bench.records.upgrade import defaults

_NOT_REPEATED = {
    "preset",
    "pipeline",
    "run_id",
    "results_dir",
    "checkpoint",
    "snapshot",
    "resume",
    "world_size",
    "global_batch_size",
}


def repeating_flags(record: Record) -> tuple[list[str], int]:
    """Returns the flags of launch/dlrm.py that repeat a record's run, from its configuration, and its number of
    processes.

    ValueError if the run used several nodes, if this version does not know its preset, or if its configuration has an
    invalid value.
    """
    config = record.run["config"]
    check_config(record.folder / RUN_JSON, config)
    if record.run["machine"]["nodes"] > 1:
        raise ValueError(f"{record.folder} is a run on several nodes: name --preset and its flags instead")
    options = config["pipeline"]
    as_preset = as_json(preset(config["preset"]))
    flags = [f"--preset={config['preset']}", f"--pipeline={options['name']}"]
    flags += _flags({"name": options["name"], **defaults(options["name"])}, options, "")
    return flags + list(_flags(as_preset, config, "")), config["world_size"]


def _flags(usual: Mapping[str, Any], config: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yields a flag for each field that differs from its default."""
    for name, value in config.items():
        flag = prefix + name.replace("_", "-")
        if name in _NOT_REPEATED or value == usual.get(name):
            continue
        if isinstance(value, Mapping):
            yield from _flags(usual.get(name) or {}, value, f"{flag}.")
        elif isinstance(value, bool):
            parent, _, leaf = flag.rpartition(".")
            yield f"--{flag}" if value else f"--{parent}{'.' if parent else ''}no-{leaf}"
        elif isinstance(value, list):
            yield from (f"--{flag}", *map(str, value))
        else:
            yield f"--{flag}={value}"  # one word, whatever the value is
