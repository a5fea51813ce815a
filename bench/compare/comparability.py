"""Settings that compared runs must have in common, and the differences between their records.

Both sides should do the same work on the same machine; the program may differ, as the subject of the comparison. Within
a side, the program should be the same too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dlrm_bench.bench.records.record import Record

SHOULD_BE_EQUAL = {
    "number of nodes": "machine.nodes",
    "host": "machine.hosts",
    "number of GPUs": "machine.gpus",
    "GPU": "machine.gpu",
    "set of GPUs (UUIDs)": "machine.gpu_uuids",
    "CPU": "machine.cpu",
    "number of cores": "machine.cores",
    "CPU governor": "machine.cpu_governor",
    "NUMA layout": "machine.numa",
    "pinning of the ranks to CPUs": "machine.rank_cpus",
    "kernel": "machine.kernel",
    "launcher": "provenance.started_by.launcher",
    "environment": "provenance.environment",
    "driver": "machine.driver",
    "power limit (W)": "machine.power_limit_w",
    "largest SM clock (MHz)": "machine.sm_clock_max_mhz",
    "topology": "machine.topology",
    "CUDA": "machine.cuda",
    "NCCL": "machine.nccl",
    "Python": "machine.python",
    "torch": "machine.torch",
    "torchrec": "machine.torchrec",
    "fbgemm_gpu": "machine.fbgemm_gpu",
    "number of ranks": "config.world_size",
    "global batch": "config.global_batch_size",
    "precision": "config.precision",
    "benchmark": "config.benchmark",
    "model": "config.model",
    "optimizer of the tables": "config.optimizer.embedding",
    "data": "config.data.source",
    "path of the data": "config.data.path",
    "skew of random ids": "config.data.random_skew",
    "kind of random ids after a feature's first": "config.data.random_ids",
    "number of random batches": "config.data.random_batches",
    "interval between checks of the loss": "config.loss_interval",
}
"""Settings that a reader assumes to be equal on both sides, with their fields in a record."""
_VARIABLE = "environment variable "
_KNOWN = "environment"
_SET_WHILE_RUNNING = {"TORCH_SYMMMEM_IMPLICIT_POOL", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables that dlrm/runtime/peer_memory.py and torch itself set at run time, depending on the compared options."""
WARMUP = "number of warm-up iterations"
"""Configured value if the warm-up also has a minimum time: the actual number of iterations then varies by run."""
BOOT = "boot of the machine"
"""Setting that distinguishes machines of the same description that have no GPU UUIDs."""
MUST_BE_KNOWN = {
    "hash of the source files": "git.source",
    "versions of the packages": "provenance.packages",
    "environment": "provenance.environment",
    "how the ranks were started": "provenance.started_by",
    "CPU": "machine.cpu",
    "boot of the machine": "machine.boots",
}
"""Fields of each record that --strict requires."""
MUST_BE_KNOWN_OF_GPUS = {
    "UUIDs of the GPUs": "machine.gpu_uuids",
    "driver": "machine.driver",
    "power limit": "machine.power_limit_w",
    "whether it was throttled": "conditions.throttled",
}
SM_CLOCK = "SM clock during the run (MHz)"
"""Setting that is measured, not configured."""


