"""The end of a command is a line and an exit status; broken pipes are in tests/bench/test_cli.py."""

import errno
from collections.abc import Callable

import pytest

from dlrm_bench.dlrm.runtime.command_line import FailedError, exit_status, printable


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("--a is 0"), 2, "error: --a is 0\n"),
        (FailedError("rank 1 died"), 1, "error: rank 1 died\n"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), 2, "error: a/b: Not a directory\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: No space left on device\n"),
        (OSError("8 requested and 0 written"), 2, "error: 8 requested and 0 written\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_users_bring_about(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str
) -> None:
    assert exit_status(raising(error)) == status
    assert capsys.readouterr().err == said
    error.add_note("two runs are kept")
    assert exit_status(raising(error)) == status
    assert capsys.readouterr().err == f"{said}two runs are kept\n"


def test_names_do_not_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b[31m\x9b2J\u202e\tb\ncé"
    assert printable(name) == "a\\x1b[31m\\x9b2J\\u202e\tb\ncé"
    assert exit_status(raising(ValueError(name))) == 2
    assert capsys.readouterr().err == f"error: {printable(name)}\n"


def test_all_else_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(lambda: 3) == 3
    with pytest.raises(KeyError):
        exit_status(raising(KeyError("x")))
    assert capsys.readouterr().err == ""
    stopped = SystemExit(143)
    stopped.add_note("two runs are kept")
    with pytest.raises(SystemExit, match="143"):
        exit_status(raising(stopped))
    assert capsys.readouterr().err == "two runs are kept\n"
