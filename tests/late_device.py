"""A device that is late, on the CPU: what it writes to the host arrives only while the host polls for it."""

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm_bench.dlrm.tables import overflows


class LateDevice(TorchDispatchMode):
    """While entered, copies that the host does not wait for are made one with each poll of `arrived`; a poll that waits
    for nothing is an error."""

    def __init__(self, latest_first: bool = False) -> None:
        """latest_first: the latest copy arrives first, otherwise the earliest."""
        super().__init__()
        self.polls = 0
        self._place = -1 if latest_first else 0
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._patches = ExitStack()

    def __enter__(self) -> "LateDevice":
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=self._arrive)
        self._patches.enter_context(patch.object(overflows, "time", clock))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator is torch.ops.aten.copy_.default and (kwargs.get("non_blocking") or args[2:] == (True,)):
            self._copies.append((args[0], args[1].clone()))
            return args[0]
        return operator(*args, **kwargs)

    def _arrive(self, seconds: float) -> None:
        assert self._copies, "the host waits for what nobody has launched"
        self.polls += 1
        target, values = self._copies.pop(self._place)
        target.copy_(values)
