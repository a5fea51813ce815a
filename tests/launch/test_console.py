"""The command that pip installs; tests/test_install.py runs it with only the core installed."""

import pytest

from dlrm_bench.bench import cli
from dlrm_bench.launch.console import main


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    def fail() -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "main", fail)
    assert main() == 2
    assert capsys.readouterr().err.startswith("error: this needs torch, which is not installed")


def test_everything_else_is_passed_on(monkeypatch):
    def fail() -> int:
        raise ModuleNotFoundError("No module named 'dlrm_bench.bench.nothing'", name="dlrm_bench.bench.nothing")

    monkeypatch.setattr(cli, "main", lambda: 1)
    assert main() == 1
    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        main()
