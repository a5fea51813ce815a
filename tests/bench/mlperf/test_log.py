"""The MLPerf log against MLPerf's own checker, and its behaviour under threads."""

import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.config import MLPerfConfig
from dlrm_bench.bench.mlperf.log import MLPerfLog, check_compliance
from dlrm_bench.dlrm.config import OptimizerConfig, TableOptimizer

TRAIN_SAMPLES = 4195197692
EVAL_SAMPLES = 89137319
# fmt: off
INIT_KEYS = [
    "cache_clear", "init_start",
    "submission_benchmark", "submission_org", "submission_division", "submission_status",
    "submission_platform", "seed", "global_batch_size", "opt_name", "opt_base_learning_rate",
    "opt_adagrad_learning_rate_decay", "opt_weight_decay", "opt_adagrad_initial_accumulator_value",
    "opt_adagrad_epsilon", "opt_learning_rate_warmup_steps", "opt_learning_rate_decay_start_step",
    "opt_learning_rate_decay_steps", "gradient_accumulation_steps", "train_samples", "eval_samples",
    "init_stop", "run_start", "epoch_start",
]
# fmt: on


def log_init(log: MLPerfLog, config: MLPerfConfig, batch: int = 55296) -> None:
    log.cache_clear(True)
    log.init_start()
    log.submission(config, platform="8 x NVIDIA H200")
    log.hyperparameters(
        seed=7,
        global_batch_size=batch,
        optimizer=OptimizerConfig(),
        train_samples=TRAIN_SAMPLES,
        eval_samples=EVAL_SAMPLES,
    )
    log.init_stop()


def log_eval(log: MLPerfLog, epoch_num: float, auc: float) -> None:
    log.eval_start(epoch_num)
    log.eval_accuracy(epoch_num, auc)
    log.eval_stop(epoch_num)


def log_closed_run(path: Path, status: str = "success") -> None:
    """GBS 55296 with an evaluation every twentieth of the epoch, the target reached at 0.75 to 0.76 epoch."""
    log = MLPerfLog(path)
    log_init(log, MLPerfConfig(org="Example", division="closed", clear_cache=True))
    log.run_start()
    log.epoch_start()
    interval = TRAIN_SAMPLES // (20 * 55296)
    epoch_num = 0.0
    for evaluation in range(1, 21):
        epoch_num = evaluation * interval * 55296 / TRAIN_SAMPLES
        auc = 0.7825 + 0.00135 * evaluation
        log_eval(log, epoch_num, auc)
        if auc >= 0.80275:
            break
    assert 0.74 < epoch_num < 0.77
    log.close(status, epoch_num)  # type: ignore[arg-type]


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def keys(path: Path) -> list[str]:
    return [event["key"] for event in events(path)]


@pytest.mark.parametrize(
    ("embedding", "name"), [("adagrad", "adagrad"), ("rowwise_adagrad", "rowwise_adagrad for tables, adagrad")]
)
def test_optimizers_are_named(tmp_path: Path, embedding: TableOptimizer, name: str) -> None:
    log = MLPerfLog(tmp_path / "log")
    log.hyperparameters(
        seed=7,
        global_batch_size=1,
        optimizer=OptimizerConfig(embedding=embedding),
        train_samples=TRAIN_SAMPLES,
        eval_samples=EVAL_SAMPLES,
    )
    assert [event["value"] for event in events(tmp_path / "log") if event["key"] == "opt_name"] == [name]


def test_open_division_run_passes_the_checker(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    log = MLPerfLog(path)
    log_init(log, MLPerfConfig(platform="two cores"), batch=1024)
    log.run_start()
    log.epoch_start()
    log_eval(log, 0.5, 0.74)
    log_eval(log, 1.0, 0.76)
    log.close("success", 1.0)
    assert keys(path) == [*INIT_KEYS, *["eval_start", "eval_accuracy", "eval_stop"] * 2, "run_stop", "epoch_stop"]
    assert next(e["value"] for e in events(path) if e["key"] == "submission_platform") == "two cores"
    verdict = check_compliance(path)
    assert verdict.passed, verdict.output


def test_closed_division_run_passes_the_checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    path = Path("../logs/result_0.txt")
    log_closed_run(path)
    verdict = check_compliance(path)
    assert verdict.passed, verdict.output
    assert keys(path).count("eval_accuracy") == 15
    assert not list((tmp_path / "cwd").iterdir())
    assert [file.name for file in (tmp_path / "logs").iterdir()] == ["result_0.txt"]


def test_checker_trap_an_aborted_run_that_reached_the_target_fails(tmp_path: Path) -> None:
    log_closed_run(tmp_path / "log.txt", status="aborted")
    verdict = check_compliance(tmp_path / "log.txt")
    assert not verdict.passed
    assert "INFO - SUCCESS" in verdict.output  # so says the checker, by itself
    assert "'aborted', not 'success'" in verdict.output


def test_aborted_closed_run_below_the_target_fails(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    log = MLPerfLog(path)
    log_init(log, MLPerfConfig(division="closed"))
    log.run_start()
    log.epoch_start()
    log_eval(log, 0.05, 0.79)
    log.close("aborted", 0.06)
    verdict = check_compliance(path)
    assert not verdict.passed
    assert "Failed checks for eval_accuracy" in verdict.output


@pytest.mark.parametrize("key", ["opt_adagrad_epsilon", "run_stop"])
def test_checker_finds_a_missing_key(tmp_path: Path, key: str) -> None:
    path = tmp_path / "log.txt"
    log_closed_run(path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if f'"{key}"' not in line))
    verdict = check_compliance(path)
    assert not verdict.passed
    assert f"EXACTLY_ONE occurrence of '{key}' but found 0" in verdict.output


def test_checker_input_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"log\.txt is not a file"):
        check_compliance(tmp_path / "log.txt")
    (tmp_path / "log.txt").touch()
    with pytest.raises(ValueError, match=r"refuses ruleset '2\.7\.1'"):
        check_compliance(tmp_path / "log.txt", ruleset="2.7.1")
    assert not check_compliance(tmp_path / "log.txt").passed


