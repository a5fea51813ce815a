"""Cross-cutting: iterations leave no reference cycles. The training loop switches Python's collector off, and what a
cycle holds, batches in GPU memory among it, would stay until the end."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
from torchrec.datasets.utils import Batch

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.five_stage.torchrec_models import HOT, batches, build

WARM_UP, STEPS = 10, 20
OPTIONS = {"plain": FiveStageOptions(), "iteration": FiveStageOptions(cuda_graph="iteration")}


def garbage(ranks: Ranks, options: str) -> int:
    """Returns the number of objects in cycles that STEPS iterations have left behind."""
    if ranks.device.type == "cpu":
        iteration_graph_on_cpu()
    model, optimizer = build(ranks, plan="TW", sharder=TrimmedEBCSharder(HOT))
    data: list[Any] = batches(ranks, WARM_UP + STEPS + 5, fixed=True)
    assert isinstance(data[0], Batch)
    with FiveStagePipeline(model, optimizer, ranks.device, OPTIONS[options]) as pipeline:
        each = iter(data)
        for _ in range(WARM_UP):
            pipeline.progress(each)
        gc.collect()
        gc.disable()
        for _ in range(STEPS):
            pipeline.progress(each)
        found = gc.collect()
        gc.enable()
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_iterations_leave_no_cycles(run_ranks: Callable[..., list[Any]], options: str) -> None:
    for found in run_ranks(2, garbage, options):
        assert found < STEPS, f"{found} objects after {STEPS} iterations"
