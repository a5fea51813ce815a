import pytest

from dlrm_bench.dlrm.data import steps
from dlrm_bench.dlrm.data.steps import step


def test_lines_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 10.0, 61.0, 65.0, 125.0, 200.0])
    monkeypatch.setattr(steps.time, "monotonic", lambda: next(now))
    with step("4/5 scatter rows", 4e6, "M rows") as advance:
        for _ in range(4):
            advance(1e6)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "4/5 scatter rows: 50%, 0.0328 M rows/s, 0:01:01 left",
        "4/5 scatter rows: 100%, 0.032 M rows/s, 0:00:00 left",
        "4/5 scatter rows: done in 200 s, 0.02 M rows/s",
    ]


def test_an_error_ends_the_step_without_a_claim(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with step("1/5 parse", 10, "MB"):
            raise ValueError("malformed")

    with pytest.raises(ValueError, match="malformed"):
        fail()
    assert capsys.readouterr().err == ""