def test_abort_within_an_evaluation_closes_it_with_its_own_epoch_num(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    log = MLPerfLog(path)
    log_init(log, MLPerfConfig())
    log.run_start()
    log.epoch_start()
    log.eval_start(0.25)
    log.close("aborted", 0.3)
    log.eval_accuracy(0.25, 0.8)
    log.eval_stop(0.25)
    log.close("success", 0.25)
    *_, started, eval_stop, run_stop, epoch_stop = events(path)
    assert started["key"] == "eval_start"
    assert (eval_stop["key"], eval_stop["metadata"]["epoch_num"]) == ("eval_stop", 0.25)
    assert (run_stop["key"], run_stop["metadata"]["status"]) == ("run_stop", "aborted")
    assert run_stop["metadata"]["epoch_num"] == 0.3
    assert (epoch_stop["key"], epoch_stop["metadata"]["epoch_num"]) == ("epoch_stop", 0.3)


def test_abort_before_the_run_leaves_no_run_stop(tmp_path: Path) -> None:
    log = MLPerfLog(tmp_path / "log.txt")
    log.init_start()
    log.close("aborted", 0.0)
    assert keys(tmp_path / "log.txt") == ["init_start"]


def test_close_from_two_threads_logs_one_end_and_nothing_after_it(tmp_path: Path) -> None:
    for attempt in range(50):
        path = tmp_path / f"{attempt}.txt"
        log = MLPerfLog(path)
        log.run_start()
        barrier = threading.Barrier(3)

        def at_once(act: Callable[[], None], barrier: threading.Barrier = barrier) -> threading.Thread:
            thread = threading.Thread(target=lambda: (barrier.wait(), act()))
            thread.start()
            return thread

        threads = [
            at_once(lambda log=log: log.close("aborted", 0.5)),
            at_once(lambda log=log: log.close("success", 0.5)),
            at_once(lambda log=log: log_eval(log, 0.4, 0.7)),
        ]
        for thread in threads:
            thread.join()
        logged = keys(path)
        assert logged[-2:] == ["run_stop", "epoch_stop"]
        assert logged.count("run_stop") == 1
        assert logged.count("eval_start") == logged.count("eval_stop")


def test_every_event_is_on_disk_at_once_and_names_its_call_site(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    log = MLPerfLog(path)
    log.cache_clear(False)
    (event,) = events(path)
    assert event["value"] is False
    assert event["metadata"]["file"] == "tests/bench/mlperf/test_log.py"
    log.close("aborted", 0.0)


def test_instances_are_independent_and_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second, other_rank = MLPerfLog(tmp_path / "1"), MLPerfLog(tmp_path / "2"), MLPerfLog(None)
    first.init_start()
    second.cache_clear(True)
    log_init(other_rank, MLPerfConfig())
    other_rank.close("success", 1.0)
    first.close("aborted", 0.0)
    second.init_start()
    assert keys(tmp_path / "1") == ["init_start"]
    assert keys(tmp_path / "2") == ["cache_clear", "init_start"]
    assert capfd.readouterr() == ("", "")


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("kept")
    with pytest.raises(FileExistsError, match=r"log\.txt"):
        MLPerfLog(tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text() == "kept"


def test_a_full_disk_loses_nothing_and_prints_no_traceback(tmp_path, capfd):
    log = MLPerfLog(tmp_path / "log")
    log.cache_clear(False)
    assert log._file is not None
    log._file.setStream(open("/dev/full", "w"))  # noqa: SIM115  # which the log closes
    log.init_start()
    log.note("and a line for people")
    log.close("aborted", 0.0)
    assert log.failure is not None
    assert log.failure.errno == errno.ENOSPC
    first, second, third = log.text.splitlines()
    assert '"cache_clear"' in first
    assert '"init_start"' in second
    assert third == "# and a line for people"
    assert capfd.readouterr().err == ""
