import multiprocessing
import os
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from dlrm_bench.bench.machine.provenance import imported_packages, provenance, started_by


def test_what_is_imported_has_its_version() -> None:
    packages = imported_packages()
    assert packages["torch"] == str(torch.__version__)
    assert packages["pytest"] == pytest.__version__
    assert "no-such-package" not in packages


def test_libraries_of_nvidia_count_although_nothing_imports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"nvidia": ["nvidia-cublas", "nvidia-nccl-cu13"], "never_imported": ["other"]}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: known)
    monkeypatch.setattr(metadata, "version", lambda name: f"{name} 1")
    assert set(imported_packages()) == {"nvidia-cublas", "nvidia-nccl-cu13"}


def test_only_variables_that_libraries_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_ALGO", "TORCHELASTIC_RUN_ID", "AWS_SECRET_ACCESS_KEY", "TORCH_LOGS", "NVIDIA_REQUIRE_CUDA"):
        monkeypatch.setenv(name, "value")
    environment = provenance()["environment"]
    assert environment["NCCL_ALGO"] == environment["TORCH_LOGS"] == "value"
    assert not environment.keys() & {"TORCHELASTIC_RUN_ID", "AWS_SECRET_ACCESS_KEY", "PATH", "NVIDIA_REQUIRE_CUDA"}


@pytest.mark.parametrize(
    ("variable", "launcher"), [(None, "python"), ("TORCHELASTIC_RUN_ID", "torchrun"), ("SLURM_PROCID", "srun")]
)
def test_launchers(variable: str | None, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = started_by()
    assert (found["launcher"], found["local_world_size"]) == (launcher, 4)
    assert found["command"]


def test_a_rank_of_the_fork_server_names_the_command_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getpid()))
    found = started_by()
    assert found["launcher"] == "fork server"
    assert any("pytest" in word or "python" in word for word in found["command"])
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=2**22 + 1))
    assert started_by()["command"] == []
