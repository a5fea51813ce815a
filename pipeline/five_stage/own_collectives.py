"""Collectives that a model launches itself, in its forward or backward."""

import sys
from types import CodeType
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .graph_obstacles import marked_hooks

_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
"""Namespaces of torch's operators that exchange between ranks."""


class OwnCollectives(TorchDispatchMode):
    """Notices collectives within the block, apart from those of hooks that are marked by `runs_in_graphs`.

    Graphs of the dense part alone are replayed by some ranks and not by others, as their batches have it; NCCL forbids
    that some replay a collective that others launch.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen = False
        self._marked = {_code(hook) for hook in marked_hooks(model)}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: parts that torch.compile compiles are compiled within the block too."""
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator."""
        if operator.namespace in _SPACES and not self._in_marked_hook():
            self.seen = True
        return operator(*args, **(kwargs or {}))

    def _in_marked_hook(self) -> bool:
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code in self._marked:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False


def _code(hook: Any) -> CodeType | None:
    """Returns the code of a function or method; None of anything else that can be called."""
    return getattr(getattr(hook, "__func__", hook), "__code__", None)
