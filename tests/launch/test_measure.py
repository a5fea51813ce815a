"""The command line of launch/measure.py; its measurements are tested beside bench/profile/ and bench/limits/."""

import pytest

from dlrm_bench.launch import measure
from dlrm_bench.launch.failures import guarded


@pytest.mark.parametrize("arguments", [[], ["ghost"], ["--preset", "smoke"]])
def test_an_unknown_kind_is_named(monkeypatch, capsys, arguments):
    monkeypatch.setattr("sys.argv", ["launch/measure.py", *arguments])
    assert guarded(measure.main) == 2
    kind = arguments[0] if arguments else "nothing"
    assert f"error: {kind!r} is not a measurement: choose host, nvtx or limits" in capsys.readouterr().err
