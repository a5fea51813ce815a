"""Checkpoints that a run refuses to resume, and its choice among those of a folder."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from dlrm_bench.bench.checkpoints import saved_state
from dlrm_bench.bench.checkpoints.saved_state import (
    STATE_JSON,
    STATE_SCHEMA,
    Resumed,
    RunState,
    _check_batch,
    checkpoint_in,
    checkpoint_name,
    extended,
    find_checkpoint,
    history_arrays,
    of_another_user,
    read_run_state,
)
from dlrm_bench.bench.config import CheckpointConfig, RunConfig, SnapshotConfig, as_json
from dlrm_bench.bench.instruments.schedule import Schedule, plan_schedule
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.dcnv2.data.content import data_content
from dlrm_bench.dlrm.dcnv2.data.manifest import MANIFEST
from dlrm_bench.dlrm.dcnv2.data.planted import PlantedConfig, generate
from dlrm_bench.pipeline.static.options import StaticOptions

GBS = 16
LOG = ':::MLLOG {"key": "init_start"}\n# a note\n'


def config(resume: Path | None, **changes: Any) -> RunConfig:
    small = replace(preset("launch-bound"), iterations=100, precision="fp32", local_batch_size=GBS // 2)
    return replace(small, resume=resume, **changes)


def state(iteration: int = 7) -> RunState:
    return RunState(
        schema=STATE_SCHEMA,
        samples=iteration * GBS,
        losses=[{"global_batch_size": GBS, "losses": [0.5] * iteration}],
        auc=0.5,
        mlperf_log=LOG,
        run_id="first",
        config=as_json(config(None)),
        data_files={},
    )


def save(path: Path, **changes: Any) -> Path:
    folder = path / checkpoint_name(changes.get("samples", 7 * GBS))
    folder.mkdir(exist_ok=True)
    (folder / STATE_JSON).write_text(json.dumps({**state(), **changes}))
    return folder


def of(iterations: int, size: int = GBS) -> dict[str, Any]:
    losses = [{"global_batch_size": size, "losses": [0.5] * iterations}]
    return {"samples": iterations * size, "losses": losses}


def found(path: Path, schedule: Schedule | None = None, **changes: Any) -> Resumed:
    given = config(path, **changes)
    resumed = find_checkpoint(given, schedule or plan_schedule(given, None, 2))
    assert resumed is not None
    return resumed


def test_the_newest_is_the_one_of_most_samples(tmp_path: Path) -> None:
    """A larger batch has fewer iterations, and must not go back."""
    save(tmp_path, **of(50))
    last = save(tmp_path, **of(20, 64))
    (tmp_path / "samples-0000000009999.partial").mkdir()
    (tmp_path / "samples-0000000009999.partial" / STATE_JSON).write_text("{}")
    assert found(tmp_path).folder == last
    assert found(tmp_path).first == 20 * 64 // GBS
    assert found(last).folder == last


def test_where_there_is_no_checkpoint_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--resume: .*/gone does not exist"):
        found(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--resume: .*/file is not a directory"):
        found(tmp_path / "file")
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        found(tmp_path)
    (tmp_path / "iteration-00000007").mkdir()
    (tmp_path / "iteration-00000007" / STATE_JSON).write_text("{}")
    with pytest.raises(ValueError, match="has checkpoints of an earlier version"):
        found(tmp_path)


def test_another_training_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert found(tmp_path).first == 7
    assert found(tmp_path).folder == folder
    with pytest.raises(ValueError, match="it was trained with --seed 0, and this run has 5"):
        found(tmp_path, seed=5)
    with pytest.raises(ValueError, match=r"trained with --optimizer\.learning-rate 0\.004, and this run has 0\.1"):
        found(tmp_path, optimizer=replace(config(None).optimizer, learning_rate=0.1))
    save(tmp_path, **of(1, 7 * GBS + 1))
    with pytest.raises(ValueError, match="not a whole number of global batches of 16: choose another"):
        found(tmp_path)
    save(tmp_path, **of(100))
    with pytest.raises(ValueError, match="it has trained all of the 100 iterations asked for"):
        found(tmp_path)


def test_a_checkpoint_of_an_earlier_version_lacks_fields_of_later_ones(tmp_path: Path) -> None:
    """These have their defaults; a field without a default is an error."""
    given = state()["config"]
    older = {key: value for key, value in given["model"].items() if key not in ("raw_ids", "table_scale")}
    save(tmp_path, config=given | {"model": older})
    assert found(tmp_path).first == 7
    doubled = replace(config(None).model, table_scale=2.0)
    with pytest.raises(ValueError, match=r"it was trained with --model\.table-scale 1\.0, and this run has 2\.0"):
        found(tmp_path, model=doubled)
    del older["num_embeddings"]
    save(tmp_path, config=given | {"model": older})
    with pytest.raises(ValueError, match=r"it was trained with --model\.num-embeddings None, and this run has \["):
        found(tmp_path)


def test_an_empty_field_of_one_version_only_is_no_difference(tmp_path: Path) -> None:
    of_another = as_json(config(None))
    of_another["model"]["no_such_field"] = None
    save(tmp_path, config=of_another)
    assert found(tmp_path).first == 7
    of_another["model"]["no_such_field"] = 5
    save(tmp_path, config=of_another)
    with pytest.raises(ValueError, match=r"trained with --model\.no-such-field 5, and this run has None"):
        found(tmp_path)


def test_a_run_by_time_goes_on_for_its_time(tmp_path: Path) -> None:
    """Whatever it has trained: only the end of the data ends it."""
    save(tmp_path, **of(5000))
    by_time = {"iterations": None, "min_time": 10.0, "warmup_iterations": 50}
    schedule = plan_schedule(config(tmp_path, **by_time), None, 2)
    assert found(tmp_path, schedule, **by_time).first == 5000
    of_data = replace(schedule, most=5000)
    with pytest.raises(ValueError, match="it has trained all of the 5000 iterations"):
        found(tmp_path, of_data, **by_time)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"schema": 1}, "has schema 1; this version reads 2"),
    "samples in words": ({"samples": "112"}, "samples is '112', expected int"),
    "no samples": ({"samples": 0, "losses": []}, "samples is 0, and a checkpoint is of a model that was trained"),
    "negative samples": ({"samples": -16}, "samples is -16"),
    "other samples": ({"samples": 128}, "samples is 128, and the losses are those of 112"),
    "a size of 0": ({"losses": [{"global_batch_size": 0, "losses": [0.5]}]}, "a global_batch_size is not positive"),
    "a null loss": ({"losses": [{"global_batch_size": GBS, "losses": [None] * 7}]}, r"losses\[0\] is None"),
    "losses as before": ({"losses": [0.5] * 7}, r"losses\[0\] is 0\.5"),
    "NaN": ({"losses": [{"global_batch_size": GBS, "losses": [float("nan")] * 7}]}, "which JSON cannot hold"),
    "auc": ({"auc": 1.5}, r"auc is 1\.5"),
    "run": ({"run_id": "a\x1b[2Jb"}, r"run_id is 'a\\x1b\[2Jb', which is no name of a folder"),
    "log": ({"mlperf_log": LOG + "\x1b[2J\n"}, "line 3 of mlperf_log is no line of an MLPerf log"),
    "event": ({"mlperf_log": ":::MLLOG []\n"}, "line 1 of mlperf_log is no line of an MLPerf log"),
    "config": ({"config": None}, "config is None"),
    "data": (
        {"data_files": {"day_0": {"sample": 1, "blake2b": None}}},
        r"data_files\.day_0\.sample is 1, expected str",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_cannot_be_is_named(tmp_path: Path, what: str) -> None:
    changes, said = WRONG[what]
    folder = save(tmp_path)
    (folder / STATE_JSON).write_text(json.dumps({**state(), **changes}))
    with pytest.raises(ValueError, match=rf"--resume: .*state\.json.*{said}"):
        found(tmp_path)


def test_a_state_without_a_field_or_without_text_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path)
    content = dict(state())
    del content["losses"]
    (folder / STATE_JSON).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"state\.json lacks losses"):
        found(tmp_path)
    (folder / STATE_JSON).write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is corrupt at byte 0"):
        read_run_state(folder)
    (folder / STATE_JSON).write_text("[]")
    with pytest.raises(ValueError, match="expected an object"):
        read_run_state(checkpoint_in(tmp_path))


def test_another_global_batch_is_refused_where_steps_or_rates_count_batches(tmp_path: Path) -> None:
    """DLRMv4's windows drop what fills no batch, and its rate rises by iterations; DLRM-DCNv2 has neither."""
    given = replace(preset("mlperf-dlrmv4"), local_batch_size=64, resume=tmp_path)
    save(tmp_path, config=as_json(given), **of(6, 128))
    schedule = partial(Schedule, iterations=100, evaluate_every=None, iterations_per_epoch=100)
    with pytest.raises(ValueError, match=r"global batches of 128 .*this run's have 64: .*--local-batch-size 128"):
        _check_batch(tmp_path, 128, given, 64)
    with pytest.raises(ValueError, match=r"this run's have 192: .* use another number of ranks"):
        _check_batch(tmp_path, 128, given, 192)
    for size in (64, 128):
        _check_batch(tmp_path, 128, replace(given, local_batch_size=size), 128)
    _check_batch(tmp_path, 128, config(tmp_path), 64)
    with patch.object(saved_state, "_check_data"), pytest.raises(ValueError, match="this run's have 64"):
        find_checkpoint(given, schedule(global_batch_size=64))


