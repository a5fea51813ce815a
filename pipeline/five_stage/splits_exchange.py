"""Exchanges the splits of a whole input dist, with one all-to-all and at most one host read.

TorchRec's input dist of a KJT has two steps: ranks tell each other the splits, then lengths and values are exchanged.
Its own code reads from the device, each time with a stream sync: the received splits (dist_data.py,
SplitsAllToAllAwaitable), the lengths per key of the received KJT (jagged_tensor.py, dist_init), and if ids were
bucketized by rows those of the sent one (dist_splits); and it makes a tensor of every list of splits and of the recat
by a blocking copy. Here each rank sends the lengths per key themselves, which contain all of that: one all-to-all, one
asynchronous copy into pinned memory, and one event to wait for when the splits are needed.

One read remains, because it cannot be reached from outside TorchRec: a KJT that arrives on the device without its
lengths per key is read by KeyedJaggedTensor.permute and split, like that of the very first batch.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable, _get_recat
from torchrec.distributed.types import Awaitable

from .trimmed.batch_size_cache import bound


class SplitsExchange:
    """Replaces KJTAllToAll.forward for the all-to-alls of an input dist, batch after batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._positions: dict[Any, Tensor] = {}
        self._recats: dict[Any, Tensor | None] = {}

    def start(self, requests: list["ExchangeRequest"]) -> None:
        """Launches the exchange for all requests of an input dist, on the current stream. Collective."""
        if requests:
            exchanged = _Exchanged(requests, self._order(requests), self._device)
            for index, request in enumerate(requests):
                request.exchanged, request.index, request.recat_of = exchanged, index, self._recat

    def _order(self, requests: list["ExchangeRequest"]) -> Tensor:
        """Returns positions, by rank, in [lengths per key of all requests known on the host, strides, unknown ones]."""
        key = tuple((*request.splits, request.on_host is None) for request in requests)
        if key not in self._positions:
            bound(self._positions)
            positions = torch.tensor(_positions(requests))
            self._positions[key] = _to_device(positions, self._device)
        return self._positions[key]

    def _recat(self, request: "ExchangeRequest", strides: list[int]) -> Tensor | None:
        keys, equal = request.splits[request.rank], len(set(strides)) == 1
        key = (keys, len(strides), request.stagger, None if equal else tuple(strides))
        if key not in self._recats:
            bound(self._recats)
            self._recats[key] = _get_recat(keys, len(strides), request.stagger, self._device, strides)
        return self._recats[key]


class ExchangeRequest(Awaitable[KJTAllToAllTensorsAwaitable]):
    """One KJT being exchanged; its `wait()` launches the all-to-alls of lengths and values."""

    exchanged: "_Exchanged"
    index: int
    recat_of: Any

    def __init__(self, features: KeyedJaggedTensor, all_to_all: KJTAllToAll, group: dist.ProcessGroup) -> None:
        """group: for all its collectives. all_to_all: the module that this replaces."""
        super().__init__()
        self.features, self.group = features, group
        self.splits, self.stagger = all_to_all._splits, all_to_all._stagger
        self.rank = dist.get_rank(group)
        self.on_host: list[int] | None = features.length_per_key_or_none()

    def lengths_per_key(self) -> Tensor:
        """Returns the lengths per key, int64 [keys], computed on the device."""
        features = self.features
        return features.lengths().view(len(features.keys()), features.stride()).sum(dim=1, dtype=torch.int64)

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        counts = self.exchanged.counts(self.index)
        return _KJTOnItsWay(self, counts, self.recat_of(self, counts.strides))


@dataclass(frozen=True, slots=True)
class _Counts:
    """The result of one request's exchange, on the host."""

    sent: list[list[int]]
    """[rank][key]: number of ids of each key that go to each rank."""
    received: list[list[int]]
    """[rank][key]: number of ids of each of this rank's keys that come from each rank."""
    strides: list[int]
    """[rank]: batch size of each rank."""


