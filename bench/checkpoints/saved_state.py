"""The state of a checkpoint apart from weights and optimizer state, and the checks before a run resumes it.

state.json is checked field by field: it may be damaged or edited, or belong to another training or to other data.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np

from dlrm_bench.bench.config import RunConfig, as_json
from dlrm_bench.bench.instruments.schedule import Schedule
from dlrm_bench.bench.records.json_file import check_form, read_json
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.data.dataset import FileContent
from dlrm_bench.pipeline.interface import Capacities

STATE_JSON = "state.json"
STATE_SCHEMA = 2
PARTIAL = ".partial"
SLOTS = "slot-[0-9]"
"""Names of memory for snapshots that holds no complete one: see memory_folder.py."""
_COMPLETE = re.compile(r"samples-(\d{1,18})(\.replaced)?")
_SAME = ("model", "optimizer", "data", "seed")
"""Fields of the configuration in which a run and the checkpoint that it resumes must agree; of `data` its
`sample_fields`."""


class LossStretch(TypedDict):
    """Losses of consecutive iterations of one global batch size."""

    global_batch_size: int
    losses: list[float]


class RunState(TypedDict):
    """The state of a run apart from weights and optimizer state."""

    schema: int
    samples: int
    """Number of samples trained on, at which the data continue."""
    losses: list[LossStretch]
    """Losses of all iterations that trained these samples."""
    auc: float | None
    """AUC of the last evaluation."""
    mlperf_log: str
    """The lines of the MLPerf log so far."""
    run_id: str
    config: dict[str, Any]
    data_files: dict[str, FileContent]
    """The data files trained on, by name; none of random batches."""
    capacities: NotRequired[dict[str, dict[str, int]]]
    """The pipeline's capacities; files of versions before 28 November 2026 have none."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Resumed:
    """A checkpoint to resume."""

    folder: Path
    state: RunState
    first: int
    """Number of iterations trained, counted in the new run's global batches."""
    capacities: Capacities
    """The pipeline's capacities after these iterations; none for another pipeline or another size of batches."""


def checkpoint_name(samples: int) -> str:
    """Returns the name of a checkpoint's folder."""
    return f"samples-{samples:013d}"


