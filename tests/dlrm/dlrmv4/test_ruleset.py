"""DLRMv4 by ruleset 6.1.0: what its logs must have, and which division a run is of."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.config import MLPerfConfig, RunConfig
from dlrm_bench.bench.mlperf.division import counted_samples, division_of
from dlrm_bench.bench.mlperf.log import MLPerfLog, check_compliance
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dlrmv4 import ruleset
from dlrm_bench.dlrm.dlrmv4.cadence import cadence
from dlrm_bench.dlrm.dlrmv4.config import OptimizerConfig
from dlrm_bench.dlrm.dlrmv4.data.mlperf_checksums import EVAL_SAMPLES, TRAIN_SAMPLES
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.torchrec.options import TorchRecOptions

CLOSED = preset("mlperf-dlrmv4")
BATCH = 8192


@dataclass
class Samples:
    """A data set, as far as the division asks."""

    train_samples: int = TRAIN_SAMPLES
    eval_samples: int = EVAL_SAMPLES
    best_auc: float | None = None


def write_log(
    path: Path,
    config: RunConfig = CLOSED,
    *,
    shift: int = 0,
    division: str = "closed",
    aucs: tuple[float, ...] = (0.7, 0.76),
) -> str:
    """A run that evaluates from the first point on, or `shift` points later, with these AUCs; returns its text."""
    log = MLPerfLog(path, TRAIN_SAMPLES)
    log.cache_clear(True)
    log.init_start()
    log.submission("dlrmv4", MLPerfConfig(org="Example", division=division), "8 x H200")  # type: ignore[arg-type]
    log.hyperparameters(ruleset.hyperparameters(config, BATCH, TRAIN_SAMPLES, EVAL_SAMPLES))
    log.init_stop()
    log.run_start()
    log.epoch_start()
    points = cadence(TRAIN_SAMPLES, BATCH, 1000)
    for number, auc in enumerate(aucs):
        epoch_num = (points.first + (shift + number) * points.every) * BATCH / TRAIN_SAMPLES
        log.eval_start(epoch_num)
        log.eval_accuracy(epoch_num, auc)
        log.eval_stop(epoch_num)
        if number + 1 < len(aucs):
            log.block_start(epoch_num)
    log.close("success", epoch_num)
    return log.text


def test_a_log_of_the_closed_division_is_accepted(tmp_path: Path) -> None:
    text = write_log(tmp_path / "x")
    verdict = check_compliance(tmp_path / "x", "6.1.0")
    assert verdict.passed, verdict.output
    keys = [line.partition('"key": "')[2].partition('"')[0] for line in text.splitlines()]
    assert keys.index("global_batch_size") < keys.index("opt_base_learning_rate")
    blocks = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    assert keys[keys.index("run_start") + 1 :] == [*blocks, *blocks, "run_stop"]
    assert '"samples_count": 57344000, "epoch_num": 0.025' in text
    assert "epoch_start" not in text


def changed(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert text.count(old) > 0
        return text.replace(old, new)

    return change


def with_value(key: str, old: str, new: str) -> Callable[[str], str]:
    return changed(f'"{key}", "value": {old}', f'"{key}", "value": {new}')


def again(key: str, old: str, new: str) -> Callable[[str], str]:
    """Adds the line of a key once more, with another value, as a resumed run would."""

    def change(text: str) -> str:
        line = next(line for line in text.splitlines(keepends=True) if f'"{key}"' in line)
        return text + line.replace(old, new)

    return change


def without(key: str) -> Callable[[str], str]:
    return lambda text: "".join(line for line in text.splitlines(keepends=True) if f'"key": "{key}"' not in line)


def after(key: str, other: str) -> Callable[[str], str]:
    """Puts the line of a key after that of another one."""

    def change(text: str) -> str:
        lines = text.splitlines(keepends=True)
        moved = next(line for line in lines if f'"key": "{key}"' in line)
        lines.remove(moved)
        at = next(i for i, line in enumerate(lines) if f'"key": "{other}"' in line)
        return "".join([*lines[: at + 1], moved, *lines[at + 1 :]])

    return change


DISCLOSED = (
    "lowest_numerical_precision_in_linear",
    "lowest_numerical_precision_in_attn",
    "lowest_numerical_precision_in_comm",
    "tensor_parallelism",
    "pipeline_parallelism",
    "context_parallelism",
    "expert_parallelism",
    "micro_batch_size",
    "config_filename",
)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        *((without(key), key) for key in DISCLOSED),
        (changed('"value": "bfloat16"', '"value": "bf16"'), "lowest_numerical_precision_in_linear"),
        (changed('"value": "dlrmv4"', '"value": "hstu"'), "closed_hstu.yaml"),
        (after("global_batch_size", "opt_base_learning_rate"), "opt_base_learning_rate"),
        (with_value("opt_sparse_base_learning_rate", "1e-06", "2e-06"), "opt_sparse_base_learning_rate"),
        (with_value("max_sequence_length", "4096", "4095"), "max_sequence_length"),
        (changed('"samples_count": 57344000', '"samples_count": 57344001'), "eval_accuracy"),
        (again("config_filename", "run.json", "x"), "config_filename"),
    ],
)
def test_each_trap_is_refused(tmp_path: Path, change: Callable[[str], str], key: str) -> None:
    path = tmp_path / "x"
    path.write_text(change(write_log(tmp_path / "whole")))
    verdict = check_compliance(path, "6.1.0", ruleset.pinned_to_data)
    assert not verdict.passed
    assert key in verdict.output
    assert verdict.of_data in ((), (key,))


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_first_evaluation_is_neither_earlier_nor_later(tmp_path: Path, shift: int) -> None:
    write_log(tmp_path / "x", shift=shift)
    assert not check_compliance(tmp_path / "x", "6.1.0").passed


@pytest.mark.parametrize(("rate", "passes"), [(0.5e-6, True), (1.5e-6, True), (0.49e-6, False), (1.6e-6, False)])
@pytest.mark.parametrize("division", ["closed", "open"])
def test_rates_are_bound_in_either_division(tmp_path: Path, rate: float, passes: bool, division: str) -> None:
    config = replace(CLOSED, optimizer=OptimizerConfig(learning_rate=rate))
    write_log(tmp_path / "x", config, division=division)
    verdict = check_compliance(tmp_path / "x", "6.1.0", ruleset.pinned_to_data)
    assert verdict.passed == passes
    refused = ("opt_base_learning_rate", "opt_sparse_base_learning_rate")
    # The closed division compares the second with the first.
    assert verdict.of_data == (() if passes else refused[:1] if division == "closed" else refused)


def test_the_open_division_too_asks_for_the_target(tmp_path: Path) -> None:
    write_log(tmp_path / "x", division="open", aucs=(0.7, 0.749))
    verdict = check_compliance(tmp_path / "x", "6.1.0", ruleset.pinned_to_data)
    assert not verdict.passed
    assert verdict.of_data == ()


def test_a_resumed_log_says_everything_once(tmp_path: Path) -> None:
    """Its lines until then stand before its own; within a block, as a checkpoint is saved."""
    whole = write_log(tmp_path / "whole")
    lines = whole.splitlines(keepends=True)
    second = [i for i, line in enumerate(lines) if '"block_start"' in line][1]
    log = MLPerfLog(tmp_path / "resumed", TRAIN_SAMPLES)
    log.go_on("".join(lines[: second + 1]))
    points = cadence(TRAIN_SAMPLES, BATCH, 1000)
    epoch_num = (points.first + points.every) * BATCH / TRAIN_SAMPLES
    log.eval_start(epoch_num)
    log.eval_accuracy(epoch_num, 0.76)
    log.eval_stop(epoch_num)
    log.close("success", epoch_num)
    verdict = check_compliance(tmp_path / "resumed", "6.1.0")
    assert verdict.passed, verdict.output
    assert log.text.count("block_stop") == whole.count("block_stop") == 2


def test_a_log_that_goes_on_after_its_last_evaluation_begins_a_block(tmp_path: Path) -> None:
    """The first run's iterations ended with that evaluation, and no block followed it."""
    whole = write_log(tmp_path / "whole", aucs=(0.7,))
    log = MLPerfLog(tmp_path / "resumed", TRAIN_SAMPLES)
    log.go_on(whole[: whole.index(":::MLLOG", whole.index('"eval_stop"'))])
    points = cadence(TRAIN_SAMPLES, BATCH, 1000)
    for _ in range(2):  # which a block that is open leaves as it is
        log.block_go_on(points.first * BATCH / TRAIN_SAMPLES)
    log.eval_start((points.first + points.every) * BATCH / TRAIN_SAMPLES)
    keys = [json.loads(line.split(" ", 1)[1])["key"] for line in log.text.splitlines() if line.startswith(":::MLLOG")]
    kept = [key for key in keys if key.startswith(("block", "eval_st"))]
    assert kept == [
        *("block_start", "block_stop", "eval_start", "eval_stop") * 1,
        "block_start",
        "block_stop",
        "eval_start",
    ]


