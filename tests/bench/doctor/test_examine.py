"""Whole examinations of scripts of somebody else's: stock TorchRec, odd ones, and such as cannot be examined."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.doctor import leaving, rank
from dlrm_bench.bench.doctor.diagnosis import Diagnosis, read_diagnosis, write_diagnosis
from dlrm_bench.bench.doctor.examine import ExaminationError, examine
from dlrm_bench.bench.doctor.findings import Finding
from dlrm_bench.bench.doctor.judge import OUTSIDE
from dlrm_bench.bench.doctor.remedies import WHOLE_ITERATION
from tests.bench.doctor.test_baseline import diagnosis as made_diagnosis
from tests.launched import free_port, ranks_naming, wait_until

SCRIPTS = Path(__file__).parent / "scripts"
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
    script: Path,
    folder: Path,
    processes: int = 0,
    gpu: bool = False,
    warmup: int = 3,
    iterations: int = 5,
    arguments: Sequence[str] = (),
    **more: str,
) -> Diagnosis:
    """Under torchrun, or as a process alone."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", **more}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, *torchrun, str(script), *arguments]
    diagnosis, _ = examine(command, folder, warmup, iterations, environment=environment)
    return diagnosis


def written(tmp_path: Path, source: str) -> Path:
    script = tmp_path / "train.py"
    script.write_text(source, encoding="utf-8")
    return script


def of_calls(diagnosis: Diagnosis) -> list[Finding]:
    """Findings of calls of torch. Others are of samples: a busy machine may add some."""
    return [finding for finding in diagnosis["findings"] if finding["kind"] not in OUTSIDE]


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_script_that_compiles_is_not_compiled_anew(tmp_path, monkeypatch):
    """Its reads are found all the same."""
    monkeypatch.chdir(tmp_path)
    diagnosis = examined(written(tmp_path, COMPILES), tmp_path / "out")
    assert any("compiles" in note for note in diagnosis["notes"])
    assert [finding["text"] for finding in of_calls(diagnosis)] == ["loss.item()"]
    frames = (tmp_path / "frames.txt").read_text().split()
    assert len(frames) >= 20
    assert len(set(frames[3:])) == 1


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_script_that_crashes_after_its_examination_fails(tmp_path, monkeypatch, capfd):
    """It runs on with --keep-running; else the doctor has ended it before."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = written(tmp_path, TRAINING.format(iterations=60, more="") + "\nraise SystemExit(3)\n")
    flags = ["doctor", "--warmup", "3", "--iterations", "5"]
    assert main([*flags, "--keep-running", "--", sys.executable, str(script)]) == 1
    assert "the command ended with status 3 after its examination" in capfd.readouterr().out


@pytest.mark.slow
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


def test_a_baseline_of_another_device_is_refused_after_the_diagnosis_is_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    made = made_diagnosis(2.0, device="cpu")
    write_diagnosis(made_diagnosis(2.0, device="cuda"), tmp_path / "old.json")
    monkeypatch.setattr("dlrm_bench.bench.doctor.examine.examine", lambda *_: (made, {}))
    assert main(["doctor", "--baseline", "old.json", "--json", "new.json", "--", "true"]) == 2
    said = capfd.readouterr()
    assert "no findings" in said.out
    assert "--baseline was made on cuda" in said.err
    assert read_diagnosis(tmp_path / "new.json") == made


SPAWNS = """
import os, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
def train(rank, port, told):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    pids = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(60):
        parameter.grad = torch.ones(1)
        dist.all_reduce(parameter.grad)
        if rank == 1 and step == 28:  # rank 0 is done by then
            time.sleep(1.5)
            with open(told, "w") as file:
                file.write(open(f"/proc/{pids[0].item()}/stat").read().rpartition(")")[2].split()[0])
        optimizer.step()
if __name__ == "__main__":
    mp.spawn(train, (int(sys.argv[1]), sys.argv[2]), 2)
"""


@pytest.mark.slow
def test_ranks_that_no_launcher_counts_wait_for_each_other(tmp_path, monkeypatch):
    """mp.spawn sets no LOCAL_WORLD_SIZE."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    script, told = written(tmp_path, SPAWNS), tmp_path / "told"
    diagnosis = examined(script, tmp_path / "out", arguments=[str(free_port()), str(told)])
    assert (diagnosis["world_size"], len(diagnosis["ranks"])) == (2, 2)
    assert told.read_text() in list("SRD")  # and no zombie


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["doctor"], "name the command"),
        (["doctor", "--fail-on", "new-syncs", "--", "true"], "needs --baseline"),
        (["doctor", "--fail-on", "2%", "--", "true"], "new-syncs"),
        (["doctor", "--warmup", "0", "--", "true"], "--warmup 0"),
        (["doctor", "--iterations", "2", "--", "true"], "--iterations 2: at least 3 are needed"),
        (["doctor", "--baseline", "none.json", "--", "true"], "none.json cannot be read"),
        (["doctor", "--", "no-such-command"], "no-such-command"),
        (["doctor", "--traces", __file__, "--", "no-such-command"], "--traces"),
        (["doctor", "--json", ".", "--", "no-such-command"], "is a folder"),
        (["doctor", "--page", f"{__file__}/a.html", "--", "no-such-command"], f"{__file__} is a file"),
    ],
)
def test_bad_input(flags, says, capsys):
    assert main(flags) == 2
    assert says in capsys.readouterr().err
