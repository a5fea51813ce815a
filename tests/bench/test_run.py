"""Whole runs on two ranks: to the target, past it, and into every mistake; all ranks end, and the log is closed."""

import json
import os
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.checkpoints.saved_state import STATE_JSON, checkpoint_name
from dlrm_bench.bench.compare.sides import read_side
from dlrm_bench.bench.machine.source import source_hash
from dlrm_bench.bench.mlperf.log import check_compliance
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.record import Record, read_record
from dlrm_bench.bench.run_files import LOG_NAME
from dlrm_bench.dlrm.data.npy import member_span
from dlrm_bench.dlrm.dcnv2.data.criteo import multi_hot_file
from dlrm_bench.dlrm.dcnv2.data.expansion import FOLDER
from dlrm_bench.dlrm.dcnv2.data.manifest import read_manifest
from dlrm_bench.dlrm.dcnv2.data.planted import PlantedConfig, generate
from tests.launched import Ended, forked_launch

SAMPLES_PER_DAY = 6000
TRAIN_SAMPLES = 3 * SAMPLES_PER_DAY
LOCAL_BATCH = 128
GBS = 2 * LOCAL_BATCH
CADENCE = TRAIN_SAMPLES // (20 * GBS)
ITERATIONS = TRAIN_SAMPLES // GBS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _, _ = generate(PlantedConfig(path=tmp_path_factory.mktemp("data"), samples_per_day=SAMPLES_PER_DAY))
    return path


def launch(data: Path, folder: Path, *arguments: str, ranks: int = 2) -> Ended:
    common = ["--data.path", str(data), "--results-dir", str(folder / "results"), "--run-id", "x"]
    sizes = ["--local-batch-size", str(LOCAL_BATCH), "--warmup-iterations", "2"]
    return forked_launch(ranks, folder, [*common, *sizes, *arguments])


def events(folder: Path) -> list[dict[str, Any]]:
    return read_events(folder / "results" / "x" / LOG_NAME)


def read_events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]


def metadata(folder: Path, key: str) -> list[dict[str, Any]]:
    return [event["metadata"] for event in events(folder) if event["key"] == key]


def values(folder: Path, key: str) -> list[Any]:
    return [event["value"] for event in events(folder) if event["key"] == key]


def assert_aborted(folder: Path, ended: Ended) -> None:
    """Every rank ended by itself with an error; the log is closed as aborted, and there is no record."""
    assert all(status in (1, 2) for status in ended.statuses), ended
    assert [end["status"] for end in metadata(folder, "run_stop")] == ["aborted"]
    assert events(folder)[-1]["key"] == "epoch_stop"
    assert len(metadata(folder, "eval_start")) == len(metadata(folder, "eval_stop"))
    assert not (folder / "results" / "x" / "run.json").exists()


# Runs that end well.


@pytest.fixture(scope="module")
def reached(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended, Record]:
    folder = tmp_path_factory.mktemp("reached")
    ended = launch(data, folder, "--target-auc", "0.6")
    assert ended.statuses == [0, 0], ended
    return folder, ended, read_record(folder / "results" / "x")


def test_the_target_is_reached_and_recorded(data, reached):
    folder, ended, record = reached
    manifest = read_manifest(data)
    assert manifest is not None
    training = record.run["training"]
    assert training is not None
    assert training["status"] == "success"
    assert training["target"] == 0.6
    assert 0.6 <= training["auc"] < training["best_auc"] == manifest.best_auc
    iterations = len(record.losses)
    assert record.iterations_ms.shape == (2, iterations)
    assert training["epoch_num"] == pytest.approx(iterations * GBS / TRAIN_SAMPLES)
    assert training["losses"]["last"] < training["losses"]["first"]
    assert "target 0.60000 reached" in ended.outputs[0]
    evaluations = training["evaluations"]
    assert evaluations["samples"] == SAMPLES_PER_DAY // 2
    assert len(evaluations["seconds"]) == len(metadata(folder, "eval_stop"))
    assert all(seconds > 0 for seconds in evaluations["seconds"])
    assert f"of {SAMPLES_PER_DAY // 2:,} samples" in ended.outputs[0]
    assert ended.outputs[1] == ""
    assert record.run["git"]["source"] == source_hash(ROOT)
    assert record.run["provenance"]["packages"]["torch"] == torch.__version__


