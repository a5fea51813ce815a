"""The samples of DLRMv4 as the training loop reads them: windows of a cache, in the reference's order."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import overload

import numpy as np

from dlrm_bench.dlrm.data.paths import why_not
from dlrm_bench.dlrm.dlrmv4.config import DataConfig, ModelConfig
from dlrm_bench.dlrm.dlrmv4.data.builder import BatchBuilder
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache, find_cache
from dlrm_bench.dlrm.dlrmv4.data.deal import RankSamples
from dlrm_bench.dlrm.dlrmv4.data.generate import read_generated
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.limits import POOLS, Rows
from dlrm_bench.dlrm.dlrmv4.data.order import Order
from dlrm_bench.dlrm.dlrmv4.data.packed import Packed
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex


@dataclass(eq=False, slots=True)
class WindowBatch:
    """One rank's samples of one iteration, in host memory."""

    packed: Packed
    num_valid: int
    """The first num_valid samples are real; the others, of the last batch of an evaluation, repeat one."""


class EventDataset:
    """The data set of events: windows 0 to train_windows - 1 train, in order; the last window evaluates. Samples of a
    window beyond whole global batches are dropped, always in training, as in the reference. See Dataset.

    train_samples counts all windows but the last, whatever train_windows: the cadence of evaluations, the schedule's
    epochs and MLPerf's count of samples are those of the whole data, of which fewer windows are the beginning.
    """

    def __init__(self, data: DataConfig, model: ModelConfig) -> None:
        """ValueError if the folder has no data, histories of another length, or ids outside the tables."""
        if not data.path.is_dir():
            raise ValueError(
                f"--data.path {data.path} {why_not(data.path)}: generate a small data set with 'dlrm-bench data "
                f"generate --preset smoke-dlrmv4 {data.path}', or name the folder of MLPerf's files"
            )
        rows = Rows(*model.rows)
        self._cache = Cache.open(find_cache(data.path))
        if self._cache.limits.history != model.max_history:
            raise ValueError(
                f"{self._cache.folder} has histories of {self._cache.limits.history} events, and --model.max-history "
                f"is {model.max_history}: make them equal"
            )
        if POOLS * self._cache.limits.pool > model.max_history:  # attention reads no token beyond the longest history
            raise ValueError(
                f"{self._cache.folder} has histories of up to {POOLS * self._cache.limits.pool} events, one of each "
                f"pool, and --model.max-history is {model.max_history}: make the data again with --history {POOLS} or "
                "more, and give --model.max-history the same number"
            )
        self._index = WindowIndex.open(self._cache)
        windows = len(self._index) - 1
        if windows < 1:
            raise ValueError(
                f"{self._cache.folder} has one window, which evaluates, and none to train on: name data of more days "
                "(--data.path)"
            )
        if (data.train_windows or 0) > windows:
            raise ValueError(
                f"--data.train-windows is {data.train_windows}: {self._cache.folder} has {windows} training windows, "
                "and one for evaluation: lower it or leave it out"
            )
        self.maps = ItemMaps.open(data.path, rows)
        self._rows, self._drop_last, self._deal = rows, data.drop_last_evaluation, data.deal
        self._train_windows = (0, data.train_windows or windows)
        self._eval_windows = (windows, windows + 1)
        self.train_samples: int | None = int(self._index.windows[:windows, 1].sum())
        self.eval_samples = self._index.anchors_of(windows)
        generated = read_generated(data.path)
        self.best_auc: float | None = None if generated is None else generated.best_auc

    def train_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> "WindowBatches":
        """See Dataset; ValueError if no window has one full global batch."""
        order = Order(self._index, *self._train_windows, world_size, local_batch_size)
        if len(order) == 0:
            raise ValueError(
                f"none of {self._train_windows[1]} windows has the {world_size} * {local_batch_size} samples of one "
                "global batch: lower --local-batch-size"
            )
        return WindowBatches(self._samples(order, rank, pin), tail=False)

    def eval_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> "WindowBatches":
        """See Dataset; ValueError if the last global batch is left out and there is no other."""
        order = Order(self._index, *self._eval_windows, world_size, local_batch_size)
        if self._drop_last and len(order) == 0:
            raise ValueError(
                f"the {self.eval_samples} samples of evaluation do not fill one global batch of {world_size} * "
                f"{local_batch_size}: lower --local-batch-size, or choose --no-data.drop-last-evaluation"
            )
        return WindowBatches(self._samples(order, rank, pin), tail=not self._drop_last)

    def _samples(self, order: Order, rank: int, pin: bool) -> RankSamples:
        return RankSamples(self._builder(pin), order, rank, self._deal)

    def _builder(self, pin: bool) -> BatchBuilder:
        return BatchBuilder(self._cache, self.maps, self._rows, pin=pin)


class WindowBatches(Sequence[WindowBatch]):
    """One rank's batches of an order, each built on demand, by any thread."""

    def __init__(self, samples: RankSamples, tail: bool) -> None:
        """tail: for an order of one window, add the samples beyond whole global batches, as a last one on every
        rank."""
        self._samples, order = samples, samples.order
        left = order.anchors - len(order) * order.world_size * order.local_batch
        self._numbers = range(len(order) + (tail and left > 0))

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> WindowBatch: ...
    @overload
    def __getitem__(self, at: slice) -> "WindowBatches": ...
    def __getitem__(self, at: int | slice) -> "WindowBatch | WindowBatches":
        if isinstance(at, slice):
            part = copy(self)
            part._numbers = self._numbers[at]
            return part
        number = self._numbers[at]
        if number < len(self._samples.order):
            return WindowBatch(self._samples.build(number), self._samples.order.local_batch)
        return self._last()

    def _last(self) -> WindowBatch:
        """Returns the tail, padded with its last sample: the longest history of a batch may scale the attention of all
        its samples (--model.attention-scale longest). A rank without a sample of the tail repeats the window's first.
        """
        order = self._samples.order
        own = order.tail(order.first, self._samples.rank)
        repeated = own[-1:] if len(own) else order.index.select(order.first, np.zeros(1, dtype=np.int64))
        padding = np.repeat(repeated, order.local_batch - len(own))
        return WindowBatch(self._samples.builder.build(np.concatenate([own, padding])), len(own))
