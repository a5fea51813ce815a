"""Whole examinations: small scripts with one planted fault each, and stock TorchRec, as somebody else's scripts."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.doctor import leaving, rank
from dlrm_bench.bench.doctor.diagnosis import Diagnosis, diagnose, read_diagnosis
from dlrm_bench.bench.doctor.examine import ExaminationError, examine
from dlrm_bench.bench.doctor.findings import Finding
from dlrm_bench.bench.doctor.judge import OUTSIDE
from dlrm_bench.bench.doctor.remedies import WHOLE_ITERATION
from dlrm_bench.bench.doctor.site_folder import Settings, environment_with_hook
from tests.launched import free_port, ranks_naming, wait_until

SCRIPTS = Path(__file__).parent / "scripts"
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
TRAINING = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({iterations}):
    loss = model(torch.ones(8, 4)).sum()
    loss.backward()
    optimizer.step()
    {more}
"""


def examined(
    script: Path, folder: Path, processes: int = 0, gpu: bool = False, warmup: int = 3, **more: str
) -> Diagnosis:
    """Under torchrun, or as a process alone."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", **more}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, *torchrun, str(script)]
    diagnosis, _ = examine(command, folder, warmup, 5, environment=environment)
    return diagnosis


def written(tmp_path: Path, source: str) -> Path:
    script = tmp_path / "train.py"
    script.write_text(source, encoding="utf-8")
    return script


def assert_planted_first(name: str, diagnosis: Diagnosis) -> None:
    script = SCRIPTS / f"{name}.py"
    lines = script.read_text(encoding="utf-8").splitlines()
    (planted,) = (number for number, line in enumerate(lines, start=1) if line.endswith("# planted"))
    first = diagnosis["findings"][0]
    assert (Path(str(first["file"])).name, first["line"]) == (script.name, planted)
    assert first["kind"] == (PLANTED | LONGER | RANKS)[name]
    assert first["text"] == lines[planted - 1].strip()


def of_calls(diagnosis: Diagnosis) -> list[Finding]:
    """Findings of calls of torch. Others are of samples: a busy machine may add some."""
    return [finding for finding in diagnosis["findings"] if finding["kind"] not in OUTSIDE]


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


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Callable[[str], Diagnosis]:
    """Diagnosis of each planted script. They run in forks of one process: importing torch takes longer than all."""
    folder = tmp_path_factory.mktemp("planted")
    settings = Settings(folder=str(folder), warmup=3, iterations=5, keep_running=False)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    specs = [(name, 5, 1) for name in PLANTED] + [(name, 40, 1) for name in LONGER] + [(name, 10, 2) for name in RANKS]
    for name, _, _ in specs:
        (folder / name).mkdir()
    arguments = [f"{SCRIPTS / name}.py:{iterations}:{ranks}" for name, iterations, ranks in specs]
    command = [sys.executable, "-c", ONE_START, str(folder), str(free_port()), *arguments]
    subprocess.run(command, env=environment_with_hook(folder / "site", settings, environment), check=True)
    return lambda name: diagnose(folder / name, [name], 0, {})[0]


@pytest.mark.parametrize("name", [*PLANTED, *LONGER, *RANKS])
def test_the_planted_line_is_named_first(name, planted):
    diagnosis = planted(name)
    assert_planted_first(name, diagnosis)
    assert diagnosis["found_by"] == "optimizer"
    costs = [finding["ms"] for finding in diagnosis["findings"] if finding["ms"] is not None]
    assert sum(costs) <= diagnosis["iteration_ms"] * 1.000001


def test_a_sleep_costs_what_it_takes(planted):
    """30 ms at least, on any machine: of a sampled iteration, where no sample is as long as two periods in vain."""
    diagnosis = planted("sleep")
    first, overhead = diagnosis["findings"][0], diagnosis["overhead"]
    sampled_ms = first["ms"] * overhead["sampled_ms"] / diagnosis["iteration_ms"]
    assert sampled_ms > 30 - 2 * overhead["period_us"] / 1000
    assert first["ms"] < diagnosis["iteration_ms"]
    assert first["calls_ms"] is None


def test_work_of_every_seventh_iteration_has_its_period(planted):
    """The costliest there is: what a busy machine does at intervals may be another."""
    diagnosis = planted("evaluates")
    periodic = diagnosis["periodic"][0]
    assert periodic["period"] == 7
    assert periodic["with_ms"] >= 15  # on any machine
    assert periodic["ms"] == pytest.approx((periodic["with_ms"] - periodic["without_ms"]) / 7, rel=0.2)


def test_leaving_a_loop_out_takes_its_python_and_its_backward_away(planted):
    """The calls of its lines alone are less than half of that. Its interval tells how far a busy machine is known."""
    diagnosis = planted("small_operations")
    first = diagnosis["findings"][0]
    assert first["high_ms"] > 1.5 * first["calls_ms"]
    assert first["high_ms"] > 0.3 * diagnosis["iteration_ms"]
    assert first["low_ms"] < 0.9 * diagnosis["iteration_ms"]
    assert first["low_ms"] < first["high_ms"]


def test_a_straggler_and_who_waits_for_it(planted):
    diagnosis = planted("straggler")
    first, (waiting, late) = diagnosis["findings"][0], diagnosis["ranks"]
    # Less than 50 ms where a busy machine makes rank 0 late too.
    assert 15 < first["ms"] <= diagnosis["iteration_ms"]
    assert "rank 1 comes last to" in first["detail"]
    assert "outside of any stage" in first["detail"]
    assert waiting["collective_wait_ms"] > 2 * late["collective_wait_ms"]
    assert late["late_ms"] > 2 * waiting["late_ms"]


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


def assert_torchrec_is_found(diagnosis: Diagnosis) -> None:
    assert diagnosis["found_by"] == "progress"
    assert [rank["rank"] for rank in diagnosis["ranks"]] == [0, 1]
    found: dict[str, list[Any]] = {"sync": [], "tensor_from_list": []}
    for finding in diagnosis["findings"]:
        if finding["library"] is not None and finding["library"]["file"].startswith("torchrec/"):
            assert (Path(str(finding["file"])).name, finding["function"]) == ("stock_torchrec.py", "<module>")
            assert "pipeline.progress(stream)" in finding["text"]
            if finding["kind"] in found:
                found[finding["kind"]].append(finding)
    for kind, word in (("sync", "tolist"), ("tensor_from_list", "torch.tensor(")):
        assert all(word in finding["library"]["text"] for finding in found[kind]), found[kind]
    # Table-wise sharding: splits and lengths read, two lists of splits, strides and recat made (facts of 1.6 to 1.8).
    assert sum(finding["count"] for finding in found["sync"]) >= 2
    assert sum(finding["count"] for finding in found["tensor_from_list"]) >= 4
    assert any("dist_data.py" in finding["library"]["file"] for finding in found["sync"])
    predictions = diagnosis["predictions"]
    assert any("trimmed input dist" in prediction["remedy"] for prediction in predictions)
    (whole,) = (prediction for prediction in predictions if prediction["remedy"] == WHOLE_ITERATION)
    assert any("TrimmedEBCSharder(multi_hot_sizes)" in what for what in whole["keeps_out"])


def test_stock_torchrec_under_two_ranks(tmp_path):
    assert_torchrec_is_found(examined(SCRIPTS / "stock_torchrec.py", tmp_path, processes=2))


@pytest.mark.multi_gpu
def test_stock_torchrec_on_two_gpus(tmp_path):
    # DDP times its first ten iterations for its logger, which waits for events without a line of Python.
    diagnosis = examined(SCRIPTS / "stock_torchrec.py", tmp_path, processes=2, gpu=True, warmup=12)
    assert_torchrec_is_found(diagnosis)
    waits = sum(finding["waits"] for finding in diagnosis["findings"])
    counted = sum(rank["calls"]["sync"] for rank in diagnosis["ranks"]) / 2
    assert waits == pytest.approx(counted, rel=0.1)  # every wait is in a finding
    assert sum(finding["waits"] for finding in diagnosis["findings"] if finding["file"] is None) <= 1


TRAINS_AS_IT_LIKES = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from dlrm_bench.bench.doctor import iteration
class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        gradient.sum().item()
        return gradient * 2
if __name__ == "__main__":
    assert os.environ["THEIRS"] == "loaded"
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(480, 4))
    for (batch,) in DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="forkserver"):
        with iteration():
            for _ in range(2):  # accumulation in two steps
                Reads.apply(model(batch)).sum().backward()
                optimizer.step()
            torch.ones(3).tolist()
"""


