"""Output dists through peer memory, each way, with bitwise the same results and gradients.

The vectors of tables split by columns, or not at all, are copied: a rank writes its columns where its peers' samples
have them. Those of tables split by rows are sums of what all ranks have looked up: each rank writes its terms to the
rank of the sample, which adds them in rank order; of two ranks NCCL's sum has the same bits. Every rank writes its
gradients where the owners' lookups read them, divided on their way. Unpooled vectors are copied too, one block for each
feature and rank: lookups have them by feature, then rank, and TorchRec's all-to-all needs them by rank, each way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable

from .. import reasons
from ..sharded_modules import Sharded
from ..trimmed.ec_sharder import TrimmedEC
from ..trimmed.output_dist import TrimmedOutputDist, VectorsOnTheirWay
from .push import Block, Layout, sum_of_ranks

if TYPE_CHECKING:
    from .exchanges import Peers, Pushed


def output_dists(peers: "Peers", one: Sharded) -> tuple[dict[nn.Module, Callable[..., Any]], dict[str, str]]:
    """Returns the forwards that put a module's output dists through peer memory; and why NCCL keeps the others, by
    what they exchange."""
    forwards, kept = dict[nn.Module, Callable[..., Any]](), dict[str, str]()
    pooled = not isinstance(one.collection, TrimmedEC)
    for kind, stock in zip(one.collection._sharding_types, one.collection._output_dists, strict=True):
        name = f"{'pooled ' if pooled else ''}vectors of {one.name}, {kind}"
        if type(stock) in (DpPooledEmbeddingDist, DpSequenceEmbeddingDist):
            continue
        if getattr(stock if pooled else stock._dist, "_codecs", None) is not None:
            kept[name] = reasons.PEERS_QUANTISED()
        elif type(stock) is TrimmedOutputDist:
            forwards[stock] = partial(_columns, peers, name, stock.dims, ())
        elif type(stock) is TwPooledEmbeddingDist:
            forwards[stock] = partial(_columns, peers, name, stock._dim_sum_per_rank, stock._callbacks or ())
        elif type(stock) is RwPooledEmbeddingDist:
            forwards[stock] = partial(_rows, peers, name)
        elif type(stock) is TwSequenceEmbeddingDist:
            of_ranks = one.collection._sharding_type_to_sharding[kind].feature_names_per_rank()
            forwards[stock] = partial(_sequences, peers, name, list(map(len, of_ranks)))
        else:
            kept[name] = reasons.PEERS_OTHER_DIST(kind=type(stock).__name__)
    return forwards, kept


def _columns(
    peers: "Peers",
    name: str,
    dims: Sequence[int],
    callbacks: Sequence[Callable[[Tensor], Tensor]],
    local_embs: Tensor,
    sharding_ctx: EmbeddingShardingContext,
) -> Awaitable[Tensor]:
    """Stands for the forward of a TwPooledEmbeddingDist. dims: columns of each rank."""
    awaitable = VectorsOnTheirWay(local_embs, _OfColumns(peers, name, sharding_ctx.batch_size_per_rank, dims))
    awaitable.callbacks.extend(callbacks)
    return awaitable


def _rows(peers: "Peers", name: str, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
    """Stands for the forward of a RwPooledEmbeddingDist."""
    dims = [local_embs.shape[1]] * peers.ranks
    return VectorsOnTheirWay(local_embs, _OfRows(peers, name, sharding_ctx.batch_size_per_rank, dims))


def _sequences(
    peers: "Peers", name: str, features: Sequence[int], local_embs: Tensor, sharding_ctx: SequenceShardingContext
) -> Awaitable[Tensor]:
    """Stands for the forward of a TwSequenceEmbeddingDist, whose batches have declared sizes. features: number of
    features that each rank looks up."""
    before = sharding_ctx.features_before_input_dist
    assert before is not None, "an input dist of declared sizes has told them"
    return VectorsOnTheirWay(local_embs, _Unpooled(peers, name, features, before.length_per_key(), local_embs.shape[1]))


class _OfVectors(ABC):
    """The exchange of one batch, each way; see VectorExchange."""

    def __init__(self, peers: "Peers", name: str, rows: int, sent: int, shared: Hashable) -> None:
        """rows: number that arrive. sent: number of elements that this rank looks up. shared: see Peers.push."""
        self._peers, self._name, self.rows = peers, name, rows
        self._sent, self._shared = sent, shared
        self._divides = get_gradient_division()

    def start_forward(self, local_embs: Tensor) -> Callable[[], Tensor]:
        """Sends them; returns what waits for those of the local batch, [rows, columns]."""
        pushed = self._send(self._name, local_embs, self._along, 1)
        return lambda: self._arrived(pushed.wait())

    def backward(self, grad: Tensor) -> Tensor:
        """Returns the flat gradient of the sent vectors, given that of the local batch's."""
        divisor = self._peers.ranks if self._divides else 1
        pushed = self._send(f"gradients of the {self._name}", grad, self._back, divisor)
        return pushed.wait()[: self._sent]

    def _send(self, name: str, values: Tensor, lay_out: Callable[[int], Layout], divisor: int) -> "Pushed":
        """Sends parts of rows, [any, columns]. lay_out: of their distance, which is any too."""
        values = values if values.stride(1) == 1 else values.contiguous()
        form = values.stride(0)
        return self._peers.push(name, "vectors", values, self._shared, partial(lay_out, form), form, divisor=divisor)

    @abstractmethod
    def _along(self, distance: int) -> Layout:
        """Returns the form of the exchange of vectors whose rows lie `distance` elements apart."""

    @abstractmethod
    def _back(self, distance: int) -> Layout:
        """Returns the form of the exchange of gradients whose rows lie `distance` elements apart."""

    @abstractmethod
    def _arrived(self, received: Tensor) -> Tensor:
        """Returns the local batch's vectors, [rows, columns], of the buffer that the ranks have written."""

    def _copied(self, received: Tensor, columns: int) -> Tensor:
        """Returns rows that arrived as they are."""
        vectors = received[: self.rows * columns].view(self.rows, columns)
        return vectors.clone() if self._peers.copies else vectors


