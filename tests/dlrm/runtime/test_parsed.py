"""Errors of one line in place of tyro's pages; those of the commands' own flags are in tests/bench."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from dlrm_bench.dlrm.runtime.parsed import parsed


@dataclass(kw_only=True)
class Options:
    """Flags of a command."""

    out: Annotated[Path, tyro.conf.Positional]
    samples: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"--samples is {self.samples}: name at least one")


def options(*words: str, prints: bool = True) -> Options:
    return parsed(lambda: tyro.cli(Options, args=words, prog="command"), prints)


def test_right_flags_are_returned() -> None:
    assert options("there", "--samples", "3") == Options(out=Path("there"), samples=3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["there", "--samples", "0"], "--samples is 0: name at least one"),  # without the name of the class
        (["there", "--samples", "x"], "Error parsing --samples: invalid literal for int() with base 10: 'x'"),
        (["there", "--sample", "3"], "Unrecognized options: --sample, 3; perhaps you meant --samples"),
    ],
)
def test_a_wrong_flag_is_an_error_of_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        options(*words)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("prints", [True, False])
def test_help_ends_the_process(prints: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        options("--help", prints=prints)
    assert ("usage: command" in capsys.readouterr().out) == prints
