"""Whole examinations: small scripts with one planted fault each, and stock TorchRec, as somebody else's scripts."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.doctor.diagnosis import Diagnosis
from dlrm_bench.bench.doctor.examine import examine
from dlrm_bench.dlrm.command_line import FailedError

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
}
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
    assert first["kind"] == PLANTED[name]
    assert first["text"] == lines[planted - 1].strip()


def test_every_script_has_its_fault():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*PLANTED, "stock_torchrec", "mlperf_torchrec"}


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_line_is_named_first(name, tmp_path):
    diagnosis = examined(SCRIPTS / f"{name}.py", tmp_path)
    assert_planted_first(name, diagnosis)
    assert diagnosis["found_by"] == "optimizer"
    assert all(finding["ms"] is None or finding["ms"] <= diagnosis["iteration_ms"] for finding in diagnosis["findings"])


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
    assert any("trimmed input dist" in prediction["remedy"] for prediction in diagnosis["predictions"])


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


def test_marks_of_the_script_count_before_the_optimizers_steps(tmp_path):
    script = written(
        tmp_path,
        """
import torch
from dlrm_bench.bench.doctor import iteration
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    with iteration():
        for _ in range(2):  # accumulation in two steps
            model(torch.ones(8, 4)).sum().backward()
            optimizer.step()
        torch.ones(3).tolist()
""",
    )
    diagnosis = examined(script, tmp_path / "out")
    assert diagnosis["found_by"] == "mark"
    (finding,) = diagnosis["findings"]
    assert (finding["line"], finding["count"]) == (11, 1)


READS_IN_BACKWARD = """
import torch
class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        gradient.sum().item()
        return gradient * 2
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    Reads.apply(model(torch.ones(8, 4))).sum().backward()
    optimizer.step()
"""


def test_what_autograd_calls_is_found(tmp_path):
    (finding,) = examined(written(tmp_path, READS_IN_BACKWARD), tmp_path / "out")["findings"]
    assert (finding["kind"], finding["text"]) == ("sync", "gradient.sum().item()")


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
    assert [finding["text"] for finding in diagnosis["findings"]] == ["loss.item()"]
    frames = (tmp_path / "frames.txt").read_text().split()
    assert len(frames) >= 20
    assert len(set(frames[3:])) == 1


READS_IN_WORKERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(480, 4))
    for (batch,) in DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="forkserver"):
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        loss.item()
"""


def test_workers_of_a_fork_server_are_no_ranks(tmp_path):
    diagnosis = examined(written(tmp_path, READS_IN_WORKERS), tmp_path / "out")
    assert len(diagnosis["ranks"]) == 1
    assert [finding["text"] for finding in diagnosis["findings"]] == ["loss.item()"]


def test_the_sitecustomize_that_is_hidden_runs_too(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = 'loaded'\n")
    more = "assert __import__('os').environ['THEIRS'] == 'loaded'"
    script = written(tmp_path, TRAINING.format(iterations=60, more=more))
    assert examined(script, tmp_path / "out", PYTHONPATH=str(tmp_path / "theirs"))["findings"] == []


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        (TRAINING.format(iterations=15, more=""), ValueError, "made 14 iterations on rank 0, and 21 are needed"),
        ("print('no loop')", ValueError, "no iteration was found"),
        (TRAINING.format(iterations=60, more="raise SystemExit(3)"), FailedError, "ended with status 3"),
    ],
)
def test_what_cannot_be_examined_says_why(source, error, says, tmp_path):
    with pytest.raises(error, match=says):
        examined(written(tmp_path, source), tmp_path / "out")


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
    check = [*flags, "--keep-running", "--baseline", "old.json", "--fail-on", "new-syncs", *command]
    assert main(check) == 0
    assert "the script ended" in capfd.readouterr().out
    written(tmp_path, TRAINING.format(iterations=60, more="loss.item()") + ends)
    assert main(check) == 1
    assert "failed: a new sync at train.py:9" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["doctor"], "name the command"),
        (["doctor", "--fail-on", "new-syncs", "--", "true"], "needs --baseline"),
        (["doctor", "--fail-on", "2%", "--", "true"], "new-syncs"),
        (["doctor", "--iterations", "0", "--", "true"], "--iterations 0"),
        (["doctor", "--baseline", "none.json", "--", "true"], "none.json"),
        (["doctor", "--", "no-such-command"], "no-such-command"),
    ],
)
def test_bad_input(flags, says, capsys):
    assert main(flags) == 2
    assert says in capsys.readouterr().err
