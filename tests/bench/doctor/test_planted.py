"""Small scripts with one planted fault each, as somebody else's: the line of the fault is named first."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_bench.bench.doctor.diagnosis import Diagnosis, diagnose
from dlrm_bench.bench.doctor.site_folder import Settings, environment_with_hook
from tests.bench.doctor.test_examine import SCRIPTS, examined
from tests.launched import free_port

PLANTED = {
    "item": "sync",
    "lengths": "sync",
    "mask": "launch_burst",
    "metric": "metric",
    "print_loss": "print",
    "process_group": "process_group",
    "shapes": "shape_change",
    "synchronize": "synchronize",
    "unfused": "optimizer_loop",
    "unpinned": "h2d_copy",
    "starved": "loader_wait",
    "sleep": "host_wait",
    "python_sort": "host_compute",
}
LONGER = {"evaluates": "periodic_work", "rec_metrics": "metric", "small_operations": "launch_burst"}
"""Faults that a few iterations do not show."""
RANKS = {"straggler": "straggler"}
"""Faults between two ranks."""


def assert_planted_first(name: str, diagnosis: Diagnosis) -> None:
    script = SCRIPTS / f"{name}.py"
    lines = script.read_text(encoding="utf-8").splitlines()
    (planted,) = (number for number, line in enumerate(lines, start=1) if line.endswith("# planted"))
    first = diagnosis["findings"][0]
    assert (Path(str(first["file"])).name, first["line"]) == (script.name, planted)
    assert first["kind"] == (PLANTED | LONGER | RANKS)[name]
    assert first["text"] == lines[planted - 1].strip()


def test_every_script_has_its_fault():
    found = {path.stem for path in SCRIPTS.glob("*.py")}
    assert found == {*PLANTED, *LONGER, *RANKS, "stock_torchrec", "mlperf_torchrec"}


ONE_START = """
import dataclasses, os, runpy, sys
import torch, torch.distributed, torch._dynamo, torch.profiler
from dlrm_bench.bench.doctor import hook
folder, port, *scripts = sys.argv[1:]
for script in scripts:
    script, iterations, ranks = script.split(":")
    own = os.path.join(folder, os.path.basename(script).removesuffix(".py"))
    hook.state.settings = dataclasses.replace(hook.state.settings, folder=own, iterations=int(iterations))
    children = []
    for rank in range(int(ranks)):
        child = os.fork()
        if child == 0:
            if ranks != "1":
                world = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}}
            runpy.run_path(script, run_name="__main__")
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
"""


def examine_all(folder: Path, specs: list[tuple[str, int, int]]) -> dict[str, Diagnosis]:
    """Examines scripts (name, iterations, ranks) in forks of one process: importing torch takes longer than all."""
    settings = Settings(folder=str(folder), warmup=3, iterations=5, keep_running=False)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, _, _ in specs:
        (folder / name).mkdir()
    arguments = [f"{SCRIPTS / name}.py:{iterations}:{ranks}" for name, iterations, ranks in specs]
    command = [sys.executable, "-c", ONE_START, str(folder), str(free_port()), *arguments]
    subprocess.run(command, env=environment_with_hook(folder / "site", settings, environment), check=True)
    return {name: diagnose(folder / name, [name], 0, {})[0] for name, _, _ in specs}


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Callable[[str], Diagnosis]:
    """Diagnosis of each planted script, of a machine that did not stall within few iterations: it is examined anew."""
    specs = [(name, 5, 1) for name in PLANTED] + [(name, 40, 1) for name in LONGER] + [(name, 10, 2) for name in RANKS]
    found = examine_all(tmp_path_factory.mktemp("planted"), specs)
    stalled = [spec for spec in specs if spec[0] in PLANTED and found[spec[0]]["periodic"]]  # they do nothing periodic
    if stalled:
        found |= examine_all(tmp_path_factory.mktemp("anew"), stalled)
    return found.__getitem__


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLANTED, *LONGER, *RANKS])
def test_the_planted_line_is_named_first(name, planted):
    diagnosis = planted(name)
    assert_planted_first(name, diagnosis)
    assert diagnosis["found_by"] == "optimizer"
    costs = [finding["ms"] for finding in diagnosis["findings"] if finding["ms"] is not None]
    assert sum(costs) <= diagnosis["iteration_ms"] * 1.000001


@pytest.mark.slow
def test_a_sleep_costs_what_it_takes(planted):
    """30 ms, of a sampled iteration."""
    diagnosis = planted("sleep")
    first, overhead = diagnosis["findings"][0], diagnosis["overhead"]
    sampled_ms = first["ms"] * overhead["sampled_ms"] / diagnosis["iteration_ms"]
    assert sampled_ms > 28.5
    assert first["ms"] <= diagnosis["iteration_ms"] * 1.000001  # all of it, where no sample falls on other lines
    assert first["calls_ms"] is None


@pytest.mark.slow
def test_work_of_every_seventh_iteration_has_its_period(planted):
    """The costliest there is: what a busy machine does at intervals may be another."""
    diagnosis = planted("evaluates")
    periodic = diagnosis["periodic"][0]
    assert periodic["period"] == 7
    assert periodic["with_ms"] >= 15  # on any machine
    assert periodic["ms"] == pytest.approx((periodic["with_ms"] - periodic["without_ms"]) / 7, rel=0.2)


@pytest.mark.slow
def test_leaving_a_loop_out_takes_its_python_and_its_backward_away(planted):
    """The calls of its lines alone are less than half of that. Its interval tells how far a busy machine is known."""
    diagnosis = planted("small_operations")
    first = diagnosis["findings"][0]
    assert first["high_ms"] > 1.5 * first["calls_ms"]
    assert first["high_ms"] > 0.3 * diagnosis["iteration_ms"]
    assert first["low_ms"] < 0.9 * diagnosis["iteration_ms"]
    assert first["low_ms"] < first["high_ms"]


@pytest.mark.slow
def test_a_straggler_and_who_waits_for_it(planted):
    diagnosis = planted("straggler")
    first, (waiting, late) = diagnosis["findings"][0], diagnosis["ranks"]
    # Less than 50 ms where a busy machine makes rank 0 late too.
    assert 15 < first["ms"] <= diagnosis["iteration_ms"]
    assert "rank 1 comes last to" in first["detail"]
    assert "outside of any stage" in first["detail"]
    assert waiting["collective_wait_ms"] > 2 * late["collective_wait_ms"]
    assert late["late_ms"] > 2 * waiting["late_ms"]


@pytest.mark.slow
def test_torchrecs_metrics_are_named_with_their_waits_and_what_takes_their_place(planted):
    diagnosis = planted("rec_metrics")
    first = diagnosis["findings"][0]
    assert first["library"]["function"] == "RecMetricModule.update"
    assert "DeviceRecMetrics" in first["suggestion"]
    assert first["reads"]
    assert all("if " in read["text"] and "has_valid_weights" in read["text"] for read in first["reads"])
    (prediction,) = (p for p in diagnosis["predictions"] if "DeviceRecMetrics" in p["remedy"])
    assert (prediction["findings"], prediction["removes_ms"]) == ([1], first["ms"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_line_is_named_first_on_a_gpu(name, tmp_path):
    diagnosis = examined(SCRIPTS / f"{name}.py", tmp_path, gpu=True)
    assert diagnosis["device"] == "cuda"
    assert_planted_first(name, diagnosis)
    first, rank = diagnosis["findings"][0], diagnosis["ranks"][0]
    assert rank["calls"]["launch"] > 0
    if PLANTED[name] in ("sync", "print", "synchronize"):
        assert first["waits"] >= 1
        assert rank["calls"]["sync"] >= 1
    if PLANTED[name] == "h2d_copy":
        assert first["copies"]["HtoD pageable"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONGER)
def test_a_fault_of_longer_runs_is_named_first_on_a_gpu(name, tmp_path):
    diagnosis = examined(SCRIPTS / f"{name}.py", tmp_path, gpu=True, iterations=40)
    assert diagnosis["device"] == "cuda"
    assert_planted_first(name, diagnosis)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", RANKS)
def test_a_fault_between_ranks_is_named_first_on_two_gpus(name, tmp_path):
    # DDP times its first ten iterations for its logger, which waits for events without a line of Python.
    diagnosis = examined(SCRIPTS / f"{name}.py", tmp_path, processes=2, gpu=True, warmup=12, iterations=10)
    assert diagnosis["device"] == "cuda"
    assert_planted_first(name, diagnosis)