def complete_checkpoints(path: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, fewest samples first."""
    found = ((_COMPLETE.fullmatch(folder.name), folder) for folder in path.glob("samples-*"))
    whole = ((match, folder) for match, folder in found if match and (folder / STATE_JSON).is_file())
    # Of two with the same number of samples, the one that was being replaced is older.
    return [folder for _, folder in sorted(whole, key=lambda of: (int(of[0][1]), of[0][2] is None))]


def samples_of(folder: Path) -> int:
    """Returns the number of samples in the name of a complete checkpoint; 0 of another folder."""
    match = _COMPLETE.fullmatch(folder.name)
    return int(match[1]) if match else 0


def checkpoint_in(path: Path) -> Path:
    """Returns a checkpoint, or the newest complete one of a folder of them. ValueError where there is none, or where
    the path is that of an unfinished snapshot."""
    if (path / STATE_JSON).is_file():
        memory = path.resolve()
        if memory.match(SLOTS):
            raise ValueError(
                f"{path} is a snapshot that was not finished: name a complete one, or {memory.parent} for the newest "
                "complete one"
            )
        return path
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory")
    complete = complete_checkpoints(path)
    if complete:
        return complete[-1]
    if any((folder / STATE_JSON).is_file() for folder in path.glob("iteration-*")):
        raise ValueError(
            f"{path} has checkpoints of an earlier version, which this one does not read: resume with the version that "
            "wrote them, or train from the start"
        )
    raise ValueError(f"{path} has no complete checkpoint")


def read_run_state(folder: Path) -> RunState:
    """Reads and checks state.json of a checkpoint. ValueError names the first bad field."""
    path = folder / STATE_JSON
    state: RunState = read_json(path)
    check_form(path, state, RunState, (STATE_SCHEMA,))
    wrong = _wrong(state)
    if wrong is not None:
        raise ValueError(f"{path} is damaged: {wrong}")
    return state


def _wrong(state: RunState) -> str | None:
    """Returns the first impossible value of a state whose fields have their types; None without any."""
    trained = sum(stretch["global_batch_size"] * len(stretch["losses"]) for stretch in state["losses"])
    if any(stretch["global_batch_size"] <= 0 for stretch in state["losses"]):
        return "a global_batch_size is not positive"
    if state["samples"] <= 0:
        return f"samples is {state['samples']}, and a checkpoint is of a model that was trained"
    if trained != state["samples"]:
        return f"samples is {state['samples']}, and the losses are those of {trained}"
    if state["auc"] is not None and not 0 <= state["auc"] <= 1:
        return f"auc is {state['auc']}"
    if any(size <= 0 for sizes in state.get("capacities", {}).values() for size in sizes.values()):
        return "a capacity is not positive"
    if not state["run_id"].isprintable() or "/" in state["run_id"]:
        return f"run_id is {state['run_id']!a:.80}, which is no name of a folder"
    for number, line in enumerate(state["mlperf_log"].splitlines(), 1):
        if not (line.startswith("# ") and line.isprintable()) and not _is_event(line):
            return f"line {number} of mlperf_log is no line of an MLPerf log"
    return None


def _is_event(line: str) -> bool:
    try:
        return line.startswith(":::MLLOG ") and isinstance(json.loads(line.removeprefix(":::MLLOG ")), dict)
    except (ValueError, RecursionError):
        return False


def find_checkpoint(config: RunConfig, schedule: Schedule) -> Resumed | None:
    """Returns the checkpoint that --resume names, or the newest complete one of that folder; None without the flag, or
    where --resume auto finds none.

    ValueError where there is none, or it is damaged, or of another training.
    """
    if config.resume is None:
        return None
    try:
        folder = _newest(config) if config.resumes_newest else checkpoint_in(config.resume)
        if folder is None:
            return None
        state = read_run_state(folder)
    except ValueError as error:
        raise ValueError(f"--resume: {error}") from error
    _check_same(folder, state["config"], config)
    _check_data(folder, state["data_files"], config)
    _check_batch(folder, state["losses"][-1]["global_batch_size"], config, schedule.global_batch_size)
    first, rest = divmod(state["samples"], schedule.global_batch_size)
    if rest:
        raise ValueError(
            f"--resume {folder}: it has trained on {state['samples']} samples, which is not a whole number of global "
            f"batches of {schedule.global_batch_size}: choose another --local-batch-size"
        )
    if first >= schedule.last:
        raise ValueError(
            f"--resume {folder}: it has trained all of the {schedule.last} iterations asked for: raise --iterations, "
            "or there is nothing left to train"
        )
    return Resumed(folder=folder, state=state, first=first, capacities=_capacities(state, config, schedule))


def _capacities(state: RunState, config: RunConfig, schedule: Schedule) -> Capacities:
    """Returns the saved capacities if the run has the same pipeline and batches, on each rank and together."""
    saved, of_pipeline = state["config"], state["config"].get("pipeline")
    same_pipeline = isinstance(of_pipeline, dict) and of_pipeline.get("name") == config.pipeline.name
    same_batches = saved.get("local_batch_size") == config.local_batch_size
    same_batches &= state["losses"][-1]["global_batch_size"] == schedule.global_batch_size
    return state.get("capacities", {}) if same_pipeline and same_batches else {}


def _newest(config: RunConfig) -> Path | None:
    """Returns the complete checkpoint with the most samples, in memory or on disk (a tie goes to memory); None if there
    is none. ValueError unless one of the two trainings continues the other."""
    places = (config.snapshot.folder, config.checkpoint.path)
    found = [folder for path in places if path is not None for folder in complete_checkpoints(path)[-1:]]
    found.sort(key=samples_of, reverse=True)
    if len(found) == 2:
        newer, older = (list(chain.from_iterable(_losses(read_run_state(folder)))) for folder in found)
        if newer[: len(older)] != older:
            raise ValueError(
                f"auto: {found[0]} and {found[1]} are of different trainings: name the one to continue from, and "
                "another --snapshot.path or --checkpoint.path"
            )
    return found[0] if found else None


def _losses(state: RunState) -> Iterator[list[tuple[int, float]]]:
    """Yields the losses of a history, each with the size of its global batch."""
    for stretch in state["losses"]:
        yield [(stretch["global_batch_size"], loss) for loss in stretch["losses"]]


def _check_same(folder: Path, saved: dict[str, Any], config: RunConfig) -> None:
    """Raises ValueError that names the first field in which the configurations differ. A checkpoint of an earlier
    version lacks fields that were added since; it was trained with their defaults."""
    given = as_json(config)
    for name in _SAME:
        old, new = saved.get(name), given.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            old = _defaults(getattr(config, name)) | old
        if name == "data" and isinstance(old, dict) and isinstance(new, dict):
            old, new = ({key: of.get(key) for key in config.data.sample_fields} for of in (old, new))
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            key = next((key for key in {**new, **old} if old.get(key) != new.get(key)), None)
            if key is None:  # only one of two versions has the field, and it is None
                continue
            name, old, new = f"{name}.{key}", old.get(key), new.get(key)
        flag = name.replace("_", "-")
        raise ValueError(
            f"--resume {folder}: it was trained with --{flag} {old!r}, and this run has {new!r}: give it the saved "
            "value, or train anew, without --resume"
        )


def _defaults(options: Any) -> dict[str, Any]:
    """Returns the defaults of a dataclass's fields, as JSON holds them."""
    values = {field.name: field.default for field in fields(options) if field.default is not MISSING}
    return cast(dict[str, Any], json.loads(json.dumps(values, default=str)))


def _check_data(folder: Path, saved: dict[str, FileContent], config: RunConfig) -> None:
    """Raises ValueError where a data file has other content than the one that was trained on."""
    for name, content in named(config.benchmark).parts().data_content(config).items():
        before = saved.get(name)
        if before is None and saved and content.get("added"):
            continue
        known = before is not None and None not in (before["blake2b"], content["blake2b"])
        if before is None or before["sample"] != content["sample"] or (known and before != content):
            raise ValueError(
                f"--resume {folder}: {config.data.path}/{name} has another content than the file it was trained on: "
                "name the directory of that data with --data.path"
            )


def _check_batch(folder: Path, before: int, config: RunConfig, now: int) -> None:
    """Raises ValueError where another global batch size than `before` would train samples twice, leave some out, or
    change the learning rate."""
    scheduled = config.optimizer.rate(1) is not None
    if before == now or not (scheduled or config.data.steps_depend_on_batch):
        return
    ranks = now // config.local_batch_size
    way_out = f"choose --local-batch-size {before // ranks}" if before % ranks == 0 else "use another number of ranks"
    raise ValueError(
        f"--resume {folder}: it was trained with global batches of {before} samples, and this run's have {now}: the "
        f"data's parts or the learning-rate schedule count global batches: {way_out}"
    )


def extended(before: Sequence[LossStretch], global_batch_size: int, losses: Sequence[float]) -> list[LossStretch]:
    """Returns a history extended by the losses of a run that resumed it."""
    history = [LossStretch(global_batch_size=of["global_batch_size"], losses=[*of["losses"]]) for of in before]
    if history and history[-1]["global_batch_size"] == global_batch_size:
        history[-1]["losses"] += losses
    elif losses:
        history.append({"global_batch_size": global_batch_size, "losses": [*losses]})
    return history


def history_arrays(history: Sequence[LossStretch]) -> dict[str, np.ndarray]:
    """Returns the arrays of a history in iterations.npz: `loss_before`, and `samples_before`, the number of samples
    trained on after each of these losses' iterations."""
    if not history:
        return {}
    losses = chain.from_iterable(stretch["losses"] for stretch in history)
    sizes = [np.full(len(stretch["losses"]), stretch["global_batch_size"], np.int64) for stretch in history]
    return {"loss_before": np.fromiter(losses, np.float32), "samples_before": np.cumsum(np.concatenate(sizes))}


def of_another_user(folder: Path) -> bool:
    """Whether a checkpoint belongs to another user than the one who runs this program."""
    return (folder / STATE_JSON).stat().st_uid != os.geteuid()
