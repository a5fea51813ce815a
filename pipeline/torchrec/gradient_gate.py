"""The loss guard's gate of dense gradients: either all of an iteration are used, or none."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from dlrm_bench.kernels.non_finite import GradientTables, Watch, clear_reported, report_together


class GradientGate(KeyedOptimizer):
    """An optimizer to step before those of the parameters that it gates. Has no parameters, so that it adds nothing to
    the state of the optimizers that it is combined with."""

    runs_in_graphs = True
    """Its step only launches kernels, on memory that stays allocated."""

    def __init__(
        self, watch: Watch, parameters: list[nn.Parameter], skip: list[Tensor], await_flags: Callable[[], None]
    ) -> None:
        """skip: the flags to write; empty if no optimizer needs one. await_flags: makes the current stream wait for
        those of `watch`."""
        super().__init__({}, {}, [])
        self._watch, self._gated, self._skip, self._await_flags = watch, parameters, skip, await_flags
        self._ids = set(map(id, parameters))
        self._reported: list[set[int]] = []
        """Addresses of the gradients, part by part, that `gradients_reduced` has looked at in this iteration."""
        self._tables, self._rest = GradientTables(), GradientTables()
        self._of_parts: dict[int, GradientTables] = defaultdict(GradientTables)

    def gradients_reduced(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Looks at a part of the gradients, beside the backward that makes the others; `step` looks at the rest. Their
        memory must stay until then."""
        gated = [of for p, of in zip(parameters, gradients, strict=True) if id(p) in self._ids]
        self._await_flags()
        report_together(self._watch, gated, self._of_parts[len(self._reported)])
        self._reported.append(set(map(Tensor.data_ptr, gated)))

    def step(self, closure: Any = None) -> None:
        """Zeroes all gradients, and sets flags to one, if a loss or any of the gradients was not finite."""
        self._await_flags()
        gradients, reported = [p.grad for p in self._gated if p.grad is not None], set[int]().union(*self._reported)
        report_together(self._watch, [of for of in gradients if of.data_ptr() not in reported], self._rest)
        clear_reported(self._watch, gradients, self._tables)
        self._reported.clear()
        for flag in self._skip:
            torch.maximum(self._watch.stopped[0], self._watch.bad[0], out=flag)  # one flag stands for all ranks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what `gradients_reduced` has looked at. Another optimizer owns the gradients."""
        self._reported.clear()
