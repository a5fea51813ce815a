"""What a rank says about a wrong flag."""

import pytest

from dlrm_bench.bench.flags import parse_run


def test_a_rank_that_does_not_print_says_it_in_one_line(capsys):
    with pytest.raises(ValueError, match=r"[Uu]nrecognized.*--learning-rte") as raised:
        parse_run("smoke", "torchrec", ["--learning-rte", "1"], "text", prints=False)
    assert "\n" not in str(raised.value)
    with pytest.raises(SystemExit) as left:
        parse_run("smoke", "torchrec", ["--help"], "text", prints=False)
    assert not left.value.code
    assert capsys.readouterr() == ("", "")
    assert parse_run("smoke", "torchrec", ["--seed", "3"], "text", prints=False).seed == 3
