"""What the static pipeline refuses of DLRMv4, by the flag."""

from dataclasses import replace

import pytest

from dlrm_bench.bench.config import PIPELINES
from dlrm_bench.bench.presets import preset


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--fp8", {"fp8": True}),
        ("--presort-ids", {"presort_ids": True}),
        ("--presort-ids", {"presort_ids": True, "peer_memory": True}),
    ],
)
def test_options_of_pooled_tables_are_refused(flag: str, options: dict[str, bool]) -> None:
    config = preset("smoke-dlrmv4")
    with pytest.raises(ValueError, match=flag):
        replace(config, pipeline=PIPELINES["static"](**options))


def test_graphs_go_with_a_rate_that_changes() -> None:
    config = preset("mlperf-dlrmv4")
    assert config.optimizer.rate(1) is not None
    replace(config, pipeline=PIPELINES["static"](cuda_graph="iteration", overlap=True))
