"""The built-in ladders: launch/dlrm.py takes their flags, and each rung differs from the one before."""

from itertools import pairwise

import pytest

from dlrm_bench.dlrm.dlrmv4.ladders import LADDERS
from dlrm_bench.launch.dlrm import parse


@pytest.mark.parametrize("name", LADDERS)
def test_every_rung_is_a_valid_configuration(name: str) -> None:
    given = ["--preset", "smoke-dlrmv4", "--model.last-layer", "all", "--model.reference", "checkout"]
    configs = [parse([*given, *rung.flags]) for rung in LADDERS[name]]
    assert all((a == b) == (name == "same") for a, b in pairwise(configs))
    assert len({rung.name for rung in LADDERS[name]}) == len(configs)
