"""Process groups beside the default one."""

from datetime import timedelta

import torch.distributed as dist

import dlrm_bench.pipeline.five_stage.pipeline
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.groups import group_timeout
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.pipeline.five_stage.any_models import PLANS, TwoTower, batches, build


def reuses(ranks: Ranks) -> list[int]:
    """The numbers of process groups after each of several pipelines, each of which trains."""
    dlrm_bench.pipeline.five_stage.pipeline.why_not_graphed = lambda *_: None
    options = FiveStageOptions(cuda_graph="dense", launch_threads=2)
    counts = []
    for _ in range(3):
        model, optimizer = build(ranks, TwoTower, PLANS["TW"])
        with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
            data = iter(batches(ranks, 3))
            for _ in range(2):  # a batch stays in flight
                pipeline.progress(data)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_pipelines_leave_their_groups_to_the_next_one(run_ranks):
    for counts in run_ranks(2, reuses):
        assert counts == counts[:1] * 3


def test_the_timeout_is_what_the_process_group_was_given(run_ranks):
    run_ranks(1, timeouts)


def timeouts(ranks: Ranks) -> None:
    dist.destroy_process_group()
    given = timedelta(hours=3)
    dist.init_process_group("gloo", timeout=given)
    assert group_timeout() == given
    group = dist.new_group([0], use_local_synchronization=True, timeout=group_timeout())
    assert group._get_backend(ranks.device).options._timeout == given
