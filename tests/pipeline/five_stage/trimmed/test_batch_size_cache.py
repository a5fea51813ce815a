"""Batches of many sizes: right results, bounded memory, and the graphs of the first size stay."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.trimmed.batch_size_cache import _CACHED
from dlrm_bench.pipeline.five_stage.trimmed.output_dist import TrimmedOutputDist
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.trimmed.cases import CASES, batches, equal_weights, fresh, trimmed


def look_up(ranks: Ranks) -> None:
    """Sizes 1 to 100, two of which have been, and the first size again."""
    for name in ("tw", "tw, graphs"):
        case = CASES[name]
        stock, ours = equal_weights(case, ranks)
        made = batches(case, ranks, (*range(1, 101), 100, 99, 1))
        for n, (batch, again) in enumerate(zip(fresh(made), fresh(made), strict=True)):
            with torch.no_grad():
                pooled = ours.model(batch)[1][1]
                if n % 10 == 0 or n >= 100:
                    torch.testing.assert_close(pooled, stock.model(again)[1][1])
            if n == 1:
                first = ours.ebc.graphed()
        output_dist = next(each for each in ours.ebc._output_dists if isinstance(each, TrimmedOutputDist))
        for cache in (ours.ebc._static._layouts, output_dist._exchanges):
            assert 0 < len(cache) <= _CACHED
        assert len(first) == (3 if case.cuda_graph else 0)
        assert all(now is then for now, then in zip(ours.ebc.graphed(), first, strict=True))
        replayed = [graphed.describe()["replayed"] for graphed in first]
        assert replayed[:2] == [ranks.device.type == "cuda"] * len(replayed[:2])  # without gradients not the third
        ours.ebc.close()


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), GPU_PLACES[1]])
def test_caches_are_bounded(run_ranks, world_size, gpu):
    run_ranks(world_size, look_up, gpu=gpu)


def own_timeout(ranks: Ranks, store: Path) -> None:
    given = timedelta(hours=3)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1, timeout=given)
    group: Any = trimmed(CASES["1 rank"], ranks).ebc.rank_group.group
    assert group._get_backend(ranks.device).options._timeout == given


def test_its_communicator_has_the_timeout_of_the_process_group(run_ranks, tmp_path):
    run_ranks(1, own_timeout, tmp_path / "store")


@pytest.mark.parametrize(("switch", "value"), [("cuda_graph", "dense"), ("validate", 1), ("cuda_graph", None)])
def test_switches_are_true_or_false(switch, value):
    with pytest.raises(ValueError, match=rf"{switch} must be True or False, not {value!r}"):
        TrimmedEBCSharder({"f0": 1}, **{switch: value})
