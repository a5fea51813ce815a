"""Output dists through peer memory give TorchRec's vectors and gradients, bit by bit."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed import comm_ops
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.trimmed.ec_sharder import TrimmedEC
from dlrm_bench.pipeline.five_stage.trimmed.output_dist import TrimmedOutputDist
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.peers.memory_on_cpu import module_of, peers_of

PLACES = [(2, False), GPU_PLACES[1]]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def both_ways(
    output_dist: Any, ranks: Ranks, columns: int, sizes: Sequence[int], kind: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What arrives, and the gradient of what was sent. kind: of the gradient that comes in."""
    torch.manual_seed(ranks.rank)
    embs = torch.randn(sum(sizes), columns).to(ranks.device, dtype).requires_grad_()
    result = output_dist(embs, EmbeddingShardingContext(batch_size_per_rank=list(sizes))).wait()
    rows, width = result.shape
    grad = {
        "plain": lambda: torch.randn(rows, width),
        "columns of more": lambda: torch.randn(rows, width + 7)[:, 3 : width + 3],
        "transposed": lambda: torch.randn(width, rows).t(),
        "the same for all": lambda: torch.randn(width).expand(rows, width),
    }[kind]()
    result.backward(grad.to(ranks.device, dtype))
    assert embs.grad is not None
    return result.detach().clone(), embs.grad.clone()


def columns(ranks: Ranks, kind: str) -> None:
    """Of any number on each rank, also none; batches of any size; a reordering of the received columns."""
    world = ranks.world_size

    def flipped(vectors: Tensor) -> Tensor:
        return vectors.flip(1)

    for dims in ([3 + 5 * rank for rank in range(world)], [4 * rank for rank in range(world)], [64] * world):
        for callbacks in (None, [flipped]):
            of = [[dim] for dim in dims]
            stock = TwPooledEmbeddingDist(dist.group.WORLD, dims, of, ranks.device, callbacks=callbacks)
            dists: list[Any] = [stock]
            if callbacks is None:
                dists.append(TrimmedOutputDist(stock, cuda_graph=True))
            for replaced in dists:
                same(ranks, stock, replaced, dims[ranks.rank], kind)


def rows(ranks: Ranks, kind: str) -> None:
    for width in (1, 5, 64):
        stock = RwPooledEmbeddingDist(dist.group.WORLD, [width])
        same(ranks, stock, stock, width, kind, uneven=False)


def same(ranks: Ranks, stock: Any, replaced: Any, width: int, kind: str, uneven: bool = True) -> None:
    module, world = module_of(ranks, kind=replaced), ranks.world_size
    peers = peers_of(ranks, module=module)
    launch = 0
    for sizes in ([6] * world, [4 + 3 * rank for rank in range(world)]) if uneven else ([6] * world, [1] * world):
        for division in (True, False):
            comm_ops.set_gradient_division(division)
            for dtype in DTYPES:
                expected = both_ways(stock, ranks, width, sizes, kind, dtype)
                for _ in range(2):
                    with peers.at(launch % 2):
                        got = both_ways(replaced, ranks, width, sizes, kind, dtype)
                    launch += 1
                    for ours, theirs in zip(got, expected, strict=True):
                        assert torch.equal(ours, theirs), (sizes, division, dtype)
                assert "forward" not in vars(replaced)
    comm_ops.set_gradient_division(True)
    name = "pooled vectors of module, kind"
    assert peers.describe() == {"through": [name, f"gradients of the {name}"], "by_nccl": {}}


@pytest.mark.parametrize("kind", ["plain", "columns of more", "transposed", "the same for all"])
@pytest.mark.parametrize("exchange", [columns, rows])
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_gives_what_torchrec_gives(
    run_ranks: Callable[..., Any], world_size: int, gpu: bool, exchange: Callable[..., None], kind: str
) -> None:
    run_ranks(world_size, exchange, kind, gpu=gpu)


def of_three(ranks: Ranks) -> None:
    """Columns are copied: there is nothing to round; sums are in rank order, wherever the sample is."""
    columns(ranks, "plain")
    comm_ops.set_gradient_division(False)
    stock = RwPooledEmbeddingDist(dist.group.WORLD, [8])
    module = module_of(ranks, kind=stock)
    peers = peers_of(ranks, module=module)
    with peers.at(0):
        got, grad = both_ways(stock, ranks, 8, [5] * 3, "plain", torch.float32)
    terms = []
    for rank in range(3):
        torch.manual_seed(rank)
        terms.append(torch.randn(15, 8)[5 * ranks.rank : 5 * ranks.rank + 5])
    assert torch.equal(got, (terms[0] + terms[1]) + terms[2])
    assert torch.equal(grad, both_ways(stock, ranks, 8, [5] * 3, "plain", torch.float32)[1])
    comm_ops.set_gradient_division(True)


def test_of_three_ranks(run_ranks: Callable[..., Any]) -> None:
    run_ranks(3, of_three)


def kept(ranks: Ranks) -> dict[str, Any]:
    config = QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)
    registry = get_qcomm_codecs_registry(config, device=ranks.device)
    world: Any = dist.group.WORLD
    module = module_of(
        ranks,
        row_wise=RwPooledEmbeddingDist(world, [4], qcomm_codecs_registry=registry),
        table_wise=TwPooledEmbeddingDist(world, [4, 4], [[4], [4]], ranks.device, qcomm_codecs_registry=registry),
        table_row_wise=TwRwPooledEmbeddingDist(ranks.rank, world, world, [4], [[4]], ranks.device),
        data_parallel=DpPooledEmbeddingDist(),
    )
    peers = peers_of(ranks, module=module)
    with peers.at(0):
        assert not any("forward" in vars(of) for of in module._output_dists)
    return peers.describe()


