"""The page from records of every kind, and in a real browser where there is one."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import cast

import pytest

from dlrm_bench.bench.analysis.compare import side_of_records
from dlrm_bench.bench.analysis.ladder import Ladder
from dlrm_bench.bench.ladder import run_ladder as ladder_module
from dlrm_bench.bench.ladder.launching import LAUNCHER
from dlrm_bench.bench.ladder.run_ladder import run_ladder
from dlrm_bench.bench.ladder.rungs import Rung
from dlrm_bench.bench.measure.mlperf_log import MLPerfLog
from dlrm_bench.bench.records.limits import LIMITS_JSON
from dlrm_bench.bench.records.record import TrainingOutcome, read_record
from dlrm_bench.bench.report.page import PUBLISHED, _marks, _published, write_report
from dlrm_bench.bench.report.sources import Material, collect
from dlrm_bench.dlrm.config import OptimizerConfig
from tests.bench.analysis.test_mlperf_logs import LOGS
from tests.bench.made_records import H200, configured, edit, profile, recorded_runs, telemetry, write
from tests.bench.records.test_limits import some_limits

RUNS = recorded_runs()
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of everything."""
    results = tmp_path / "results"
    runs = iter(RUNS)

    def pretend(flags: list[str], processes: int, output: Path, launcher: Path = LAUNCHER) -> None:
        run_id = flags[-1]
        if run_id == "host-same":
            raise ValueError("this twin failed")
        known = {"profile": profile()} if run_id.startswith("host-") else {}
        write(results / "ladder" / run_id, next(runs) * (0.5 if run_id.endswith("fast") else 1.0), **known)

    monkeypatch.setattr(ladder_module, "run_forked", pretend)
    (results / "ladder").mkdir(parents=True)
    rungs = (Rung("stock", ()), Rung("fast", (), "Half of the work."), Rung("same", ()))
    folder, command = results / "ladder", "dlrm-bench ladder"
    list(run_ladder(rungs, folder=folder, processes=2, rounds=3, seed=0, flags=[], command=command, host=True))
    write(results / "timed-1", RUNS[20], telemetry=telemetry(throttled=True))
    write(results / "timed-2", RUNS[21], minute=1)
    write(results / "twin-<b>", RUNS[22], profile=profile())
    (results / "limits").mkdir()
    (results / "limits" / LIMITS_JSON).write_text(json.dumps(some_limits()))
    shutil.copytree(LOGS, results / "mlperf")
    (results / "unfinished").mkdir()
    (results / "unfinished" / "result_0.txt").touch()
    return results


def test_everything_is_found(results: Path) -> None:
    material = collect([results])
    assert [record.run["id"] for record in material.records] == ["timed-1", "timed-2"]
    assert [twin.run["id"] for twin in material.twins] == ["twin-<b>"]
    assert [(rung, twin.run["id"]) for _, rung, twin in material.ladder_twins] == [
        ("stock", "host-stock"),
        ("fast", "host-fast"),
    ]
    assert (len(material.ladders), len(material.limits), len(material.logs)) == (1, 1, 1)


def test_the_page_is_one_small_file_that_loads_nothing(results: Path, tmp_path: Path) -> None:
    page = write_report([results], tmp_path / "out")
    text = page.read_text()
    assert page.stat().st_size < 2e6
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    HTMLParser().feed(text)
    assert set(re.findall(r"<h2 id=\"(\w+)\"", text)) == {
        "ladder", "latency", "series", "stages", "kernels", "floor", "published", "machines",
    }  # fmt: skip
    drawn = {picture.stem for picture in (tmp_path / "out").glob("*.png")}
    assert len(drawn) == text.count("<img ") >= 10
    for kind in ("stages_gpu", "stages_host", "timelines"):  # one of each ladder, and one of what is in none
        assert {f"{kind}_ladder", f"{kind}_records-of-no-ladder"} <= drawn
    assert "twin-&lt;b&gt;" in text
    assert "<b>" not in text
    assert "throttled (power cap): timed-1" in text
    assert "0.00000" not in text
    assert "<strong>fast</strong>: Half of the work." in text
    assert "<td>missing</td>" not in text  # of rungs without twins nothing is said
    assert re.search(r"<td>fast</td><td>12.000</td>(<td>12</td>){4}<td>88%</td>", text)
    assert text.count("<summary>") == 3
    assert re.search(r"<td>GEMMs</td><td>dense forward backward</td><td>30</td><td>2500.0</td><td>1000.0</td>", text)
    assert re.search(r"<td>element-wise 0</td><td>other</td><td>1</td><td>100.0</td><td>not known</td>", text)


def test_kernels_without_limits_and_twins_without_counts(tmp_path: Path) -> None:
    write(tmp_path / "results" / "counted", RUNS[0], profile=profile())
    none = dict.fromkeys(("gpu", "stages_ms", "host_stages_ms", "timeline", "kernels"))
    clocks = {"cpu_ms": 1.0, "launching_thread_ms": 1.0, "wall_ms": 2.0}
    write(tmp_path / "results" / "nvtx", RUNS[0], profile={"host": clocks, **none})
    text = write_report([tmp_path / "results"], tmp_path / "out").read_text()
    assert "no limits record of this work" in text
    assert re.search(r"<td>nvtx</td><td>1.000</td><td>2.000</td>\s*(<td>missing</td>\s*){5}", text)


def test_a_twin_with_empty_blocks_has_missing_cells(tmp_path: Path) -> None:
    edit(write(tmp_path / "results" / "twin", RUNS[0], profile=profile()), host={}, gpu={"computing_ms": 1.0})
    text = write_report([tmp_path / "results"], tmp_path / "out").read_text()
    assert re.search(r"<td>twin</td>\s*(<td>missing</td>\s*){8}</tr>", text)


