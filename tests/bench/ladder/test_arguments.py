"""The flags of dlrm-bench ladder."""

import re

import pytest

from dlrm_bench.bench import cli
from dlrm_bench.dlrm.benchmarks import BENCHMARKS


def test_the_help_names_every_ladder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["ladder", "--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert {name for benchmark in BENCHMARKS for name in benchmark.ladders} - words == set()