@pytest.mark.parametrize("manifest", [True, False])
def test_data_of_other_content_are_refused(tmp_path: Path, manifest: bool) -> None:
    paths = []
    for seed in range(2):
        path, _, _ = generate(PlantedConfig(path=tmp_path / f"data-{seed}", samples_per_day=600, seed=seed))
        paths.append(path)
        if not manifest:
            (path / MANIFEST).unlink()
    given = [
        replace(preset("smoke"), data=replace(preset("smoke").data, path=path), local_batch_size=8) for path in paths
    ]
    known = data_content(given[0].data)
    assert all((content["blake2b"] is not None) == manifest for content in known.values())
    save(tmp_path, config=as_json(given[0]), data_files=known)
    for of_run in given:
        of_run = replace(of_run, resume=tmp_path)
        schedule = plan_schedule(replace(of_run, warmup_iterations=1), 1800, 2)
        if of_run.data.path == paths[0]:
            assert find_checkpoint(of_run, schedule) is not None
            continue
        with pytest.raises(ValueError, match=r"data-1/day_0_dense\.npy has another content than the file"):
            find_checkpoint(of_run, schedule)
    save(tmp_path, config=as_json(given[0]), data_files={})
    with pytest.raises(ValueError, match="has another content"):
        find_checkpoint(replace(given[0], resume=tmp_path), schedule)


