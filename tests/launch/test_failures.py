"""What is said of a failure: in one line where the user can mend it, with its traceback where not."""

import pytest

from dlrm_bench.launch.failures import guarded, what_to_install


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