@pytest.mark.parametrize(("batch", "rate"), [(10_240, 1.875e-6), (20_480, 3.75e-6), (8192, 0.5e-6)])
def test_rates_at_their_bounds_are_closed_whatever_their_rounding(batch: int, rate: float) -> None:
    config = replace(CLOSED, optimizer=replace(CLOSED.optimizer, learning_rate=rate))
    assert division_of(config, Samples(), batch) == ("closed", [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "comm"),
    [
        (TorchRecOptions(), "fp32"),
        (TorchRecOptions(quantized_comms="bf16"), "bfloat16"),
        (TorchRecOptions(quantized_comms="fp16"), "fp16"),
        (TorchRecOptions(dense_all_reduce="bf16"), "bfloat16"),
    ],
)
def test_number_formats_are_those_of_the_run(options: TorchRecOptions, comm: str) -> None:
    values = dict(ruleset.hyperparameters(replace(CLOSED, pipeline=options), BATCH, 1, 1))
    assert values["lowest_numerical_precision_in_comm"] == comm
    assert values["lowest_numerical_precision_in_attn"] == "bfloat16"
    assert dict(ruleset.hyperparameters(replace(CLOSED, precision="fp32"), BATCH, 1, 1))[DISCLOSED[0]] == "fp32"


def test_products_in_eight_bits_are_disclosed() -> None:
    model = replace(CLOSED.model, kernels="fused")
    rounded = replace(CLOSED, model=model, pipeline=StaticOptions(fp8=True))  # type: ignore[type-var]
    values = dict(ruleset.hyperparameters(rounded, BATCH, 1, 1))
    assert [values[key] for key in DISCLOSED[:2]] == ["fp8", "bfloat16"]
    assert division_of(rounded, Samples(), BATCH) == ("closed", [])  # type: ignore[arg-type]


