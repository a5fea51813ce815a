"""Cross-cutting: what no graph of all five stages can hold is refused by name, or trained without it when asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.table_rates import CAPTURES_IN_A_ROW
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.test_iteration_graph import BITS, assert_equal, every_step, prepare, stock, whole
from tests.pipeline.five_stage.torchrec_models import HOT, batches


def refused(ranks: Ranks) -> list[str]:
    """On CPUs, where no graph can follow the tables' rates."""
    prepare(ranks)
    data, loose = batches(ranks, 8, fixed=True), {key: hot for key, hot in HOT.items() if key != "f2"}
    cases: list[dict[str, Any]] = [
        {"plan": "RW"},
        {"sharder": None},
        {"sizes": loose},
        {"each": every_step, "data": batches(ranks, 20, fixed=True)},
    ]
    said = []
    for case in cases:
        given = {"data": data} | case
        with pytest.raises(ValueError, match="cuda_graph='iteration'") as caught:
            whole(ranks, **given)
        said.append(str(caught.value))
        run = whole(ranks, **given, options=FiveStageOptions(cuda_graph="iteration-or-dense"))
        wanted = {"data": given["data"]} | {key: value for key, value in case.items() if key in ("plan", "each")}
        assert_equal(run.trained, stock(ranks, **wanted), BITS)
        assert "for whole iterations" in run.off["cuda_graph"]
        assert run.described == {"in_graph": [], "why_not": run.off["cuda_graph"]}
    return said


def test_what_cannot_be_captured_is_named(run_ranks):
    ((by_rows, plain, undeclared, every_step),) = run_ranks(1, refused)
    assert "depends on the ids" in by_rows
    assert "shard an EmbeddingBagCollection by TrimmedEBCSharder(multi_hot_sizes)" in plain
    assert "declare the sizes of all features" in undeclared
    assert f"has changed with each of {CAPTURES_IN_A_ROW} steps" in every_step
    assert all("cuda_graph='iteration-or-dense'" in said for said in (by_rows, plain, every_step))


def test_a_read_within_an_iteration_is_seen_without_a_gpu():
    """The stand-in for a graph must be able to fail."""
    from tests.pipeline.cpu_graphs import Checked

    values, memory = torch.ones(3), [torch.zeros(3)]

    def replays_of(work: Callable[[], Any]) -> None:
        graph = Checked(work)
        graph.replay()
        graph.replay()

    replays_of(lambda: memory[0].add_(values))
    with pytest.raises(AssertionError, match="the host reads"):
        replays_of(lambda: values.sum().item())
    with pytest.raises(AssertionError):
        replays_of(lambda: memory.append(memory[-1].clone()) or memory[-1].add_(1))


def reads_the_device(ranks: Ranks) -> str:
    prepare(ranks)

    def change(model: Any) -> None:
        forward = model.model.forward

        def reads(*args: Any, **kwargs: Any) -> Tensor:
            logits = forward(*args, **kwargs)
            return logits * float(logits.detach().sum() > -1e9)

        model.model.forward = reads

    with pytest.raises(ValueError, match="cuda_graph='iteration'") as caught:
        whole(ranks, batches(ranks, 10, fixed=True), change=change)
    torch.rand(4, device=ranks.device)  # the generator is out of the capture
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_a_line_that_reads_the_device_is_named(run_ranks, world_size, gpu):
    for said in run_ranks(world_size, reads_the_device, gpu=gpu):
        assert "float(logits.detach().sum() > -1e9)` reads the device from the host" in said