def test_what_nccl_keeps_has_a_reason(run_ranks: Callable[..., Any]) -> None:
    quantised, other = reasons.PEERS_QUANTISED(), reasons.PEERS_OTHER_DIST(kind="TwRwPooledEmbeddingDist")
    whys = {"row_wise": quantised, "table_wise": quantised, "table_row_wise": other}
    by_nccl = {f"pooled vectors of module, {kind}": why for kind, why in whys.items()}
    assert run_ranks(2, kept) == [{"through": [], "by_nccl": by_nccl}] * 2


def sequences(ranks: Ranks) -> None:
    """Of features with any number of ids on each rank, also without features."""
    world = ranks.world_size
    names = [f"feature_{i}" for i in range(5)]
    for shares in ([2, 3], [5, 0], [0, 5]) if world == 2 else ([2, 0, 3], [1, 4, 0]):
        firsts = [sum(shares[:rank]) for rank in range(world)]
        of_ranks = [names[first : first + share] for first, share in zip(firsts, shares, strict=True)]
        stock = TwSequenceEmbeddingDist(dist.group.WORLD, shares, ranks.device)
        same_sequences(ranks, stock, names, of_ranks)


class Sequences(TrimmedEC):
    """A sharded EmbeddingCollection, as far as Peers use it."""

    def __init__(self, of: Any, sharding: Any) -> None:
        torch.nn.Module.__init__(self)
        self.rank_group, self._sharding_types, self._output_dists = of.rank_group, of._sharding_types, of._output_dists
        self._sharding_type_to_sharding = dict.fromkeys(of._sharding_types, sharding)


def same_sequences(ranks: Ranks, stock: Any, names: list[str], of_ranks: list[list[str]]) -> None:
    sharding = SimpleNamespace(feature_names_per_rank=lambda: of_ranks)
    module = Sequences(module_of(ranks, kind=stock), sharding)
    peers = peers_of(ranks, module=module)
    for launch, division in enumerate((True, False, True, True)):
        comm_ops.set_gradient_division(division)
        for ids in ([7, 1, 0, 4, 9], [3] * 5):
            for dtype in DTYPES:
                expected = unpooled_both_ways(stock, ranks, names, of_ranks, ids, dtype)
                with peers.at(launch % 2):
                    got = unpooled_both_ways(stock, ranks, names, of_ranks, ids, dtype, contiguous=launch < 3)
                assert "forward" not in vars(stock)
                for ours, theirs in zip(got, expected, strict=True):
                    assert torch.equal(ours, theirs), (ids, division, dtype)
    comm_ops.set_gradient_division(True)
    name = "vectors of module, kind"
    assert peers.describe() == {"through": [name, f"gradients of the {name}"], "by_nccl": {}}


def unpooled_both_ways(
    stock: Any,
    ranks: Ranks,
    names: list[str],
    of_ranks: list[list[str]],
    ids: list[int],
    dtype: torch.dtype,
    contiguous: bool = True,
) -> tuple[Tensor, Tensor]:
    """What arrives, and the gradient of what was sent; of two samples. contiguous: the gradient that comes in, as
    TorchRec's needs."""
    world, own = ranks.world_size, of_ranks[ranks.rank]
    of = dict(zip(names, ids, strict=True))
    torch.manual_seed(ranks.rank)
    lengths = torch.tensor([[of[name], 0] for name in own for _ in range(world)], dtype=torch.int64).view(-1, 2)
    sent = [sum(of[name] for name in of_rank) for of_rank in of_ranks]
    before = KeyedJaggedTensor(
        keys=names,
        values=torch.zeros(sum(ids), dtype=torch.int64),
        lengths=torch.tensor([[count, 0] for count in ids]).view(-1),
        stride=2,
        length_per_key=ids,
    )
    context = SequenceShardingContext(
        features_before_input_dist=before,
        input_splits=sent,
        output_splits=[sent[ranks.rank]] * world,
        lengths_after_input_dist=lengths.view(len(own), world * 2).to(ranks.device),
        batch_size_per_rank=[2] * world,
    )
    embs = torch.randn(world * sent[ranks.rank], 8).to(ranks.device, dtype).requires_grad_()
    result = stock(embs, context).wait()
    grad = torch.randn(result.shape).to(ranks.device, dtype)
    result.backward(grad if contiguous else torch.cat([grad, grad], 1)[:, :8])
    assert embs.grad is not None
    return result.detach().clone(), embs.grad.clone()


@pytest.mark.parametrize(("world_size", "gpu"), [*PLACES, (3, False)])
def test_unpooled_vectors_are_torchrecs(run_ranks: Callable[..., Any], world_size: int, gpu: bool) -> None:
    run_ranks(world_size, sequences, gpu=gpu)


def sent_on(ranks: Ranks) -> tuple[bool, bool]:
    """Whether what arrives lies in peer memory: of a model without collectives of its own, and of one with them."""
    stock = TwPooledEmbeddingDist(dist.group.WORLD, [4, 4], [[4], [4]], ranks.device)
    peers = peers_of(ranks, module=module_of(ranks, kind=stock))
    found = []
    for sends in (False, True):
        peers._sends = lambda sends=sends: sends  # type: ignore[misc]
        with peers.at(0):
            result = stock(torch.ones(4, 4), EmbeddingShardingContext(batch_size_per_rank=[2, 2])).wait()
        (exchange,) = peers._made.values()
        own = exchange._buffers[0].own.untyped_storage()
        found.append(result.untyped_storage().data_ptr() == own.data_ptr())
    return found[0], found[1]


def test_vectors_that_the_model_may_send_are_copied_out_of_peer_memory(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(2, sent_on) == [(True, False)] * 2