def settings_of(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Returns the distinct known values, over the records, of each setting that should be equal."""
    settings = {name: different(_lookup(r, field) for r in records) for name, field in SHOULD_BE_EQUAL.items()}
    boots = different(None if _lookup(r, "machine.gpu_uuids") else _lookup(r, "machine.boots") for r in records)
    warmups = different(map(_warmup, records))
    return settings | {WARMUP: warmups, BOOT: boots, SM_CLOCK: _clocks(records)} | _environment(records)


def absent(settings: Mapping[str, list[Any]], name: str) -> list[Any]:
    """Returns the values of a setting that a side does not have: 'not set' for an environment variable if the
    environment is known, else none."""
    return ["not set"] if name.startswith(_VARIABLE) and settings.get(_KNOWN) else []


def _environment(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Returns the values of each environment variable in any record, and whether all records contain their
    environment."""
    known = [record.run["provenance"]["environment"] for record in records if "provenance" in record.run]
    names = sorted({name for variables in known for name in variables} - _SET_WHILE_RUNNING)
    values = {f"{_VARIABLE}{name}": different(v.get(name, "not set") for v in known) for name in names}
    return {_KNOWN: ["known"] if len(known) == len(records) else [], **values}


def machine_of(record: Record) -> str:
    """Returns the identity of a run's machine: its GPUs' UUIDs, else its boots, or host names in older records."""
    machine = record.run["machine"]
    return " + ".join(machine.get("gpu_uuids") or machine.get("boots") or machine.get("hosts", []))


def unknown(label: str, records: Sequence[Record]) -> list[str]:
    """Returns a sentence on the fields that --strict requires and some of the side's records lack, or an empty list."""
    missing: Counter[str] = Counter()
    for record in records:
        asked = MUST_BE_KNOWN | (MUST_BE_KNOWN_OF_GPUS if record.run["machine"]["gpu"] else {})
        missing.update(name for name, field in asked.items() if _lookup(record, field) in (None, [], ""))
    counts = [f"{name} in {n}" for name, n in missing.items()]
    return [f"{label}: fields that records of {len(records)} run(s) lack: {', '.join(counts)}"] if counts else []


def different(values: Iterable[Any]) -> list[Any]:
    """Returns the distinct values, without None."""
    found: list[Any] = []
    for value in values:
        if value is not None and value not in found:
            found.append(value)
    return found


def caveats(record: Record) -> list[str]:
    """Returns reasons to distrust a well-formed record: uncommitted source code, a throttled machine, pauses of the
    pipeline within the timed iterations."""
    run, found = record.run, []
    if run["git"]["dirty"]:
        found.append("the checkout had uncommitted changes")
    telemetry = run.get("conditions")
    if telemetry and telemetry["throttled"]:
        reasons = ", ".join(sorted({span["reason"] for span in telemetry["throttling"]}))
        found.append(f"throttled ({reasons})")
    pauses: list[int] = run["pipeline"].get("paused_after", [])
    if any(after >= run["warmup_iterations"] for after in pauses):
        found.append(
            "the pipeline paused within the timed iterations, to capture graphs or to allocate memory: raise "
            "--warmup-iterations"
        )
    return found


def caveats_of_side(label: str, records: Sequence[Record]) -> list[str]:
    """Returns reasons to distrust a side: the caveats of its records, each once, and runs of several programs."""
    counts = Counter(caveat for record in records for caveat in caveats(record))
    found = [f"{label}: {caveat} in {n} of {len(records)} runs" for caveat, n in counts.items()]
    programs = [program_of(record) for record in records]
    fields = dict.fromkeys(field for program in programs for field in program)
    varying = [field for field in fields if len({program.get(field) for program in programs} - {None}) > 1]
    if varying:
        found.append(f"{label}: runs of several programs, which differ in {', '.join(varying)}: name runs of one")
    return found


def program_of(record: Record) -> dict[str, str | None]:
    """Returns the program of a run: hash of its source (commit in older records), pipeline, and the pipeline's
    options."""
    options = {name: str(value) for name, value in record.run["config"]["pipeline"].items()}
    git = record.run["git"]
    source = git.get("source")
    # Commits with the same source hash are the same program.
    code = {"source": source} if source else {"commit": git["commit"]}
    return {"pipeline": options.pop("name"), **options, **code}


def _lookup(record: Record, field: str) -> Any:
    value: Any = record.run
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _warmup(record: Record) -> Any:
    config = record.run["config"]
    by_time = config.get("min_time") and config.get("iterations") is None and config.get("target_auc") is None
    seconds = config.get("warmup_time") if by_time else None
    return f"{config['warmup_iterations']}, and {seconds:g} s" if seconds else record.run["warmup_iterations"]


def _clocks(records: Sequence[Record]) -> list[Any]:
    telemetry = [record.run.get("conditions") for record in records]
    clocks = [each["sm_clock_mhz"][1] for each in telemetry if each and each["sm_clock_mhz"]]
    return [round(float(np.median(clocks)))] if clocks else []
