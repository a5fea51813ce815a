"""Cross-cutting: of kernels over tokens all rooms for tokens have one binary each, as a capture may load none."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.devices import needs_triton
from tests.kernels.launches import OVER_TOKENS, first_input, layers

pytestmark = [
    needs_triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, and launched, by their own tests"),
]
ROOMS = [64 * n for n in (1, 2, 3, 4, 31, 32, 33, 500)]
"""Runs of 128 tokens: one, multiples of 16, and others."""


class Launched:
    """Stands for a kernel: notes what Triton compiles another binary for."""

    def __init__(self, kernel: Any, noted: list[Any]) -> None:
        self._name, self._noted = kernel.fn.__name__, noted
        self._parameters = inspect.signature(kernel.fn).parameters
        self._of_any = kernel.kwargs.get("do_not_specialize") or ()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*given: Any, **options: Any) -> None:
            names = {name: value for name, value in options.items() if name not in self._parameters}
            known = {name: value for name, value in options.items() if name in self._parameters}
            arguments = zip(self._parameters, given, strict=False)
            self._noted.append((self._name, names, [self._kind(*of) for of in (*arguments, *known.items())]))

        return launch

    def _kind(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if "constexpr" in str(self._parameters[name].annotation) or not isinstance(value, int):
            return value if not isinstance(value, float) else float
        return "any" if name in self._of_any else "one" if value == 1 else "16" if value % 16 == 0 else "other"


@pytest.mark.parametrize("launches", [layers, first_input])
def test_rooms_for_tokens_share_binaries(launches: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    for module in OVER_TOKENS:
        for name in kernels_of(module):
            monkeypatch.setattr(module, name, Launched(getattr(module, name), noted))
    of_rooms = []
    for room in ROOMS:
        noted.clear()
        launches(room)
        of_rooms.append(noted[:])
    assert len(of_rooms[0]) >= 5
    for room, found in zip(ROOMS, of_rooms, strict=True):
        assert found == of_rooms[0], room


def kernels_of(module: Any) -> list[str]:
    """Returns the names of a module's own kernels."""
    own = {name: value for name, value in vars(module).items() if name.endswith("_kernel") and hasattr(value, "fn")}
    return [name for name, value in own.items() if value.fn.__module__ == module.__name__ and name.startswith("_")]
