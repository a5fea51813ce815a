"""The log reader on published logs, on our own, and on every kind of damage."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_bench.bench.compare.sides import read_side
from dlrm_bench.bench.config import MLPerfConfig
from dlrm_bench.bench.mlperf.log import MLPerfLog, check_compliance
from dlrm_bench.bench.mlperf.published_logs import LOG_COLUMNS, MLPerfRun, log_row, read_mlperf_log
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.run_files import LOG_NAME
from dlrm_bench.dlrm.dcnv2 import ruleset
from dlrm_bench.dlrm.dlrmv4.benchmark import DLRMV4
from tests.launched import forked_launch

LOGS = Path(__file__).resolve().parents[2] / "data" / "mlperf_logs" / "nvidia_8xh200_v4.0"
DLRMV4_LOGS = LOGS.parent / "amd_dlrmv4_reference"
PUBLISHED = LOGS / "result_0.txt"


def event(key: str, time_ms: float, value: object = None, **metadata: object) -> str:
    return ":::MLLOG " + json.dumps({"key": key, "time_ms": time_ms, "value": value, "metadata": metadata}) + "\n"


def small_log(start: int = 0) -> str:
    """GBS 100, 10,000 samples, half an epoch in 5 s of which 1 s evaluates: 50 iterations of 80 ms."""
    return (
        event("init_start", start)
        + event("submission_benchmark", start, "dlrm_dcnv2")
        + event("global_batch_size", start, 100)
        + event("train_samples", start, 10_000)
        + event("run_start", start + 1000)
        + event("eval_start", start + 5000, epoch_num=0.5)
        + event("eval_accuracy", start + 5500, 0.81, epoch_num=0.5)
        + event("eval_stop", start + 6000, epoch_num=0.5)
        + event("run_stop", start + 6000, status="success")
        + event("epoch_stop", start + 6000, epoch_num=0.5)
    )


def test_a_run_that_was_never_evaluated_has_no_time_to_train(tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    log.write_text("".join(line for line in small_log().splitlines(keepends=True) if "eval_" not in line))
    (run,) = read_mlperf_log(log)
    assert (run.status, run.time_to_train_minutes) == ("success", None)
    log.write_text(small_log())
    assert read_mlperf_log(log)[0].time_to_train_minutes == pytest.approx(5 / 60)


def test_the_published_8xh200_logs_give_3_25_ms() -> None:
    runs = [run for path in sorted(LOGS.glob("result_*.txt")) for run in read_mlperf_log(path)]
    assert len(runs) == 3
    assert sum(run.train_ms_per_iteration or 0 for run in runs) / 3 == pytest.approx(3.25, abs=0.005)
    first = runs[0]
    assert (first.benchmark, first.org, first.platform) == ("dlrm_dcnv2", "NVIDIA", "1xNVIDIA HGX H200")
    assert (first.global_batch_size, first.iterations, len(first.evals_ms)) == (55296, 56893, 15)
    assert first.time_to_train_minutes == pytest.approx(3.486, abs=0.001)
    assert first.eval_seconds == pytest.approx(1.563, abs=0.001)
    assert first.auc == pytest.approx(0.80309, abs=1e-5)
    assert (first.status, first.malformed_lines) == ("success", 0)


def test_a_row_of_a_table() -> None:
    (run,) = read_mlperf_log(PUBLISHED)
    row = dict(zip(LOG_COLUMNS, log_row(run), strict=True))
    assert row == {
        "log": "result_0.txt",
        "org": "NVIDIA",
        "global batch": "55296",
        "ms / iteration": "3.264",
        "evals": "15",
        "s / eval": "1.56",
        "time to train, min": "3.486",
        "s before training": "-",
        "AUC": "0.80309",
        "status": "success",
    }
    unknown = log_row(MLPerfRun(path=PUBLISHED))
    assert unknown == ("result_0.txt", "-", "-", "-", "0", "-", "-", "-", "-", "unfinished")


@pytest.mark.parametrize(
    ("batch", "to_target_s", "before_s", "steps_ms", "eval_s"),
    [
        (8192, 9510.790, 924.412, (1055.7, 758.9), 84.61),
        (16384, 6461.055, 882.498, (1476.0, 756.0), 55.49),
        (32768, 4799.500, 790.070, (4313.9, 809.8), 32.95),
    ],
)
def test_the_references_logs_of_dlrmv4(
    batch: int, to_target_s: float, before_s: float, steps_ms: tuple[float, float], eval_s: float
) -> None:
    """They say 'hstu', count samples in blocks, and go on beyond the target without a run_stop."""
    (path,) = (DLRMV4_LOGS / f"gbs_{batch}").glob("*.log")
    (run,) = read_mlperf_log(path)
    assert run.known is DLRMV4
    assert (run.org, run.platform, run.global_batch_size, run.status) == ("AMD", "MI350", batch, "unfinished")
    assert run.minutes_to_target == pytest.approx(to_target_s / 60)
    assert run.time_to_train_minutes is None  # which is what a submission is scored by
    assert run.seconds_before_training == pytest.approx(before_s)
    assert run.eval_seconds == pytest.approx(eval_s, abs=0.01)
    of_blocks = [(block.stop_ms - block.start_ms) * batch / block.samples for block in run.blocks]
    assert of_blocks[:2] == pytest.approx(steps_ms, abs=0.1)  # the first one compiles
    assert run.train_ms_per_iteration == pytest.approx(sum(steps_ms) / 2, abs=0.1)  # without what is after the target
    assert len(run.blocks) == 3
    row = dict(zip(LOG_COLUMNS, log_row(run), strict=True))
    assert row["time to train, min"] == f"{to_target_s / 60:.3f}"
    assert row["s before training"] == f"{before_s:.1f}"


def test_a_reference_name_counts_with_mlperfs_data_alone(tmp_path: Path) -> None:
    """Another model may be called hstu."""
    (path,) = (DLRMV4_LOGS / "gbs_8192").glob("*.log")
    other = tmp_path / "x.log"
    other.write_text(path.read_text().replace("2290835423", "60000"))
    assert read_mlperf_log(other)[0].known is None
    other.write_text(path.read_text().replace("2290835423", "60000").replace("hstu", "dlrmv4"))
    assert read_mlperf_log(other)[0].known is DLRMV4


def test_our_own_log(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    log = MLPerfLog(path)
    log.init_start()
    log.submission("dlrm_dcnv2", MLPerfConfig(org="Example"), platform="8 x NVIDIA H200")
    log.hyperparameters(ruleset.hyperparameters(preset("smoke"), 100, 10_000, 1000))
    log.init_stop()
    log.run_start()
    log.epoch_start()
    log.eval_start(0.5)
    log.eval_accuracy(0.5, 0.8)
    log.eval_stop(0.5)
    log.close("success", 0.5)
    (run,) = read_mlperf_log(path)
    assert (run.org, run.platform, run.iterations, run.auc) == ("Example", "8 x NVIDIA H200", 50, 0.8)
    assert (run.status, run.malformed_lines) == ("success", 0)


def test_our_own_log_of_random_batches(tmp_path: Path) -> None:
    """Without evaluations: how many iterations there were, run_stop says."""
    flags = ["--preset", "smoke", "--data.source", "random", "--data.random-batches", "2", "--target-auc", "None"]
    flags += ["--iterations", "12", "--warmup-iterations", "2", "--local-batch-size", "16"]
    ended = forked_launch(2, tmp_path, [*flags, "--results-dir", str(tmp_path), "--run-id", "x"])
    assert ended.statuses == [0, 0], ended
    record = read_record(tmp_path / "x").run
    assert record["training"] is not None
    assert record["training"]["epoch_num"] == 1
    (run,) = read_mlperf_log(tmp_path / "x" / LOG_NAME)
    assert (run.iterations, run.train_samples, run.epoch_num, run.malformed_lines) == (12, 12 * 32, 1, 0)
    (mean,) = read_side(tmp_path / "x" / LOG_NAME).series
    assert 0 < mean[0] == run.train_ms_per_iteration
    complaints = re.findall("Required .*", check_compliance(tmp_path / "x" / LOG_NAME, "6.0.0").output)
    assert len(complaints) == 3
    assert all("eval_" in complaint for complaint in complaints)  # it lacks nothing else


def test_train_time_leaves_out_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(small_log())
    (run,) = read_mlperf_log(path)
    assert run.train_ms_per_iteration == 80
    assert run.eval_seconds == 1


@pytest.mark.parametrize("kept", range(10))
def test_two_runs_in_one_file_of_which_the_first_may_have_died_anywhere(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "log"
    first = small_log().splitlines(keepends=True)
    path.write_text("".join(first[: len(first) - kept]) + small_log(100_000))
    runs = read_mlperf_log(path)
    assert runs[-1].train_ms_per_iteration == 80
    assert runs[-1].start_ms == 101_000
    assert len(runs) == (1 if kept == 9 else 2)  # of the first run an init_start alone is left
    if kept < 9:
        assert runs[0].status == ("success" if kept < 2 else "unfinished")


def header_first(start: int = 0) -> str:
    """small_log with its header before init_start, in the order of other authors."""
    first, *others = small_log(start).splitlines(keepends=True)
    return "".join((*others[:3], first, *others[3:]))


def test_a_header_before_init_start_belongs_to_its_run(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(header_first())
    (run,) = read_mlperf_log(path)
    assert (run.benchmark, run.global_batch_size, run.train_ms_per_iteration) == ("dlrm_dcnv2", 100, 80)


@pytest.mark.parametrize("kept", range(10))
def test_two_runs_with_headers_first_of_which_the_first_may_have_died_anywhere(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "log"
    first = header_first().splitlines(keepends=True)
    path.write_text("".join(first[: len(first) - kept]) + header_first(100_000))
    last = read_mlperf_log(path)[-1]
    assert (last.benchmark, last.train_ms_per_iteration, last.start_ms) == ("dlrm_dcnv2", 80, 101_000)


def test_a_second_run_that_repeats_only_run_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = small_log().splitlines(keepends=True)
    path.write_text("".join(lines + lines[4:]))
    assert [run.train_ms_per_iteration for run in read_mlperf_log(path)] == [80, 80]


def test_missing_run_stop(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(line for line in small_log().splitlines(keepends=True) if "run_stop" not in line))
    (run,) = read_mlperf_log(path)
    assert (run.status, run.train_ms_per_iteration, run.time_to_train_minutes) == ("unfinished", None, None)
    assert run.auc == 0.81


def test_malformed_lines_are_counted_and_cost_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = small_log().splitlines(keepends=True)
    bad = [
        ":::MLLOG {\n",
        ":::MLLOG\n",
        ":::MLLOG [1, 2]\n",
        ':::MLLOG {"key": 3, "time_ms": 4}\n',
        ':::MLLOG {"key": "run_stop", "time_ms": NaN}\n',
        ':::MLLOG {"key": "run_stop", "time_ms": "soon"}\n',
        ":::MLLOG " + "[" * 100_000 + "\n",
        "text\n",
    ]
    path.write_text("".join(a + b for a, b in zip(lines, [*bad, "", ""], strict=True)))
    (run,) = read_mlperf_log(path)
    assert (run.train_ms_per_iteration, run.malformed_lines) == (80, 7)


def test_values_of_the_wrong_type_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(small_log().replace("10000", '"many"').replace("0.81", "null"))
    (run,) = read_mlperf_log(path)
    assert (run.train_samples, run.auc, run.train_ms_per_iteration) == (None, None, None)


def test_prefixes_carriage_returns_and_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = small_log().replace("dlrm_dcnv2", "caf\u00e9").encode("latin-1", errors="replace").splitlines()
    path.write_bytes(b"\xff\xfe\x00\n" + b"".join(b"[1,0]<stdout>: \xe9 " + line + b"\r\n" for line in lines))
    (run,) = read_mlperf_log(path)
    assert run.train_ms_per_iteration == 80


def test_a_file_of_a_gigabyte(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:  # sparse: it takes no room on the disk
        file.write(small_log().encode() + b":::MLLOG ")
        file.truncate(1 << 30)
    begin = time.thread_time()
    (run,) = read_mlperf_log(path)
    assert time.thread_time() - begin < 60  # takes 1
    assert (run.train_ms_per_iteration, run.malformed_lines) == (80, 1)


def test_files_without_a_run_are_named(tmp_path: Path) -> None:
    for content in (b"", b"no log\n", "\n".join(small_log().splitlines()[5:]).encode()):
        path = tmp_path / "log"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="log holds no MLPerf run"):
            read_mlperf_log(path)
    with pytest.raises(ValueError, match="absent cannot be read"):
        read_mlperf_log(tmp_path / "absent")


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_damage_is_an_error_or_a_row(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(PUBLISHED.read_bytes())
    for _ in range(data.draw(st.integers(1, 20))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position : position + data.draw(st.integers(0, 300))] = data.draw(st.binary(max_size=8))
    path = tmp_path_factory.mktemp("damaged") / "result_0.txt"
    path.write_bytes(content)
    for run in read_mlperf_log(path):
        assert run.train_ms_per_iteration is None or isinstance(run.train_ms_per_iteration, float)
