"""The measured load is of all ranks, and measuring it changes nothing."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from tests.pipeline.small_runs import batches_of, equal_states, small
from tests.pipeline.whole_state import whole_state
from tests.pipelines import static_pipeline

CASES: dict[str, dict[str, Any]] = {
    "adagrad": {},
    "presorted": {"presort_ids": True},
    "peer memory": {"presort_ids": True, "peer_memory": True},
    "rowwise": {"embedding": "rowwise_adagrad"},
    "sgd": {"embedding": "sgd"},
}


def ids_of(pipeline: StaticPipeline) -> list[torch.Tensor]:
    slots = [slot.ids for slot in pipeline._slots]
    kept = [ids.ids for ids in slots]
    kept += [tensor for ids in slots if ids.sorted is not None for tensor in (ids.sorted.ids, ids.sorted.bags)]
    return [tensor.clone() for tensor in kept]


def describe_between_steps(ranks: Ranks) -> dict[str, tuple[dict[str, Any], bool, bool]]:
    """Returns for each case the description, whether state and ids stayed as they were, and whether training continued
    alike."""
    results = {}
    for name, changes in CASES.items():
        config = small(**changes)
        losses = []
        for describes in (False, True):
            pipeline = static_pipeline(config, ranks)
            batches = batches_of(config, ranks)
            losses.append([pipeline.train_step(batches).item() for _ in range(4)])
            if describes:
                before, ids = whole_state(pipeline), ids_of(pipeline)
                description = pipeline.describe()
                same = all(map(torch.equal, ids_of(pipeline), ids)) and equal_states(whole_state(pipeline), before)
            losses[-1] += [pipeline.train_step(batches).item() for _ in range(4)]
        results[name] = description, same, losses[0] == losses[1]
    return results


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.multi_gpu)])
def described(request: pytest.FixtureRequest, run_ranks: Callable[..., list[Any]]) -> list[Any]:
    return run_ranks(2, describe_between_steps, gpu=request.param)


@pytest.mark.parametrize("case", CASES)
def test_measuring_changes_no_bit(described: list[Any], case: str) -> None:
    for rank in described:
        _, same, went_on_alike = rank[case]
        assert same
        assert went_on_alike


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_a_load(described: list[Any], case: str) -> None:
    for rank in described:
        description = rank[case][0]
        for kind in ("predicted_embedding", "predicted_tables", "measured_tables"):
            times = description[f"{kind}_us"]
            assert len(times) == len(described)
            assert min(times) > 0
            largest_by_mean = max(times) * len(times) / sum(times)
            assert description["imbalance"][kind] == pytest.approx(largest_by_mean, abs=1e-3)
            assert description["predicted_by"].startswith("NVIDIA H200")
    assert len({str(rank[case][0]["measured_tables_us"]) for rank in described}) == 1


def more_ids(ranks: Ranks) -> list[float]:
    """Measured microseconds at 64 and at 4096 samples."""
    times = []
    for local_batch_size in (64, 4096):
        config = small(local_batch_size=local_batch_size)
        pipeline = static_pipeline(config, ranks)
        batches = islice(batches_of(config, ranks), 3)
        pipeline.train_step(batches)
        times.append(pipeline.describe()["measured_tables_us"][0])
    return times


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_more_ids_take_longer(run_ranks: Callable[..., list[Any]], gpu: bool) -> None:
    ((few, many),) = run_ranks(1, more_ids, gpu=gpu)
    assert many > few