class _Exchanged:
    """The exchange of one input dist. By rank: for every request its lengths per key, and its stride."""

    def __init__(self, requests: list[ExchangeRequest], order: Tensor, device: torch.device) -> None:
        first = requests[0]
        self._splits, self._rank, cuda = [request.splits for request in requests], first.rank, device.type == "cuda"
        ranks = len(first.splits)
        send_splits = [sum(splits[rank] + 1 for splits in self._splits) for rank in range(ranks)]
        receive_splits = [send_splits[self._rank]] * ranks
        self._sent = sum(send_splits)
        known = [n for request in requests if request.on_host is not None for n in request.on_host]
        on_host = torch.tensor([*known, *(request.features.stride() for request in requests)])
        unknown = [request.lengths_per_key() for request in requests if request.on_host is None]
        counts = torch.cat([_to_device(on_host, device), *unknown])
        both = torch.empty(self._sent + sum(receive_splits), dtype=torch.int64, device=device)
        torch.index_select(counts, 0, order, out=both[: self._sent])
        self._work = dist.all_to_all_single(
            both[self._sent :], both[: self._sent], receive_splits, send_splits, group=first.group, async_op=True
        )
        self._on_host = both
        if cuda:
            self._work.wait()
            self._on_host = torch.empty(both.shape, dtype=torch.int64, pin_memory=True)
            self._on_host.copy_(both, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._cuda, self._read = cuda, list[_Counts]()

    def counts(self, index: int) -> _Counts:
        """Returns the counts of the request at `index`; the first call waits for the exchange."""
        if not self._read:
            self._copied.synchronize() if self._cuda else self._work.wait()
            numbers = iter(self._on_host.tolist())
            ranks = range(len(self._splits[0]))
            sent = [[[next(numbers) for _ in range(s[rank] + 1)][:-1] for s in self._splits] for rank in ranks]
            received = [[[next(numbers) for _ in range(s[self._rank] + 1)] for s in self._splits] for _ in ranks]
            for i in range(len(self._splits)):
                of_request = [from_rank[i] for from_rank in received]
                self._read.append(
                    _Counts(
                        [to_rank[i] for to_rank in sent],
                        [counts[:-1] for counts in of_request],
                        [counts[-1] for counts in of_request],
                    )
                )
        return self._read[index]


class _KJTOnItsWay(KJTAllToAllTensorsAwaitable):
    """Lengths and values in transit; `wait()` returns the KJT of this rank's keys, with known lengths per key.

    A subclass, because TorchRec's sharding contexts read their splits and batch sizes from this type's attributes
    (embedding_sharding.py, _set_sharding_context_intra_a2a). Replaces its constructor, which blocks to build the recat,
    and its _wait_impl, which reads lengths from the device.
    """

    def __init__(self, request: ExchangeRequest, counts: _Counts, recat: Tensor | None) -> None:
        Awaitable.__init__(self)
        features, keys = request.features, request.splits[request.rank]
        first = sum(request.splits[: request.rank])
        self._input, self._keys = features, features.keys()[first : first + keys]
        self._recat, self._stride_per_rank = recat, counts.strides
        self._length_per_key = [sum(of_key) for of_key in zip(*counts.received, strict=True)]
        values = ([sum(ids) for ids in counts.sent], [sum(ids) for ids in counts.received])
        lengths = ([n * features.stride() for n in request.splits], [keys * stride for stride in counts.strides])
        self._input_splits = {"lengths": lengths[0], "values": values[0], "weights": values[0]}
        self._output_splits = {"lengths": lengths[1], "values": values[1], "weights": values[1]}
        self._workers = len(request.splits)
        self._received, self._works = [], []
        for label, sent in zip(features.dist_labels(), features.dist_tensors(), strict=True):
            if self._workers == 1:
                self._received.append(sent)
                continue
            received = sent.new_empty(sum(self._output_splits[label]))
            self._received.append(received)
            splits = self._output_splits[label], self._input_splits[label]
            self._works.append(dist.all_to_all_single(received, sent, *splits, group=request.group, async_op=True))

    def _wait_impl(self) -> KeyedJaggedTensor:
        for work in self._works:
            work.wait()
        lengths, values, weights = *self._received[:2], (self._received[2] if len(self._received) > 2 else None)
        strides = self._stride_per_rank
        if self._recat is not None and self._workers > 1 and sum(strides) > 0:
            if len(set(strides)) == 1:
                permute, lengths = torch.ops.fbgemm.permute_2D_sparse_data, lengths.view(-1, strides[0])
            else:
                permute = torch.ops.fbgemm.permute_1D_sparse_data
            lengths, values, weights = permute(self._recat, lengths, values, weights, values.numel())
        return KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weights,
            lengths=lengths.view(-1),
            stride=sum(strides),
            length_per_key=self._length_per_key,
            offset_per_key=[0, *accumulate(self._length_per_key)],
        )


def _positions(requests: list[ExchangeRequest]) -> list[int]:
    of_request, at = {}, 0
    for known in (True, False):
        for request in requests:
            if (request.on_host is not None) is known:
                of_request[request] = at
                at += sum(request.splits)
        if known:
            strides, at = at, at + len(requests)
    order = []
    for rank in range(len(requests[0].splits)):
        for i, request in enumerate(requests):
            first = of_request[request] + sum(request.splits[:rank])
            order += [*range(first, first + request.splits[rank]), strides + i]
    return order


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies asynchronously, through pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
