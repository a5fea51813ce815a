"""Cross-cutting: of kernels over tokens all rooms for tokens have one binary each, as a capture may load none."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.dense import (
    gated_norm,
    last_query_attention,
    norm,
    silu_attention,
    sorted_sums,
    token_input,
    zero_tail,
)
from dlrm_bench.kernels.dense._dropout import Dropout
from dlrm_bench.kernels.input_dist import history_events
from tests.kernels.devices import needs_triton

MODULES = (gated_norm, history_events, last_query_attention, norm, silu_attention, sorted_sums, token_input, zero_tail)
SAMPLES, WIDTH, LONGEST, EVENTS = 6, 16, 300, 64
OFFSETS = torch.arange(SAMPLES + 1) * 10
DROPOUT = Dropout(0.2, torch.zeros(1, dtype=torch.int64), 1)
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


def layers(tokens: int) -> None:
    """Launches what a layer does over these tokens, forward and backward."""
    x, weight, end = torch.zeros(tokens, WIDTH), torch.zeros(WIDTH), OFFSETS[-1:]
    norm.triton_norm_forward(x, weight, weight, end, x, 1e-6)
    norm.triton_norm_backward(x, x, weight, weight, end, x, x, x, weight, weight, 1e-6)
    joined = torch.zeros(tokens, 3 * WIDTH)
    gated_norm.triton_gated_norm_forward(x, x, weight, weight, end, DROPOUT, joined, 1e-6)
    gated_norm.triton_gated_norm_backward(joined, x, x, weight, weight, end, DROPOUT, x, x, weight, weight, 1e-6)
    q = k = v = out = x.unflatten(1, (1, WIDTH))
    sequences = silu_attention.Sequences(OFFSETS, torch.ones_like(OFFSETS[1:]), LONGEST)
    silu_attention.triton_silu_attention_forward(q, k, v, sequences, out)
    silu_attention.triton_silu_attention_backward(out, q, k, v, sequences, q, k, v)
    jagged, last = last_query_attention.Jagged(OFFSETS, LONGEST), torch.zeros(SAMPLES, 1, WIDTH)
    last_query_attention.triton_last_query_attention_forward(last, k, v, jagged, last)
    last_query_attention.triton_last_query_attention_backward(last, last, k, v, jagged, last, k, v)
    zero_tail.triton_zero_tail(x, end)


def first_input(tokens: int) -> None:
    """Launches what makes these tokens, forward and backward."""
    count = tokens - 9 * SAMPLES
    event, query = torch.zeros(count, dtype=torch.int32), torch.zeros(SAMPLES, dtype=torch.int32)
    places = token_input.TokenPlaces(OFFSETS, event, event, query, 8, LONGEST)
    events, context = torch.zeros(EVENTS + SAMPLES, WIDTH), torch.zeros(SAMPLES, 8, WIDTH)
    position, time, x = torch.zeros(LONGEST, WIDTH), torch.zeros(20, WIDTH), torch.zeros(tokens, WIDTH)
    rows = token_input.no_rows(tokens, events, time)
    token_input.triton_token_input_forward(events, context, position, time, places, 4.0, DROPOUT, x, rows)
    token_input.triton_token_input_backward(x, places, DROPOUT, x, position)
    sorted_sums.triton_sorted_sums(x, sorted_sums.sort_keys(rows.event, len(events)), 4.0, events)
    first, counts = torch.zeros(3, SAMPLES, dtype=torch.int32), torch.zeros(3, EVENTS + 1, dtype=torch.int32)
    history_events.triton_history_events(first, query, OFFSETS, counts, event)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the interpreter's kernels")
@pytest.mark.parametrize("launches", [layers, first_input])
def test_rooms_for_tokens_share_binaries(launches: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    for module in MODULES:
        for name, value in vars(module).items():
            if name.endswith("_kernel") and hasattr(value, "fn"):
                monkeypatch.setattr(module, name, Launched(value, noted))
    of_rooms = []
    for room in ROOMS:
        noted.clear()
        launches(room)
        of_rooms.append(noted[:])
    assert len(of_rooms[0]) >= 5
    for room, found in zip(ROOMS, of_rooms, strict=True):
        assert found == of_rooms[0], room
