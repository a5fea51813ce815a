"""Messages about a failure: one line where the user can fix it, a traceback where not."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.launch.failures import guarded, what_to_install
from tests.launched import PATIENCE_S

WATCHED = """
import os
import torch.distributed as dist
from dlrm_bench.bench.instruments.abort import AbortWatch
from dlrm_bench.dlrm.runtime.command_line import exit_process
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.launch.failures import guarded

def work():
    ranks = Ranks.from_environment()
    ranks.init_process_group()
    with AbortWatch(ranks, lambda: None):
        if os.environ["RANK"] in {ranks!r}:
            raise {error}
        dist.barrier()

exit_process(guarded(work))
"""
FAILING = """
import os, time
from dlrm_bench.dlrm.runtime.command_line import exit_process
from dlrm_bench.launch.failures import guarded

def work():
    if os.environ["RANK"] in {ranks!r}:
        raise {error}
    time.sleep(60)
    return 0

exit_process(guarded(work))
"""


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        ("torch.distributed.elastic", "pip install '.[run]'"),
        ("mlperf_logging", "pip install '.[run]'"),
        ("torchrec", "pip install '.[torchrec]', or without a GPU what requirements/cpu.txt lists"),
        ("fbgemm_gpu.tbe", "pip install '.[torchrec]', or without a GPU what requirements/cpu.txt lists"),
    ],
)
def test_a_missing_package_is_named_with_the_fix(module, fix):
    said = what_to_install(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert said is not None
    assert said.startswith(f"this needs {module.partition('.')[0]}, which is not installed")
    assert said.endswith(fix)


@pytest.mark.parametrize("module", ["dlrm_bench.bench.runn", "numpy", "torchvision", None])
def test_of_other_modules_nothing_is_known(module):
    assert what_to_install(ModuleNotFoundError(name=module)) is None


def test_a_rank_ends_with_a_status(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert guarded(lambda: 4) == 4
    assert capsys.readouterr().err == ""

    def fail(error: Exception) -> int:
        raise error

    assert guarded(lambda: fail(ValueError("--seed is wrong"))) == 2
    assert capsys.readouterr().err == "rank 3: error: --seed is wrong\n"
    assert guarded(lambda: fail(ModuleNotFoundError(name="torch"))) == 2
    assert capsys.readouterr().err.startswith("rank 3: error: this needs torch")
    assert guarded(lambda: fail(PermissionError(13, "Permission denied", "/data/day_0_dense.npy"))) == 2
    assert capsys.readouterr().err == "rank 3: error: /data/day_0_dense.npy: Permission denied\n"
    assert guarded(lambda: fail(RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nbacktrace"))) == 2
    assert capsys.readouterr().err == (
        "rank 3: error: out of memory: DefaultCPUAllocator: can't allocate memory: 9 bytes: lower --local-batch-size "
        "or --model.table-scale\n"
    )
    for bug in (ModuleNotFoundError(name="dlrm_bench.nothing"), KeyError("x"), ConnectionResetError(104, "reset")):
        assert guarded(lambda bug=bug: fail(bug)) == 1
        assert "Traceback" in capsys.readouterr().err


def test_an_error_is_one_write(monkeypatch):
    """Ranks share a pipe, where another rank's line would stand between a line and its end."""
    written = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    assert guarded(lambda: int("x")) == 2
    (line,) = written
    assert line.startswith("rank 1: error: ")
    assert line.endswith("\n")


def test_without_torchrun_there_is_no_rank(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)

    def fail() -> int:
        raise ValueError("--seed is wrong")

    assert guarded(fail) == 2
    assert capsys.readouterr().err == "error: --seed is wrong\n"


def under_torchrun(folder: Path, ranks: tuple[str, ...], error: str, *options: str, script: str = FAILING) -> str:
    """Output of a failing torchrun of two ranks, of which these raise the error."""
    (folder / "script.py").write_text(script.format(ranks=ranks, error=error))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *options, "script.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "named"), [(("0", "1"), "rank 0"), (("1",), "rank 1")], ids=["all", "one"])
def test_the_last_words_of_torchrun_are_the_error_said_once(tmp_path, ranks, named):
    said = under_torchrun(tmp_path, ranks, "ValueError('--seed is wrong')")
    *_, last, frame = said.splitlines()
    assert last.strip() == f"{named}: error: --seed is wrong"
    assert set(frame) == {"="}
    assert said.count("--seed is wrong") == 1


def test_the_last_words_of_torchrun_after_a_bug_are_the_end_of_its_traceback(tmp_path):
    said = under_torchrun(tmp_path, ("0",), "KeyError('x')")
    assert said.splitlines()[-2].strip() == "rank 0 failed, see the traceback above: KeyError: 'x'"
    assert said.index("rank 0 failed:\nTraceback") < said.index("ChildFailedError")


def test_an_error_of_a_try_that_torchrun_repeats_is_said_by_each_rank(tmp_path):
    said = under_torchrun(tmp_path, ("0", "1"), "ValueError('--seed is wrong')", "--max-restarts=1")
    assert said.startswith(("rank 0: error: --seed is wrong", "rank 1: error: --seed is wrong"))
    assert said.splitlines()[-2].strip() == "rank 0: error: --seed is wrong"


@pytest.mark.slow
def test_the_last_words_of_torchrun_are_the_error_of_the_rank_that_others_waited_for(tmp_path):
    said = under_torchrun(tmp_path, ("1",), "ValueError('day_0.npy is truncated')", script=WATCHED)
    assert said.splitlines()[-2].strip() == "rank 0: rank 1 failed: ValueError: day_0.npy is truncated"
