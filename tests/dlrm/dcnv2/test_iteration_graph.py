"""Cross-cutting: MLPerf's model in TorchRec's modules trains in one graph what stock trains, with its rung's flags."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.dcnv2.ladders import LADDERS
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.launch.dlrm import parse
from dlrm_bench.pipeline.build import build_pipeline
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu

STEPS, EAGER = 24, 5
SMALL = ("--preset", "smoke", "--target-auc", "None", "--data.source", "random", "--local-batch-size", "8")
ENDS = ("--iterations", str(STEPS), "--warmup-iterations", "1", "--precision", "fp32")


def train(ranks: Ranks, flags: tuple[str, ...]) -> tuple[list[float], dict[str, Any]]:
    torch.set_float32_matmul_precision("highest")
    config = parse([*SMALL, *flags, *ENDS])
    built: Any = build_pipeline(config, config.pipeline, ranks)
    data = named(config.benchmark).parts().open_data(config)
    pin = ranks.device.type == "cuda"
    drawn = data.train_batches(ranks.rank, ranks.world_size, config.local_batch_size, pin=pin)
    prepared = map(built.prepare, islice(drawn, STEPS))
    losses = [built.train_step(prepared).item() for _ in range(STEPS)]
    described = built.describe()
    built.close()
    return losses, described


def train_both(ranks: Ranks) -> list[tuple[list[float], dict[str, Any]]]:
    if ranks.device.type == "cpu":
        iteration_graph_on_cpu()
    stock, _, whole, _ = LADDERS["drop-in"]
    return [train(ranks, rung.flags) for rung in (stock, whole)]


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.multi_gpu)])
def test_the_rung_trains_what_stock_trains(run_ranks: Callable[..., Any], gpu: bool) -> None:
    for (theirs, _), (ours, described) in run_ranks(2, train_both, gpu=gpu):
        graph = described["iteration_graph"]
        assert (graph["replays"], graph["eager"]) == (STEPS - EAGER, {})
        assert "cuda_graph" not in described["switched_off"]
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5 if gpu else 0, atol=0)