def test_the_log_passes_the_checker(reached):
    folder, _, _ = reached
    verdict = check_compliance(folder / "results" / "x" / LOG_NAME, "6.0.0")
    assert verdict.passed, verdict.output
    assert values(folder, "global_batch_size") == [GBS]
    assert values(folder, "train_samples") == [TRAIN_SAMPLES]
    assert values(folder, "eval_samples") == [SAMPLES_PER_DAY // 2]
    assert [end["status"] for end in metadata(folder, "run_stop")] == ["success"]


def test_the_run_stops_at_the_first_evaluation_that_reaches_the_target(reached):
    folder, _, record = reached
    aucs = values(folder, "eval_accuracy")
    assert all(auc < 0.6 for auc in aucs[:-1])
    training = record.run["training"]
    assert training is not None
    assert aucs[-1] == training["auc"]
    assert len(record.losses) == len(aucs) * CADENCE


def test_a_missed_target(data, tmp_path):
    manifest = read_manifest(data)
    assert manifest is not None
    ended = launch(data, tmp_path, "--target-auc", str(manifest.best_auc - 1e-6))
    assert ended.statuses == [3, 3]
    assert "missed" in ended.outputs[0]
    assert [end["status"] for end in metadata(tmp_path, "run_stop")] == ["aborted"]
    assert not check_compliance(tmp_path / "results" / "x" / LOG_NAME, "6.0.0").passed
    record = read_record(tmp_path / "results" / "x")
    training = record.run["training"]
    assert training is not None
    assert training["status"] == "aborted"
    assert len(record.losses) == ITERATIONS
    evaluated = [*range(CADENCE, ITERATIONS + 1, CADENCE)]
    if ITERATIONS % CADENCE:
        evaluated.append(ITERATIONS)
    for key in ("eval_start", "eval_accuracy", "eval_stop"):
        assert [event["epoch_num"] for event in metadata(tmp_path, key)] == pytest.approx(
            [iteration * GBS / TRAIN_SAMPLES for iteration in evaluated]
        )


def test_a_run_without_a_target_does_not_look_failed(data, tmp_path):
    """Its log closes with success, and passes for no submission all the same. It ends by time."""
    flags = ("--target-auc", "None", "--min-time", "0.2", "--preset", "smoke", "--mlperf.division", "closed")
    flags = (*flags, "--warmup-time", "0.02")
    ended = launch(data, tmp_path, *flags)
    assert ended.statuses == [0, 0], ended
    assert "closed: logged as open, because a generator made the data; the model is not MLPerf's" in ended.outputs[0]
    assert ended.outputs[1] == ""
    record = read_record(tmp_path / "results" / "x")
    assert record.latencies_ms.sum() >= 199 or len(record.losses) == ITERATIONS
    passed = int(np.searchsorted(np.cumsum(record.iterations_ms[0], dtype=np.float64), 20)) + 1
    assert record.run["warmup_iterations"] == max(record.run["config"]["warmup_iterations"], passed)
    assert len(record.losses) == record.iterations_ms.shape[1] > 2
    log = tmp_path / "results" / "x" / LOG_NAME
    assert [end["status"] for end in metadata(tmp_path, "run_stop")] == ["success"]
    assert values(tmp_path, "submission_division") == ["open"]
    training = read_record(log.parent).run["training"]
    assert training is not None
    assert training["status"] == "no_target"
    assert read_side(log).warnings == []
    verdict = check_compliance(log, "6.0.0")
    assert not verdict.passed
    assert "eval_accuracy" in verdict.output


def test_one_seed_one_result(data, tmp_path):
    def losses(name: str, seed: int) -> np.ndarray:
        ended = launch(data, tmp_path / name, "--target-auc", "None", "--iterations", "12", "--seed", str(seed))
        assert ended.statuses == [0, 0], ended
        return read_record(tmp_path / name / "results" / "x").losses

    first = losses("first", 1)
    assert len(first) == 12
    assert np.array_equal(first, losses("again", 1))
    assert (first != losses("other", 2)).all()


def test_two_ranks_train_as_one_with_the_global_batch(data, reached, tmp_path):
    _, _, two = reached
    ended = launch(data, tmp_path, "--target-auc", "0.6", "--local-batch-size", str(GBS), ranks=1)
    assert ended.statuses == [0], ended
    one = read_record(tmp_path / "results" / "x")
    np.testing.assert_allclose(one.losses, two.losses, rtol=1e-5)
    assert one.run["training"]["auc"] == pytest.approx(two.run["training"]["auc"], abs=1e-5)  # type: ignore[index]


# The mistakes that users make, before training starts.


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--data.path", "nowhere"], "dlrm-bench data generate --preset smoke nowhere"),
        (["--target-auc", "0.99"], "--target-auc 0.99 is above 0.8"),
        (["--local-batch-size", "10000"], "--local-batch-size 10000 on 2 rank(s) exceeds the 18000 training samples"),
        (["--iterations", "5000"], f"--iterations 5000 exceeds one epoch, {ITERATIONS} global batches"),
        (["--precision", "tf32"], "--precision tf32 needs a GPU"),
        (["--local-batch-size", "1000000000000"], "16 batches of --local-batch-size 1000000000000 on 2 rank(s) take"),
        (["--data.train-days", "4"], "day_4_dense.npy does not exist"),
        (["--results-dir", __file__], "choose another --results-dir"),
        (["--model.num-embeddings", *["77"] * 26], "rows"),
    ],
)
def test_bad_input_is_refused_on_every_rank(data, tmp_path, arguments, error):
    ended = launch(data, tmp_path, *arguments)
    assert ended.statuses == [2, 2], ended
    for rank, output in enumerate(ended.outputs):
        # c10d may have a warning before it, such as one of a host name that nothing resolves.
        assert f"\nrank {rank}: error: " in f"\n{output}"
        assert error in output
        assert "Traceback" not in output
    assert not (tmp_path / "results" / "x").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--pipeline", "static", "--cuda-graph", "iteration"], "--cuda-graph iteration needs a GPU"),
        (["--schedule", "fused-sparse-dist"], "--schedule fused-sparse-dist needs a GPU"),
    ],
)
def test_what_needs_a_gpu_is_refused_before_anything_is_made(data, tmp_path, arguments, error):
    ended = launch(data, tmp_path, *arguments)
    assert ended.statuses == [2, 2], ended
    assert all(f"rank {rank}: error: {error}" in output for rank, output in enumerate(ended.outputs))
    assert not (tmp_path / "results").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_all_that_a_preset_lacks_here_is_named_together(data, tmp_path):
    too_much = ["--model.embedding-dim", "65536", "--model.bottom-mlp", "65536", "--local-batch-size", "1000000000000"]
    static = ["--pipeline", "static", "--cuda-graph", "iteration", *too_much]
    ended = launch(data, tmp_path, "--preset", "launch-bound", *static)
    assert ended.statuses == [2, 2], ended
    for rank, output in enumerate(ended.outputs):
        (line,) = [line for line in output.splitlines() if line.startswith(f"rank {rank}: error: ")]
        obstacles = [
            "error: --precision tf32 needs a GPU",
            "--cuda-graph iteration needs a GPU",
            "32 batches of --local-batch-size 1000000000000 on 2 rank(s) take",
            "tables and optimizer state need 107051.5 GB",
            "--preset smoke trains on any machine",
        ]
        assert [line.count(obstacle) for obstacle in obstacles] == [1] * 5, line
    assert not (tmp_path / "results").exists()