def test_random_batches_have_no_files() -> None:
    assert data_content(DataConfig(source="random")) == {}


def test_losses_are_kept_with_the_size_of_their_batch() -> None:
    first = extended([], 4, [0.9, 0.8])
    second = extended(first, 4, [0.7])
    third = extended(second, 8, [0.6, 0.5])
    assert first == [{"global_batch_size": 4, "losses": [0.9, 0.8]}]
    assert third == [
        {"global_batch_size": 4, "losses": [0.9, 0.8, 0.7]},
        {"global_batch_size": 8, "losses": [0.6, 0.5]},
    ]
    assert extended(third, 8, []) == third
    arrays = history_arrays(third)
    assert np.array_equal(arrays["loss_before"], np.array([0.9, 0.8, 0.7, 0.6, 0.5], np.float32))
    assert arrays["samples_before"].tolist() == [4, 8, 12, 20, 28]
    assert history_arrays([]) == {}


def test_whose_a_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path)
    assert not of_another_user(folder)
    me = os.geteuid()
    monkeypatch.setattr(saved_state.os, "geteuid", lambda: me + 1)
    assert of_another_user(folder)


def automatic(memory: Path, disk: Path | None) -> RunConfig:
    saves = CheckpointConfig(path=disk)
    return config(Path("auto"), snapshot=SnapshotConfig(every=5, path=memory), checkpoint=saves)