def test_a_script_that_trains_as_it_likes(tmp_path):
    """Its marks count before its optimizer's steps, what autograd calls is found, a loader's processes are no ranks,
    and the sitecustomize that the hook's hides runs too."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = 'loaded'\n")
    script = written(tmp_path, TRAINS_AS_IT_LIKES)
    diagnosis = examined(script, tmp_path / "out", PYTHONPATH=str(tmp_path / "theirs"))
    assert diagnosis["found_by"] == "mark"
    assert len(diagnosis["ranks"]) == 1
    found = {finding["text"]: (finding["kind"], finding["count"]) for finding in of_calls(diagnosis)}
    assert found == {"gradient.sum().item()": ("sync", 2), "torch.ones(3).tolist()": ("sync", 1)}
    wait_until(lambda: not list(ranks_naming(str(tmp_path))), "the loader's processes have ended")


COMPILES = """
import torch
model = torch.compile(torch.nn.Linear(4, 1), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    loss = model(torch.ones(8, 4)).sum()
    loss.item()
    loss.backward()
    optimizer.step()
    with open("frames.txt", "a") as file:
        print(torch._dynamo.utils.counters["frames"]["ok"], file=file)
"""


def test_a_script_that_compiles_is_not_compiled_anew(tmp_path, monkeypatch):
    """Its reads are found all the same."""
    monkeypatch.chdir(tmp_path)
    diagnosis = examined(written(tmp_path, COMPILES), tmp_path / "out")
    assert any("compiles" in note for note in diagnosis["notes"])
    assert [finding["text"] for finding in of_calls(diagnosis)] == ["loss.item()"]
    frames = (tmp_path / "frames.txt").read_text().split()
    assert len(frames) >= 20
    assert len(set(frames[3:])) == 1


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        (
            TRAINING.format(iterations=19, more="") + "\nraise SystemExit(3)\n",
            ExaminationError,
            "ended with status 3: .* made 18 iterations on rank 0, and 28 are needed",
        ),
        ("print('no loop')", ValueError, "no iteration was found"),
    ],
)
def test_what_cannot_be_examined_says_why(source, error, says, tmp_path):
    with pytest.raises(error, match=says):
        examined(written(tmp_path, source), tmp_path / "out")


ENDS_EARLY = """
import os, signal, sys, time
import torch
rank = int(os.fork() == 0)
os.environ |= {"RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(60):
    parameter.grad = torch.ones(1)
    optimizer.step()
    if rank == 1 and step == 8:
        %s
if rank == 0:
    os.wait()
"""


def test_a_rank_that_is_killed_is_named_at_once(tmp_path):
    """Rank 0, which is done, does not wait for it."""
    killed = tmp_path / "killed"
    ends = f"open({str(killed)!r}, 'w'); os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(ExaminationError, match="rank 1 was killed or crashed before the doctor was done"):
        examined(written(tmp_path, ENDS_EARLY % ends), tmp_path / "out")
    assert time.time() - killed.stat().st_mtime < rank._PATIENCE_S


def test_ranks_that_wait_for_one_that_is_gone_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(leaving, "GRACE_S", 0.2)
    source = ENDS_EARLY % "os._exit(0)"
    waits = source.replace("for step in range(60):", "for step in range(60):\n    rank or step < 8 or time.sleep(1000)")
    says = r"rank 1 called os\._exit\(0\) at .*train\.py:13 after 8 iterations"
    with pytest.raises(ExaminationError, match=says):
        examined(written(tmp_path, waits), tmp_path / "out")
    wait_until(lambda: not list(ranks_naming(str(tmp_path))), "rank 0 has ended")


def test_a_script_that_crashes_after_its_examination_fails(tmp_path, monkeypatch, capfd):
    """It runs on with --keep-running; else the doctor has ended it before."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = written(tmp_path, TRAINING.format(iterations=60, more="") + "\nraise SystemExit(3)\n")
    flags = ["doctor", "--warmup", "3", "--iterations", "5"]
    assert main([*flags, "--keep-running", "--", sys.executable, str(script)]) == 1
    assert "the command ended with status 3 after its examination" in capfd.readouterr().out


def test_the_command_writes_and_compares(tmp_path, monkeypatch, capfd):
    """A new read fails the check, and only that; --keep-running lets the script end by itself."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    flags = ["doctor", "--warmup", "3", "--iterations", "5"]
    ends = "\nprint('the script ended')\n"
    written(tmp_path, TRAINING.format(iterations=60, more="") + ends)
    command = ["--", sys.executable, "train.py", "--json", "theirs"]  # a flag of the script's own
    assert main([*flags, "--json", "old.json", "--page", "page.html", "--traces", "traces", *command]) == 0
    assert "the script ended" not in capfd.readouterr().out
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["rank0_trace.json.gz"]
    written(tmp_path, TRAINING.format(iterations=60, more="loss.item()") + ends)
    check = ["--baseline", "old.json", "--fail-on", "new-syncs"]
    assert main([*flags, "--keep-running", "--json", "new.json", *check, *command]) == 1
    said = capfd.readouterr().out
    assert "the script ended" in said
    assert "failed: a new sync at train.py:9" in said
    again = read_diagnosis(tmp_path / "old.json"), {}
    monkeypatch.setattr("dlrm_bench.bench.doctor.examine.examine", lambda *_: again)
    assert main([*flags, *check, *command]) == 0
    assert "failed" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["doctor"], "name the command"),
        (["doctor", "--fail-on", "new-syncs", "--", "true"], "needs --baseline"),
        (["doctor", "--fail-on", "2%", "--", "true"], "new-syncs"),
        (["doctor", "--iterations", "0", "--", "true"], "--iterations 0"),
        (["doctor", "--baseline", "none.json", "--", "true"], "none.json cannot be read"),
        (["doctor", "--", "no-such-command"], "no-such-command"),
    ],
)
def test_bad_input(flags, says, capsys):
    assert main(flags) == 2
    assert says in capsys.readouterr().err
