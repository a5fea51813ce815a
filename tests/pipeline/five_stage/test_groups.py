"""Process groups beside the default one."""

from datetime import timedelta

import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.groups import group_timeout


def test_the_timeout_is_what_the_process_group_was_given(run_ranks):
    run_ranks(1, timeouts)


def timeouts(ranks: Ranks) -> None:
    dist.destroy_process_group()
    given = timedelta(hours=3)
    dist.init_process_group("gloo", timeout=given)
    assert group_timeout() == given
    group = dist.new_group([0], use_local_synchronization=True, timeout=group_timeout())
    assert group._get_backend(ranks.device).options._timeout == given