class _Pooled(_OfVectors):
    """Rank r has sizes[r] samples, and looks up dims[r] columns for all of them: [samples of all ranks, dims[r]]."""

    def __init__(self, peers: "Peers", name: str, sizes: Sequence[int], dims: Sequence[int]) -> None:
        self._sizes, self._dims, self._own = tuple(sizes), tuple(dims), dims[peers.rank]
        self._before = list(accumulate(self._sizes, initial=0))
        """Samples of all earlier ranks; at the end, of all ranks."""
        sent, shared = self._before[-1] * self._own, (self._sizes, self._dims)
        super().__init__(peers, name, sizes[peers.rank], sent, shared)


class _OfColumns(_Pooled):
    """Each rank has other columns of the vectors of all samples."""

    def _along(self, distance: int) -> Layout:
        first, width = sum(self._dims[: self._peers.rank]), sum(self._dims)
        blocks = [
            Block(distance * before, distance, first, width, size, self._own)
            for before, size in zip(self._before, self._sizes, strict=False)
        ]
        return Layout(list(enumerate(blocks)), width * max(self._sizes))

    def _back(self, distance: int) -> Layout:
        before = self._before[self._peers.rank]
        firsts = accumulate(self._dims, initial=0)
        blocks = [
            Block(first, distance, before * dim, dim, self.rows, dim)
            for first, dim in zip(firsts, self._dims, strict=False)
        ]
        return Layout(list(enumerate(blocks)), max(self._dims) * self._before[-1])

    def _arrived(self, received: Tensor) -> Tensor:
        return self._copied(received, sum(self._dims))


class _OfRows(_Pooled):
    """Each rank has terms of the vectors of all samples."""

    def _along(self, distance: int) -> Layout:
        assert len(set(self._sizes)) == 1, "as TorchRec's reduce-scatter"
        size = self.rows
        to = size * self._own * self._peers.rank
        blocks = [Block(distance * before, distance, to, self._own, size, self._own) for before in self._before[:-1]]
        return Layout(list(enumerate(blocks)), self._own * self._before[-1])

    def _back(self, distance: int) -> Layout:
        to = self._own * self._before[self._peers.rank]
        block = Block(0, distance, to, self._own, self.rows, self._own)
        return Layout([(rank, block) for rank in range(self._peers.ranks)], self._own * self._before[-1])

    def _arrived(self, received: Tensor) -> Tensor:
        pooled = torch.empty(self.rows * self._own, dtype=received.dtype, device=received.device)
        sum_of_ranks(received.view(self._peers.ranks, -1), pooled)
        return pooled.view(self.rows, -1)


class _Unpooled(_OfVectors):
    """All ranks have batches of the same sizes. Rank r looks up ids of its features, in rows by feature, then rank, and
    receives all features' rows."""

    def __init__(self, peers: "Peers", name: str, features: Sequence[int], ids: Sequence[int], width: int) -> None:
        """features: number of each rank's. ids: of a rank's batch, for each feature of the first rank, then the second
        and so on. width: columns of a row."""
        ends = accumulate(features, initial=0)
        self._width, self._ids = width, tuple(tuple(ids[first:end]) for first, end in pairwise(ends))
        """Numbers of ids of each rank's features."""
        self._looked_up = [peers.ranks * sum(of_rank) * width for of_rank in self._ids]
        """Elements that each rank looks up."""
        super().__init__(peers, name, sum(ids), self._looked_up[peers.rank], (self._ids, width))

    def _along(self, distance: int) -> Layout:
        rank, ranks = self._peers.rank, self._peers.ranks
        target, source, blocks = sum(map(sum, self._ids[:rank])), 0, []
        for ids in self._ids[rank]:
            blocks += [(to, self._block(source + ids * to, distance, target, ids)) for to in range(ranks)]
            source, target = source + ids * ranks, target + ids
        return Layout(blocks, self.rows * self._width)

    def _back(self, distance: int) -> Layout:
        rank, ranks = self._peers.rank, self._peers.ranks
        source, blocks = 0, []
        for owner, of_owner in enumerate(self._ids):
            target = 0
            for ids in of_owner:
                blocks.append((owner, self._block(source, distance, target + ids * rank, ids)))
                source, target = source + ids, target + ids * ranks
        return Layout(blocks, max(self._looked_up))

    def _block(self, source: int, distance: int, target: int, rows: int) -> Block:
        return Block(source * distance, distance, target * self._width, self._width, rows, self._width)

    def _arrived(self, received: Tensor) -> Tensor:
        return self._copied(received, self._width)
