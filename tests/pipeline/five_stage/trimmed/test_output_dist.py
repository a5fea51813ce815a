"""The trimmed output dist gives TorchRec's results and gradients, bit by bit, or stays out of the way."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import comm_ops
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.trimmed.output_dist import TrimmedOutputDist
from tests.cases import GPU_PLACES


def stock_dist(ranks: Ranks, dims: list[int], **options: Any) -> TwPooledEmbeddingDist:
    return TwPooledEmbeddingDist(dist.group.WORLD, dims, [[dim] for dim in dims], ranks.device, **options)


def both_ways(output_dist: Any, ranks: Ranks, dims: list[int], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """What arrives, and the gradient of what was sent. The gradient that comes in is no contiguous one."""
    torch.manual_seed(ranks.rank)
    embs = torch.randn(sum(sizes), dims[ranks.rank], device=ranks.device, requires_grad=True)
    result = output_dist(embs, EmbeddingShardingContext(batch_size_per_rank=sizes)).wait()
    result.mul_(1)  # as TorchRec's own, it can be changed in place
    result.backward(torch.randn(result.shape[::-1], device=ranks.device).t())
    assert embs.grad is not None
    return result.detach(), embs.grad


def compare(ranks: Ranks) -> None:
    world_size = ranks.world_size
    for dims in ([3 + 5 * rank for rank in range(world_size)], [4 * rank for rank in range(world_size)]):
        for sizes in ([6] * world_size, [4 + 3 * rank for rank in range(world_size)]):
            for division in (True, False):
                comm_ops.set_gradient_division(division)
                stock = stock_dist(ranks, dims)
                assert TrimmedOutputDist.can_replace(stock)
                expected = both_ways(stock, ranks, dims, sizes)
                for cuda_graph in (False, True):
                    trimmed = TrimmedOutputDist(stock, cuda_graph)
                    for _ in range(4 if cuda_graph else 1):
                        for ours, theirs in zip(both_ways(trimmed, ranks, dims, sizes), expected, strict=True):
                            assert torch.equal(ours, theirs)
                    replayed = [graphed.describe()["replayed"] for graphed in trimmed.graphed()]
                    assert replayed == [ranks.device.type == "cuda"] * (2 if cuda_graph else 0)
                    for graphed in trimmed.graphed():
                        graphed.close()
    comm_ops.set_gradient_division(True)


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), (3, False), GPU_PLACES[1]])
def test_gives_what_torchrec_gives(run_ranks, world_size, gpu):
    run_ranks(world_size, compare, gpu=gpu)


def others(ranks: Ranks) -> None:
    dims, forward = [4, 4], QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)
    assert not TrimmedOutputDist.can_replace(stock_dist(ranks, dims, callbacks=[torch.neg]))
    registry = get_qcomm_codecs_registry(forward, device=ranks.device)
    assert not TrimmedOutputDist.can_replace(stock_dist(ranks, dims, qcomm_codecs_registry=registry))


def test_leaves_codecs_and_callbacks_to_torchrec(run_ranks):
    run_ranks(2, others)
