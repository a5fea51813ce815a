"""A batch of DLRMv4 for TorchRec's train pipelines: all ids in one KeyedJaggedTensor, and the dense network's other
inputs."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dlrm_bench.dlrm.config import require
from dlrm_bench.dlrm.dlrmv4.config import OWN_TOKENS, ModelConfig, tables
from dlrm_bench.dlrm.dlrmv4.data.packed import CANDIDATE, CONTEXT_ROWS, LABEL, LENGTH, QUERY, Packed, events_of
from dlrm_bench.dlrm.dlrmv4.samples import Samples


@dataclass(kw_only=True)
class DenseBatch:
    """The dense network's inputs of B samples, apart from embeddings; their histories have T events."""

    lengths: Tensor
    """Events of each history, int32 [B]."""
    timestamp: Tensor
    """Seconds, int32 [T]."""
    action: Tensor
    """Bits, uint8 [T]; [E] of distinct events."""
    query_timestamp: Tensor
    """Seconds, int32 [B]."""
    labels: Tensor
    """float32 [B]."""
    longest: int
    """Tokens of the longest sequence, counted on the host: nothing waits for the device to know it."""
    event: Tensor | None = None
    """Distinct event (0 to E - 1) of each event of the histories, int32 [T]; embeddings and `action` then contain only
    the E distinct events. None: they contain all T events."""
    item: Tensor | None = None
    """Distinct item (0 to I - 1) of each of the E distinct events, int32 [E]; embeddings then contain only the I
    distinct items, and each action is one bit. None: embeddings contain events."""
    attention_factor: Tensor | None = None
    """Factor on attention, fp32 [], if `longest` exceeds the length of the longest sequence."""


