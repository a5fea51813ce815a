"""The error of each rank about a wrong flag."""

import re

import pytest

from dlrm_bench.bench.flags import parse_run


@pytest.mark.parametrize("prints", [False, True])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--learning-rte", "1"], "Unrecognized options: --learning-rte, 1"),
        (
            ["--learning-rat", "1"],
            "Unrecognized options: --learning-rat, 1; perhaps you meant --optimizer.learning-rate",
        ),
        (["--local-batch-size", "0"], "--local-batch-size is 0: it must be positive"),
        (["--seed"], "Missing value for argument '--seed'. Expected 1 values."),
        (
            ["--local-batch-size", "many"],
            "Error parsing --local-batch-size: invalid literal for int() with base 10: 'many'",
        ),
    ],
)
def test_a_wrong_flag_is_an_error_of_one_line(capsys, arguments, said, prints):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        parse_run("smoke", "torchrec", arguments, "text", prints)
    assert capsys.readouterr() == ("", "")


def test_a_rank_that_does_not_print_says_nothing(capsys):
    with pytest.raises(SystemExit) as left:
        parse_run("smoke", "torchrec", ["--help"], "text", prints=False)
    assert not left.value.code
    assert capsys.readouterr() == ("", "")
    assert parse_run("smoke", "torchrec", ["--seed", "3"], "text", prints=False).seed == 3