def test_a_run_by_the_rules_is_closed() -> None:
    assert division_of(CLOSED, Samples(), BATCH) == ("closed", [])  # type: ignore[arg-type]
    dynamic = replace(CLOSED, pipeline=StaticOptions(dynamic_rows=9))
    assert division_of(dynamic, Samples(), BATCH)[0] == "closed"  # type: ignore[arg-type]
    same = replace(CLOSED.model, last_layer="candidates", recompute_layers=True, dropout_seed="same", content="items")  # type: ignore[type-var]
    assert division_of(replace(CLOSED, model=same), Samples(), BATCH)[0] == "closed"  # type: ignore[arg-type]
    assert counted_samples(CLOSED, Samples()) == TRAIN_SAMPLES  # type: ignore[arg-type]
    assert counted_samples(preset("smoke"), Samples()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "samples", "batch", "obstacle"),
    [
        ({}, Samples(best_auc=0.85), BATCH, "a generator made the data"),
        ({}, Samples(eval_samples=1), BATCH, "2290835423 training and 1 evaluation samples, MLPerf's"),
        ({"model": replace(CLOSED.model, attention_scale="maximum")}, Samples(), BATCH, "the model is not MLPerf's"),  # type: ignore[type-var]
        ({"model": replace(CLOSED.model, layers=2)}, Samples(), BATCH, "the model is not MLPerf's"),  # type: ignore[type-var]
        ({"data": replace(CLOSED.data, train_windows=75)}, Samples(), BATCH, "--data.train-windows is 75"),  # type: ignore[type-var]
        ({"target_auc": 0.74}, Samples(), BATCH, "--target-auc is 0.74, MLPerf's 0.75"),
        ({"evaluations_per_epoch": 100}, Samples(), BATCH, "--evaluations-per-epoch is 100, MLPerf's 1000"),
        ({"optimizer": OptimizerConfig(ramp_steps=100)}, Samples(), BATCH, "the optimizers are not MLPerf's"),
        ({"optimizer": OptimizerConfig(clip_norm=0.0)}, Samples(), BATCH, "the optimizers are not MLPerf's"),
        ({"optimizer": OptimizerConfig(learning_rate=2e-6)}, Samples(), BATCH, "--optimizer.learning-rate is 2e-06"),
        ({}, Samples(), 4096, "the global batch is 4096: reference convergence points are of 8192 to 32768"),
        ({}, Samples(), 65536, "the global batch is 65536"),
        (
            {"pipeline": StaticOptions(dynamic_rows=9, evict_rows=True)},
            Samples(),
            BATCH,
            "--evict-rows: evicted rows",
        ),
    ],
)
def test_what_else_is_open(changes: dict[str, Any], samples: Samples, batch: int, obstacle: str) -> None:
    division, obstacles = division_of(replace(CLOSED, **changes), samples, batch)  # type: ignore[arg-type]
    assert division == "open"
    assert any(obstacle in text for text in obstacles)