@dataclass(kw_only=True)
class Batch(DenseBatch, Pipelineable):
    """A batch whose ids are one field, because TorchRec runs its input dist ahead only if the tables' input is a field
    of the batch."""

    features: KeyedJaggedTensor
    """int32 ids of the features of `tables`, in that order; for distinct events, lengths have no meaning."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Returns the batch on `device`."""
        return self._each(lambda of: of.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Returns the batch in pinned memory."""
        return self._each(lambda of: of.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the batch's memory until `stream` has finished its present work."""
        for of in self._on_device().values():
            of.record_stream(stream)

    def _on_device(self) -> dict[str, Any]:
        values = {of.name: getattr(self, of.name) for of in fields(self) if of.name != "longest"}
        return {name: value for name, value in values.items() if value is not None}

    def _each(self, function: Callable[[Any], Any]) -> "Batch":
        return replace(self, **{name: function(value) for name, value in self._on_device().items()})


def batch_of(samples: Samples, config: ModelConfig, distinct: bool = False) -> Batch:
    """Returns `samples`, on the host, as a batch; its KeyedJaggedTensor is a copy of their ids, all else their memory.

    distinct: keep each pair of item and action in the histories once, in order of items. Except for place and time, a
    token follows from the pair, so tables are read and tokens made once per pair: the same results up to the order of
    sums. The host sorts T numbers for this.
    ValueError if there is no sample, if a history is longer than --model.max-history, or if distinct events are
    requested and an item has two artists or two albums.
    """
    require(len(samples.labels) > 0, "a batch has no samples, which a KeyedJaggedTensor cannot represent: drop it")
    longest = longest_of(samples)
    require(
        longest <= config.max_length,
        f"a history has {longest - OWN_TOKENS} events and --model.max-history is {config.max_history}: cut histories "
        "to that length or raise it",
    )
    event = None
    named: tuple[Tensor, ...] = (samples.item, samples.artist, samples.album)
    lengths, action = samples.lengths, samples.action
    if distinct:
        first, event = _distinct(samples)
        named, action = tuple(of[first] for of in named), action[first]
        # As many for each sample: FBGEMM gives a sequence one warp.
        share, more = divmod(len(first), len(lengths))
        lengths = share + (torch.arange(len(lengths)) < more).int()
    return Batch(
        features=_kjt(samples, config, named, lengths.int()),
        lengths=samples.lengths,
        timestamp=samples.timestamp,
        action=action,
        query_timestamp=samples.query_timestamp,
        labels=samples.labels,
        longest=longest,
        event=event,
    )


def batch_of_packed(packed: Packed, artist: Tensor, album: Tensor, config: ModelConfig) -> Batch:
    """Returns a packed batch as a Batch on the device of its buffer, without waiting for the device: with each distinct
    event of a user once, so that tables are read and tokens made once per event; or with each distinct item once, if
    the packed batch contains items.

    artist, album: int32 by item, on that device (ItemMaps).
    """
    table, size = packed.samples, packed.layout.samples
    share, more = divmod(packed.layout.named, size)  # as many for each sample: FBGEMM gives a sequence one warp
    events = events_of(packed)
    item = packed.item.long()
    named = Samples(
        lengths=table[LENGTH],
        item=packed.item,
        artist=artist[item],
        album=album[item],
        timestamp=packed.timestamp[events],
        action=packed.action,
        candidate_item=table[CANDIDATE],
        candidate_artist=table[CANDIDATE + 1],
        candidate_album=table[CANDIDATE + 2],
        query_timestamp=table[QUERY],
        context=table[CONTEXT_ROWS:LABEL],
        labels=table[LABEL].float(),
    )
    spread = share + (torch.arange(size, device=table.device) < more).int()
    return Batch(
        features=_kjt(named, config, (named.item, named.artist, named.album), spread.int()),
        lengths=named.lengths,
        timestamp=named.timestamp,
        action=named.action,
        query_timestamp=named.query_timestamp,
        labels=named.labels,
        longest=packed.longest + OWN_TOKENS,
        event=events.int(),
        item=packed.place,
    )


def _distinct(samples: Samples) -> tuple[Tensor, Tensor]:
    """Returns an event of each distinct pair of item and action, int64 [E], and the pair of each event, int32 [T]."""
    pairs = samples.item.long() * 256 + samples.action
    distinct, event = pairs.unique(return_inverse=True)
    first = torch.empty_like(distinct).scatter_(0, event, torch.arange(len(pairs)))
    for name in ("artist", "album"):
        of = getattr(samples, name)
        other = of[first][event] != of
        require(
            not bool(other.any()),
            f"samples.{name}: item {int(samples.item[other.int().argmax()]) if len(other) else 0} has two values; give "
            "each item one, or make batches with distinct=False",
        )
    return first, event.int()


def longest_of(samples: Samples) -> int:
    """Returns the number of tokens of the longest sequence; waits for the device if the samples are there."""
    return OWN_TOKENS + (int(samples.lengths.max()) if len(samples.lengths) else 0)


def kjt_of(samples: Samples, config: ModelConfig) -> KeyedJaggedTensor:
    """Returns the ids of all features, int32, each with lengths int32 [B]; on the samples' device."""
    return _kjt(samples, config, (samples.item, samples.artist, samples.album), samples.lengths)


def _kjt(samples: Samples, config: ModelConfig, named: tuple[Tensor, ...], of_named: Tensor) -> KeyedJaggedTensor:
    one = torch.ones_like(samples.lengths)
    candidates = (samples.candidate_item, samples.candidate_artist, samples.candidate_album)
    values, lengths = [], []
    for history, candidate in zip(named, candidates, strict=True):
        values += [history, candidate]
        lengths += [of_named, one]
    values += samples.context.unbind()
    lengths += [one] * len(samples.context)
    keys = [feature for table in tables(config) for feature in table.features]
    return KeyedJaggedTensor(
        keys,
        torch.cat(values),
        lengths=torch.cat(lengths),
        stride=len(one),
        length_per_key=[len(of) for of in values],  # which the input dist would read of the device
    )


def check_samples(samples: Samples, config: ModelConfig) -> None:
    """Raises ValueError unless shapes and dtypes are those of Samples and each id is a row of its table.

    Reads every id: use it for files that are read for the first time and in tests, not for every batch. If an id is too
    large, FBGEMM's kernels read memory beyond the table.
    """
    size, events = len(samples.lengths), int(samples.lengths.sum())
    shapes: dict[str, tuple[int, ...]] = {"context": (len(config.context_rows), size)}
    shapes |= dict.fromkeys(("item", "artist", "album", "timestamp", "action"), (events,))
    dtypes = {"action": torch.uint8, "labels": torch.float32}
    for of in fields(samples):
        tensor = getattr(samples, of.name)
        shape, dtype = shapes.get(of.name, (size,)), dtypes.get(of.name, torch.int32)
        require(
            tuple(tensor.shape) == shape and tensor.dtype == dtype,
            f"samples.{of.name} is {tensor.dtype} {list(tensor.shape)}: it must be {dtype} {list(shape)}",
        )
    require(size == 0 or int(samples.lengths.min()) >= 0, "samples.lengths: a history has less than no events")
    ids = (
        torch.cat([samples.item, samples.candidate_item]),
        torch.cat([samples.artist, samples.candidate_artist]),
        torch.cat([samples.album, samples.candidate_album]),
        *samples.context.unbind(),
    )
    for table, rows in zip(tables(config), ids, strict=True):
        if len(rows):
            least, most = int(rows.min()), int(rows.max())
            require(
                least >= 0 and most < table.rows,
                f"table {table.name} has {table.rows} rows and the samples name rows {least} to {most}: generate data "
                "for these tables, or train with the rows that the data were made for",
            )