def test_kernels_beside_their_ceilings_come_before_newer_ones(tmp_path: Path) -> None:
    write(tmp_path / "results" / "a-known", RUNS[0], profile=profile())
    for i in range(3):
        other = configured(local_batch_size=64)
        write(tmp_path / "results" / f"b-{i}", RUNS[0], minute=i + 1, config=other, profile=profile())
    folder = tmp_path / "results" / "limits"
    folder.mkdir()
    (folder / LIMITS_JSON).write_text(json.dumps(some_limits()))
    write_report([tmp_path / "results"], tmp_path / "out")
    assert [each.name for each in (tmp_path / "out").glob("kernels_*")] == ["kernels_a-known.png"]


def test_beside_published_results_stand_the_newest_of_each_number_of_gpus(tmp_path: Path) -> None:
    material = Material()
    for gpus, ladder in ((2, "newest"), (4, "newer"), (4, "old"), (2, "older")):
        folder = write(tmp_path / ladder, RUNS[0], machine={**H200, "gpus": gpus})
        records = [read_record(folder)]
        known = cast(Ladder, {"id": ladder, "created": ladder})
        material.ladders.append((known, {ladder: side_of_records(ladder, records)}, {ladder: records}))
    (picture,) = _published(material)
    names = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
    ours = names[len(PUBLISHED) :]
    assert [name.rsplit(",", 1)[0] for name in ours] == [
        "2 x H200, launch-bound: newest",
        "4 x H200, launch-bound: newer",
    ]


def test_a_floor_of_other_work_or_another_machine_says_so(tmp_path: Path) -> None:
    config = configured(precision="bf16")
    machine = {**H200, "hosts": ["node1"]}
    folder = tmp_path / "results"
    write(folder / "timed", RUNS[0], config=config, machine=machine)
    write(folder / "twin", RUNS[1], config=config, machine=machine, profile=profile())
    for i, host in enumerate(("node0", "node1", "node2")):
        (folder / f"limits-{host}").mkdir()
        known = {"id": f"limits-{host}", "created": f"2026-11-21T00:0{i}:00+00:00"}
        limits = some_limits(machine={**H200, "hosts": [host]}, **known)
        (folder / f"limits-{host}" / LIMITS_JSON).write_text(json.dumps(limits))
    text = write_report([folder], tmp_path / "out").read_text()
    assert "on this machine" not in text
    precision, host = "precision bf16, beside a floor of tf32", "host node1, beside a floor of node2"
    timed = "median latency beside the floor of limits"
    assert f"{timed}-node2. Doubtful: {precision} (timed). Doubtful: {host} (timed).<" in text
    assert f"{timed}-node1. Doubtful: {precision} (timed).<" in text
    stages = "Stages of twin beside the floor of limits-node2."
    assert f"{stages} Doubtful: {precision} (twin). Doubtful: {host} (twin).<" in text
    assert f"<summary>twin, beside limits-node1; {precision}</summary>" in text  # of its machine, and not the newest
    assert re.search(r"<td>hosts</td><td[^>]*>node1</td>", text)


def test_a_page_from_one_record(tmp_path: Path) -> None:
    record = write(tmp_path / "one", RUNS[0])
    text = write_report([record], tmp_path / "out").read_text()
    assert 'id="ladder"' not in text
    assert 'id="latency"' in text


def test_evaluations_are_marked_where_the_log_has_them(tmp_path: Path) -> None:
    outcome = TrainingOutcome(status="success", epoch_num=0.5, auc=0.8, target=0.8)
    folder = write(tmp_path / "trained", RUNS[0], training=outcome)  # 260 iterations
    log = MLPerfLog(folder / "result_0.txt")
    log.init_start()
    log.hyperparameters(seed=0, global_batch_size=1, optimizer=OptimizerConfig(), train_samples=520, eval_samples=1)
    log.init_stop()
    log.run_start()
    for epoch in (0.25, 0.5):
        log.eval_start(epoch)
        log.eval_accuracy(epoch, 0.8)
        log.eval_stop(epoch)
    log.close("success", 0.5)
    assert list(_marks(read_record(folder)).evals) == [130, 260]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to report in"):
        write_report([tmp_path], tmp_path / "out")
    with pytest.raises(ValueError, match="absent does not exist"):
        write_report([tmp_path / "absent"], tmp_path / "out")
    (write(tmp_path / "damaged", RUNS[0]) / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"damaged/run\.json is corrupt"):
        write_report([tmp_path], tmp_path / "out")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [500, 1200])
def test_in_a_browser_nothing_fails_and_nothing_sticks_out(results: Path, tmp_path: Path, width: int) -> None:
    page = write_report([results], tmp_path / "out")
    # The page reports on itself: whether all pictures were drawn, and whether it is wider than the window.
    probe = (
        "<script>onload = () => document.title = [[...document.images].every(i => i.naturalWidth > 0), "
        "document.documentElement.scrollWidth <= innerWidth].join()</script>"
    )
    page.write_text(page.read_text().replace("</body>", f"{probe}</body>"))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={tmp_path / 'profile'} --dump-dom"
    flags += f" --window-size={width},900 --virtual-time-budget=5000 --enable-logging=stderr"
    browser = subprocess.run(
        [str(CHROMIUM), *flags.split(), page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "<title>true,true</title>" in browser.stdout
    assert "CONSOLE" not in browser.stderr
