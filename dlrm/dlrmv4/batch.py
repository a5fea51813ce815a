"""A batch of DLRMv4 as TorchRec's train pipelines take it: all ids in one KeyedJaggedTensor, and what else is read."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dlrm_bench.dlrm.config import require
from dlrm_bench.dlrm.dlrmv4.config import OWN_TOKENS, ModelConfig, tables
from dlrm_bench.dlrm.dlrmv4.samples import Samples


@dataclass(kw_only=True)
class Batch(Pipelineable):
    """B samples whose histories have T events. TorchRec runs its input dist ahead where the tables' input is a field of
    the batch and nothing else, so the ids are joined before."""

    features: KeyedJaggedTensor
    """int32 ids of the features of `tables`, in their order."""
    lengths: Tensor
    """Events of each history, int32 [B]."""
    timestamp: Tensor
    """Seconds, int32 [T]."""
    action: Tensor
    """Bits, uint8 [T]."""
    query_timestamp: Tensor
    """Seconds, int32 [B]."""
    labels: Tensor
    """float32 [B]."""
    longest: int
    """Tokens of the longest sequence, counted on the host: nothing waits for the device to know it."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Returns the batch on `device`."""
        return self._each(lambda of: of.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Returns the batch in pinned memory."""
        return self._each(lambda of: of.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the batch's memory until `stream` has done what is launched on it now."""
        for of in fields(self):
            if of.name != "longest":
                getattr(self, of.name).record_stream(stream)

    def _each(self, function: Callable[[Any], Any]) -> "Batch":
        moved = {of.name: function(getattr(self, of.name)) for of in fields(self) if of.name != "longest"}
        return replace(self, **moved)


def batch_of(samples: Samples, config: ModelConfig) -> Batch:
    """Returns `samples`, on the host, as a batch; its KeyedJaggedTensor is a copy of their ids, all else their memory.

    ValueError where there is no sample or a history is longer than --model.max-history.
    """
    require(len(samples.labels) > 0, "a batch has no samples, which TorchRec's KeyedJaggedTensor cannot say: drop it")
    longest = longest_of(samples)
    require(
        longest <= config.max_length,
        f"a history has {longest - OWN_TOKENS} events and --model.max-history is {config.max_history}: cut histories "
        "to that length or raise it",
    )
    return Batch(
        features=kjt_of(samples, config),
        lengths=samples.lengths,
        timestamp=samples.timestamp,
        action=samples.action,
        query_timestamp=samples.query_timestamp,
        labels=samples.labels,
        longest=longest,
    )


def longest_of(samples: Samples) -> int:
    """Returns the tokens of the longest sequence; waits for the device if the samples lie there."""
    return OWN_TOKENS + (int(samples.lengths.max()) if len(samples.lengths) else 0)


def kjt_of(samples: Samples, config: ModelConfig) -> KeyedJaggedTensor:
    """Returns the ids of all features, int32, each with lengths int32 [B]; on the samples' device."""
    one = torch.ones_like(samples.lengths)
    values, lengths = [], []
    for history, candidate in (
        (samples.item, samples.candidate_item),
        (samples.artist, samples.candidate_artist),
        (samples.album, samples.candidate_album),
    ):
        values += [history, candidate]
        lengths += [samples.lengths, one]
    values += samples.context.unbind()
    lengths += [one] * len(samples.context)
    keys = [feature for table in tables(config) for feature in table.features]
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths), stride=len(one))


def check_samples(samples: Samples, config: ModelConfig) -> None:
    """ValueError unless shapes and dtypes are those of Samples and each id is a row of its table.

    Reads every id: for files that are read the first time and for tests, not for every batch. FBGEMM's kernels read
    whatever lies behind a table for an id that is too large.
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