def test_expansion_tables_that_cannot_be_kept(data, tmp_path):
    shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns(FOLDER))
    (tmp_path / "data" / FOLDER).touch()
    ended = launch(tmp_path / "data", tmp_path, "--data.source", "one_hot")
    assert ended.statuses == [2, 2], ended
    for output in ended.outputs:
        assert "GB free, or choose another --data.path" in output
        assert "Traceback" not in output


def test_tables_that_do_not_fit(data, tmp_path):
    ended = launch(data, tmp_path, "--preset", "launch-bound", "--precision", "fp32", "--model.embedding-dim", "65536",
                   "--model.bottom-mlp", "65536")  # fmt: skip
    assert ended.statuses == [2, 2], ended
    for output in ended.outputs:
        assert "tables and optimizer state need 107051.5 GB, but the 2 rank(s) have" in output
        assert "--model.table-scale" in output
    assert not (tmp_path / "results").exists()


def test_a_run_that_is_refused_before_its_training_leaves_no_folder(data, tmp_path):
    earlier = tmp_path / "saved" / checkpoint_name(GBS)
    earlier.mkdir(parents=True)
    (earlier / STATE_JSON).write_text("{}")  # which is noticed after the run's own folder is made
    ended = launch(data, tmp_path, "--checkpoint.path", str(earlier.parent), "--checkpoint.every", "5")
    assert ended.statuses == [2, 2], ended
    assert all("has checkpoints of an earlier run" in output for output in ended.outputs)
    assert list((tmp_path / "results").iterdir()) == []


