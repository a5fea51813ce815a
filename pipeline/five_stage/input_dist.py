"""Stage 1 of one batch after the other, in steps that a schedule can put apart; TorchRec's own or with pinned reads."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable, KJTSplitsAllToAllMeta
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward
from torchrec.distributed.types import Awaitable

from .batch_fields import forward_replaced
from .splits_exchange import ExchangeRequest, SplitsExchange

Step = Literal["splits", "values", "features"]
"""Splits under way; lengths and values under way; distributed."""
_STEPS: tuple[Step, ...] = ("splits", "values", "features")


class Distribution:
    """The input dist of one batch. A step may wait on the host for the one before it."""

    context: Any
    """TorchRec's, for the collection's compute_and_output_dist."""
    features: KJTList
    """The KJTs that this rank looks up, after the last step."""

    def __init__(self, start: "Callable[[KeyedJaggedTensor], tuple[Any, Callable[[], Awaitable[KJTList]]]]") -> None:
        """start: InputDist's."""
        self._start = start
        self._done = 0

    @property
    def done(self) -> bool:
        """All steps are taken."""
        return self._done == len(_STEPS)

    def advance(self, features: KeyedJaggedTensor, until: Step) -> None:
        """Takes the steps up to `until` that have not been taken. features: the batch's KJT."""
        for step in _STEPS[self._done : _STEPS.index(until) + 1]:
            if step == "splits":
                self.context, self._splits = self._start(features)
            elif step == "values":
                self._values = self._splits()
                del self._splits
            else:
                self.features = self._values.wait()
            self._done += 1


class InputDist:
    """Input dists of a collection on a process group of one's choice. All ranks start them in the same order.

    Nothing of the collection stays replaced: the forwards of its KJTAllToAlls are only while an input dist starts.
    """

    def __init__(
        self,
        collection: ShardedEmbeddingBagCollection,
        device: torch.device,
        group: dist.ProcessGroup | None,
        pinned: bool,
    ) -> None:
        """group: for the collectives of TorchRec's KJTAllToAlls instead of the collection's own, but for those of the
        very first batch, in which TorchRec builds its input dists. pinned: by SplitsExchange, where batches are of
        one size for all features.
        """
        self._collection, self._group = collection, group
        self._exchange = SplitsExchange(device) if pinned else None

    @property
    def waits(self) -> bool:
        """Whether steps wait on the host for those before them: TorchRec's do, a trimmed input dist may not."""
        return getattr(self._collection, "input_dist_waits", True)

    def new(self) -> Distribution:
        """Returns the input dist of the next batch; nothing is launched yet."""
        return Distribution(self._start)

    def _start(self, features: KeyedJaggedTensor) -> tuple[Any, Callable[[], Awaitable[KJTList]]]:
        collection, context = self._collection, self._collection.create_context()
        all_to_alls = [getattr(module, "_dist", None) for module in collection._input_dists]
        all_to_alls = [module for module in all_to_alls if isinstance(module, KJTAllToAll)]
        if not all_to_alls:  # the first batch, or no sharding that needs one: replicated tables, or a trimmed dist
            return context, collection.input_dist(context, features).wait
        if self._exchange is None or features.variable_stride_per_key():
            with self._replaced(all_to_alls, lambda all_to_all: self._torchrec_forward(all_to_all)):
                splits = collection.input_dist(context, features)
            metas = [request for request in splits.awaitables if isinstance(request, KJTSplitsAllToAllMeta)]
            fused = FusedKJTListSplitsAwaitable([splits], [context], metas[0].pg)
            return context, lambda: fused.wait()[0]
        requests: list[ExchangeRequest] = []
        with self._replaced(all_to_alls, lambda all_to_all: self._request(all_to_all, requests)):
            splits = collection.input_dist(context, features)
        self._exchange.start(requests)
        return context, splits.wait

    def _torchrec_forward(self, all_to_all: KJTAllToAll) -> Callable[[KeyedJaggedTensor], Any]:
        return KJTAllToAllForward(self._group or all_to_all._pg, all_to_all._splits, all_to_all._stagger)

    def _request(
        self, all_to_all: KJTAllToAll, requests: list[ExchangeRequest]
    ) -> Callable[[KeyedJaggedTensor], ExchangeRequest]:
        def forward(features: KeyedJaggedTensor) -> ExchangeRequest:
            requests.append(ExchangeRequest(features, all_to_all, self._group or all_to_all._pg))
            return requests[-1]

        return forward

    @staticmethod
    @contextmanager
    def _replaced(
        all_to_alls: list[KJTAllToAll], forward_of: Callable[[KJTAllToAll], Callable[[KeyedJaggedTensor], Any]]
    ) -> Iterator[None]:
        with ExitStack() as stack:
            for all_to_all in all_to_alls:
                stack.enter_context(forward_replaced(all_to_all, forward_of(all_to_all)))
            yield
