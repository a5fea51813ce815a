"""Stage 1 of all sharded modules together, batch after batch, in steps that a schedule can separate; TorchRec's own or
with pinned reads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward
from torchrec.distributed.types import Awaitable

from .batch_fields import forward_replaced
from .feature_processors import with_weights
from .sharded_modules import Sharded
from .splits_exchange import ExchangeRequest, SplitsExchange

Step = Literal["splits", "values", "features"]
"""Splits in flight; lengths and values in flight; distributed."""
Launch = Callable[[], list[Awaitable[KJTList]]]
"""Waits for splits and launches the values' all-to-alls of all modules."""
_STEPS: tuple[Step, ...] = ("splits", "values", "features")


class Distribution:
    """The input dists of one batch, of all modules. A step may wait on the host for the previous one."""

    contexts: list[Any]
    """TorchRec's context of each module, for compute_and_output_dist."""
    features: list[KJTList]
    """The KJTs that this rank looks up, of each module, after the last step."""

    def __init__(self, start: "Callable[[Sequence[KeyedJaggedTensor]], tuple[list[Any], Launch]]") -> None:
        """start: InputDist's."""
        self._start = start
        self._done = 0

    @property
    def done(self) -> bool:
        """Whether all steps have been taken."""
        return self._done == len(_STEPS)

    def advance(self, features: Sequence[KeyedJaggedTensor], until: Step) -> None:
        """Takes the remaining steps up to `until`. features: the batch's KJT of each module."""
        for step in _STEPS[self._done : _STEPS.index(until) + 1]:
            if step == "splits":
                self.contexts, self._splits = self._start(features)
            elif step == "values":
                self._values = self._splits()
                del self._splits
            else:
                self.features = [values.wait() for values in self._values]
                del self._values
            self._done += 1


class InputDist:
    """Input dists of modules on a chosen process group. All ranks start them in the same order.

    The modules are unchanged between calls: the forwards of their KJTAllToAlls are replaced only while an input dist
    starts.
    """

    def __init__(
        self,
        modules: Sequence[Sharded],
        device: torch.device,
        group: dist.ProcessGroup | None,
        pinned: bool,
    ) -> None:
        """group: for the collectives of TorchRec's KJTAllToAlls instead of the modules' own groups, except in the very
        first batch, in which TorchRec builds its input dists. pinned: use SplitsExchange, if all features have the same
        batch size."""
        self.modules, self._group = list(modules), group
        """The modules for which batches have a KJT, in this order."""
        self._exchange = SplitsExchange(device) if pinned else None

    @property
    def waits(self) -> bool:
        """Whether steps wait on the host for previous ones: TorchRec's do, a trimmed input dist may not."""
        return any(getattr(one.collection, "input_dist_waits", True) for one in self.modules)

    def new(self) -> Distribution:
        """Returns the input dists of the next batch; nothing is launched yet."""
        return Distribution(self._start)

    def _start(self, features: Sequence[KeyedJaggedTensor]) -> "tuple[list[Any], Launch]":
        contexts = [one.module.create_context() for one in self.modules]
        stock = [one for one in self.modules if _all_to_alls(one)]
        of_stock = [all_to_all for one in stock for all_to_all in _all_to_alls(one)]
        pinned = self._exchange is not None and not any(kjt.variable_stride_per_key() for kjt in features)
        requests: list[ExchangeRequest] = []
        started = []
        with self._replaced(of_stock, lambda all_to_all: self._forward(all_to_all, requests if pinned else None)):
            for one, context, kjt in zip(self.modules, contexts, features, strict=True):
                started.append(one.module.input_dist(context, _own(one, kjt)))
        if pinned and requests:
            assert self._exchange is not None
            self._exchange.start(requests)
        if pinned or not stock:
            return contexts, lambda: [splits.wait() for splits in started]
        fused = FusedKJTListSplitsAwaitable(
            [splits for one, splits in zip(self.modules, started, strict=True) if one in stock],
            [context for one, context in zip(self.modules, contexts, strict=True) if one in stock],
            self._group or of_stock[0]._pg,
        )

        def launch() -> list[Awaitable[KJTList]]:
            of_stock_modules = iter(fused.wait())
            return [
                next(of_stock_modules) if one in stock else splits.wait()
                for one, splits in zip(self.modules, started, strict=True)
            ]

        return contexts, launch

    def _forward(
        self, all_to_all: KJTAllToAll, requests: list[ExchangeRequest] | None
    ) -> Callable[[KeyedJaggedTensor], Any]:
        """Returns the replacement forward. requests: collects those of a SplitsExchange; None: TorchRec's own."""
        group = self._group or all_to_all._pg
        if requests is None:
            return KJTAllToAllForward(group, all_to_all._splits, all_to_all._stagger)

        def forward(features: KeyedJaggedTensor) -> ExchangeRequest:
            requests.append(ExchangeRequest(features, all_to_all, group))
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


def _all_to_alls(one: Sharded) -> list[KJTAllToAll]:
    """Returns the all-to-alls of a module's input dists: none before its first batch, or if no sharding needs one:
    replicated tables, or a trimmed dist."""
    all_to_alls = [getattr(module, "_dist", None) for module in one.collection._input_dists]
    return [module for module in all_to_alls if isinstance(module, KJTAllToAll)]


def _own(one: Sharded, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the KJT, or, if feature processors write weights into it, a copy that no other module shares."""
    return with_weights(features, features.weights_or_none()) if one.has_processors else features