def test_auto_takes_the_newest_of_memory_and_disk(tmp_path: Path) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    given = automatic(memory, disk)
    schedule = plan_schedule(given, None, 2)
    assert find_checkpoint(given, schedule) is None
    memory.mkdir()
    disk.mkdir()
    for path, iterations in ((disk, 7), (memory, 7), (disk, 9), (memory, 12)):
        newest = save(path, **of(iterations))
        resumed = find_checkpoint(given, schedule)
        assert resumed is not None
        assert (resumed.folder, resumed.first) == (newest, iterations)
    torn = newest.rename(memory / "slot-0")
    assert (torn / STATE_JSON).is_file()
    resumed = find_checkpoint(given, schedule)
    assert resumed is not None
    assert resumed.folder == disk / checkpoint_name(9 * GBS)


def test_memory_without_a_complete_snapshot_is_not_resumed_by_name(tmp_path: Path) -> None:
    """A run that was killed while it copied leaves the state of a new snapshot over pieces of an old one."""
    memory, link = tmp_path / "memory", tmp_path / "link"
    memory.mkdir()
    save(memory, **of(9)).rename(memory / "slot-0")
    link.symlink_to(memory / "slot-0")
    for path in (memory / "slot-0", link):
        with pytest.raises(ValueError, match=f"--resume: {path} is a snapshot that was not finished: .* or {memory} "):
            found(path)
    whole = save(memory, **of(7))
    assert found(memory).folder == whole


def test_auto_takes_none_of_two_trainings(tmp_path: Path) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    save(disk, **of(7))
    other = [{"global_batch_size": GBS, "losses": [0.5] * 6 + [0.25] * 3}]
    save(memory, samples=9 * GBS, losses=other)
    given = automatic(memory, disk)
    with pytest.raises(ValueError, match="are of different trainings: name the one to continue from"):
        find_checkpoint(given, plan_schedule(given, None, 2))


CAPACITIES = {"iteration": {"events": 2048}}


def test_capacities_go_to_a_run_with_the_same_pipeline_and_batches(tmp_path: Path) -> None:
    """Others count other samples, or have other shapes."""
    save(tmp_path, **of(8), capacities=CAPACITIES)
    assert found(tmp_path).capacities == CAPACITIES
    static = replace(config(tmp_path), pipeline=StaticOptions())
    for other, ranks in ((replace(config(tmp_path), local_batch_size=GBS), 1), (config(tmp_path), 4), (static, 2)):
        resumed = find_checkpoint(other, plan_schedule(other, None, ranks))
        assert resumed is not None
        assert resumed.capacities == {}


def test_a_checkpoint_of_an_earlier_version_has_no_capacities(tmp_path: Path) -> None:
    save(tmp_path, **of(7))
    assert found(tmp_path).capacities == {}


@pytest.mark.parametrize(
    ("capacities", "message"),
    [
        ({"iteration": {"events": 0}}, "a capacity is not positive"),
        ({"iteration": {"events": "8"}}, "capacities.iteration.events is '8', expected int"),
    ],
)
def test_damaged_capacities_are_refused(tmp_path: Path, capacities: Any, message: str) -> None:
    save(tmp_path, **of(7), capacities=capacities)
    with pytest.raises(ValueError, match=message):
        found(tmp_path)
