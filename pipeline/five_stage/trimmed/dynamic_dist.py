"""The input dist of row-wise tables and of features of undeclared sizes: one host read per batch, via pinned memory.

static_dist.py describes input dists and their streams.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all

from .packed_ids import IdFormat
from .static_dist import AllToAll, Group, InFlight, KJTLayout, RankGroup, gather


class DynamicDist:
    """The input dist of groups with row-wise tables or undeclared sizes.

    A batch takes an all-to-all of lengths, whose size depends only on the stride, one host read of sums of lengths, and
    an all-to-all of values. `start` issues the read and `launch` waits for it. Row-wise buckets are TorchRec's own, of
    the whole input: bucketizing the other keys, although useless, takes fewer launches than separating them.
    """

    def __init__(self, groups: Sequence[Group], keys: Sequence[str], rank_group: RankGroup) -> None:
        """keys: of the input, in its order."""
        self.groups = groups
        self.exchanged = [group for group in groups if group.exchanged]
        self.local = [group for group in groups if not group.exchanged]
        self.rank_group, world_size = rank_group, rank_group.world_size
        self._keys = keys
        bucket_rows = self._bucket_rows()
        self._bucket_rows_tensors = [torch.tensor(rows, device=rank_group.device) for rows in bucket_rows]
        self._takes_input = any(group.hash_sizes is None for group in groups)

        # Source rows, each with a key's lengths: [key] of the input, then [list of bucket_rows][rank][key].
        num_input_rows = len(keys) if self._takes_input else 0

        def source_row(group: Group, feature: int, rank: int) -> int:
            key = keys.index(group.features[rank][feature])
            if group.hash_sizes is None:
                return key
            size = _bucket_size(group.hash_sizes[feature], world_size)
            layer = next(i for i, rows in enumerate(bucket_rows) if rows[key] == size)
            return num_input_rows + (layer * world_size + rank) * len(keys) + key

        def source_rows(groups: Sequence[Group], rank: int) -> list[int]:
            return [source_row(group, i, rank) for group in groups for i in range(len(group.features[rank]))]

        sent = [source_rows(self.exchanged, rank) for rank in range(world_size)]
        self.send_rows = [len(rows) for rows in sent]
        self.own_rows = self.send_rows[rank_group.rank]
        kept = [row for rows in sent for row in rows] + source_rows(self.local, rank_group.rank)
        self.kept_rows = _rows(kept, num_input_rows + len(bucket_rows) * world_size * len(keys), rank_group.device)
        # Received [rank][feature]; looked up [feature][rank].
        received = [rank * self.own_rows + i for i in range(self.own_rows) for rank in range(world_size)]
        self.received_rows = _rows(received, len(received), rank_group.device)

    def start(self, features: KeyedJaggedTensor) -> InFlight:
        """Exchanges the lengths of one batch and issues the host read."""
        form = IdFormat.of(features)
        sources = [features] if self._takes_input else []
        for index, rows in enumerate(self._bucket_rows_tensors):
            if rows.dtype != features.values().dtype:
                rows = self._bucket_rows_tensors[index] = rows.to(features.values().dtype)
            bucketized, _ = bucketize_kjt_before_all2all(features, self.rank_group.world_size, block_sizes=rows)
            sources.append(bucketized)
        lengths = _concatenated([source.lengths() for source in sources]).view(-1, features.stride())
        weights = None if form.weights is None else _concatenated([source.weights() for source in sources])
        return _DynamicInFlight(self, form, lengths, _concatenated([source.values() for source in sources]), weights)

    def all_to_all_of_lengths(self, sent: Tensor) -> Tensor:
        """Exchanges [rows to send, by rank; stride]; returns [rank and feature, stride]."""
        world_size = self.rank_group.world_size
        if world_size == 1 or not self.exchanged:
            return sent
        received = sent.new_empty(world_size * self.own_rows, sent.shape[1])
        receive_rows, group = [self.own_rows] * world_size, self.rank_group.group
        dist.all_to_all_single(received, sent, receive_rows, self.send_rows, group=group)
        return received

    def _bucket_rows(self) -> list[list[int]]:
        """Returns the rows per bucket of each key; further lists if tables of different sizes share a feature."""
        needed: dict[str, list[int]] = {key: [] for key in self._keys}
        for group in self.exchanged:
            if group.hash_sizes is not None:
                for name, rows in zip(group.features[0], group.hash_sizes, strict=True):
                    size = _bucket_size(rows, self.rank_group.world_size)
                    if size not in needed[name]:
                        needed[name].append(size)
        layers = max(map(len, needed.values()))
        return [[sizes[layer] if layer < len(sizes) else 1 for sizes in needed.values()] for layer in range(layers)]


class _DynamicInFlight:
    def __init__(
        self, dynamic: DynamicDist, form: IdFormat, lengths: Tensor, values: Tensor, weights: Tensor | None
    ) -> None:
        """lengths: [source rows, stride]; values, weights: of all those rows."""
        self._dynamic, self._format, self._lengths = dynamic, form, lengths
        self._values: Tensor | None = values
        self._weights = weights
        self._num_sent = sum(dynamic.send_rows)
        self._kept_lengths = gather(lengths, dynamic.kept_rows)
        self._received_lengths = dynamic.all_to_all_of_lengths(self._kept_lengths[: self._num_sent])
        self._read = _HostRead(torch.cat([self._kept_lengths, self._received_lengths]).sum(dim=1))
        self._received: list[int] = []
        self._all_to_all: AllToAll | None = None
        self._result: dict[int, KeyedJaggedTensor] = {}

    def launch(self) -> None:
        if self._values is None:
            return
        dynamic, num_sent = self._dynamic, self._num_sent
        sums, num_kept = self._read.wait(), len(self._kept_lengths)
        kept, self._received = sums[:num_kept], sums[num_kept:]
        _, values, weights = _permute(dynamic.kept_rows, self._lengths, self._values, self._weights, sum(kept))
        send_splits = _sums(kept, dynamic.send_rows)
        receive_splits = _sums(self._received, [dynamic.own_rows] * dynamic.rank_group.world_size)
        sent = sum(send_splits)
        if dynamic.exchanged:
            rows = self._format.pack(values[:sent], None if weights is None else weights[:sent])
            self._all_to_all = AllToAll.start(rows, send_splits, receive_splits, dynamic.rank_group)
        local = _kjt_layouts(dynamic.local, dynamic.rank_group.rank, kept[num_sent:], self._kept_lengths[num_sent:])
        values, weights = values[sent:], None if weights is None else weights[sent:]
        self._result = {each.group.index: each.kjt(values, weights) for each in local}
        self._values = self._weights = None

    def finish(self) -> dict[int, KeyedJaggedTensor]:
        self.launch()
        if self._all_to_all is not None:
            dynamic, own = self._dynamic, self._dynamic.own_rows
            received, total = self._format.unpack(self._all_to_all.wait()), sum(self._received)
            lengths, values, weights = _permute(dynamic.received_rows, self._received_lengths, *received, total)
            length_per_key = [sum(self._received[feature::own]) for feature in range(own)]
            lengths = lengths.reshape(own, dynamic.rank_group.world_size * lengths.shape[1])
            layouts = _kjt_layouts(dynamic.exchanged, dynamic.rank_group.rank, length_per_key, lengths)
            self._result |= {each.group.index: each.kjt(values, weights) for each in layouts}
            self._all_to_all = None
        return self._result


class _HostRead:
    """Numbers on their way to the host, in a pinned buffer that no other batch uses."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