def test_an_existing_record_is_left_alone(data, tmp_path):
    record = tmp_path / "results" / "x"
    record.mkdir(parents=True)
    (record / "run.json").write_text("precious")
    ended = launch(data, tmp_path)
    assert ended.statuses == [2, 2]
    assert all("--run-id" in output for output in ended.outputs)
    assert [path.name for path in record.iterdir()] == ["run.json"]
    assert (record / "run.json").read_text() == "precious"


# Failures during the training.


def corrupt(data: Path, copy: Path, day: int, feature: int, sample: int, value: int) -> None:
    """A copy of the data set with one sample's first id of one feature replaced, and without checksums."""
    shutil.copytree(data, copy)
    manifest = read_manifest(copy)
    assert manifest is not None
    replace(manifest, files={}).write(copy)
    path = multi_hot_file(copy, day)
    with zipfile.ZipFile(path) as archive:
        _, end = member_span(path, archive.getinfo(f"{feature}.npy"))
    hot = preset("smoke").model.multi_hot_sizes[feature]
    with path.open("r+b") as file:
        file.seek(end - (SAMPLES_PER_DAY - sample) * hot * 4)
        file.write(np.int32(value).tobytes())


@pytest.mark.parametrize("reader", [0, 1])
def test_a_bad_id_that_one_rank_reads(data, tmp_path, reader):
    sample = 20 * GBS + reader * LOCAL_BATCH + 5
    corrupt(data, tmp_path / "data", day=0, feature=4, sample=sample, value=123456)
    ended = launch(tmp_path / "data", tmp_path, "--target-auc", "0.85", "--data.prefetch-batches", "1")
    assert_aborted(tmp_path, ended)
    error = f"day_0_sparse_multi_hot.npz[4.npy]: id 123456 of sample {sample} (feature cat_4) is outside its table"
    assert error in ended.outputs[reader]
    assert "error: " in ended.outputs[reader]
    assert "Traceback" not in ended.outputs[reader]
    other = 1 - reader
    assert f"rank {other}: rank {reader} failed: ValueError: {tmp_path / 'data'}/{error}" in ended.outputs[other]
    assert "Traceback" not in ended.outputs[other]
    assert len(values(tmp_path, "eval_accuracy")) >= 4


def test_a_bad_id_in_the_evaluation(data, tmp_path):
    corrupt(data, tmp_path / "data", day=3, feature=0, sample=200, value=-7)
    ended = launch(tmp_path / "data", tmp_path, "--target-auc", "0.85")
    assert_aborted(tmp_path, ended)
    assert "day_3_sparse_multi_hot.npz[0.npy]: id -7 of sample 200 (feature cat_0)" in ended.outputs[1]
    assert values(tmp_path, "eval_accuracy") == []


def test_a_data_directory_that_one_rank_lacks(data, tmp_path):
    """As on two nodes of which one has no data."""
    ended = forked_launch(2, tmp_path, ["--results-dir", str(tmp_path)], before=FileOnOneRank(data))
    assert 0 not in ended.statuses
    assert -9 not in ended.statuses
    assert "nowhere does not exist: generate" in ended.outputs[1]


class FileOnOneRank:
    """Gives rank 0 the data's path, and rank 1 one that does not exist."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def __call__(self) -> None:
        sys.argv += ["--data.path", str(self.data) if os.environ["RANK"] == "0" else "nowhere"]