def _kjt_layouts(groups: Sequence[Group], rank: int, length_per_key: list[int], lengths: Tensor) -> list[KJTLayout]:
    """lengths: [features of the groups, stride]."""
    layouts, first, start = [], 0, 0
    for group in groups:
        keys = group.features[rank]
        last = first + len(keys)
        of_group = length_per_key[first:last]
        offset_per_key = list(accumulate(of_group, initial=0))
        end = start + offset_per_key[-1]
        own_lengths, stride = lengths[first:last].reshape(-1), lengths.shape[1]
        layouts.append(KJTLayout(group, start, end, keys, own_lengths, None, stride, of_group, offset_per_key))
        first, start = last, end
    return layouts


def _bucket_size(rows: int, world_size: int) -> int:
    """Returns the number of rows of a table on one rank, in TorchRec's even row-wise sharding."""
    return -(-rows // world_size)


def _sums(lengths: list[int], counts: list[int]) -> list[int]:
    """Returns the sums of `counts` consecutive lengths each."""
    ends = list(accumulate(counts, initial=0))
    return [sum(lengths[start:end]) for start, end in pairwise(ends)]


def _rows(rows: list[int], total: int, device: torch.device) -> Tensor | None:
    """Returns the rows on the device; None if they are 0 .. total - 1."""
    return None if rows == list(range(total)) else torch.tensor(rows, dtype=torch.int32, device=device)


def _permute(
    rows: Tensor | None, lengths: Tensor, values: Tensor, weights: Tensor | None, total: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns lengths, values and weights of the rows, `total` values in all; of all rows if `rows` is None."""
    if rows is None:
        return lengths, values, weights
    lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(rows, lengths, values, weights, total)
    return lengths, values, weights


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
