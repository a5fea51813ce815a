"""A test, made once, before any batch is padded: whether tokens after the last one change a model's results.

A graph has a capacity for tokens, and most batches have fewer. Rows after the last token belong to no sequence: offsets
end before them. A model that reads them nevertheless, by a mean over all rows or by their number, must not be padded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .batch_fields import leaves
from .embedding_outputs import EmbeddingOutputs

_MORE = 8  # rows
_RTOL = 1e-4  # for sums in another order, as in products of other shapes
_INSTEAD = "pad to a fixed length first (to_padded_dense), or sum over sequences by their offsets"

Run = Callable[[EmbeddingOutputs], tuple[Any, list[Tensor | None]]]
"""Returns ((losses, output, gradients of weights), gradients of values)."""


def why_padding_matters(
    model: nn.Module, run: Run, outputs: EmbeddingOutputs, put_back: Callable[[], None]
) -> str | None:
    """Returns how the dense part's results change if rows are added after the last token; None if they do not.

    Runs it unchanged, with zeros after the last token, with noise instead of zeros, and with noise and, if the model
    receives ids, some of the batch's ids. put_back: restores the state that a run changes. Reads the device.
    """
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm exchanges between ranks, of which not all may run this test"
    noise = [
        torch.randn(_MORE, *values.shape[1:], dtype=values.dtype, device=values.device) for values in outputs.values
    ]
    put_back()
    plain = run(outputs.leaves())
    put_back()
    zeros = run(_padded(outputs, [torch.zeros_like(of) for of in noise]))
    put_back()
    noisy = run(_padded(outputs, noise))
    put_back()
    named = run(_padded(outputs, noise, [_ids_of(ids) for ids in outputs.tokens])) if outputs.tokens else noisy
    counts = [len(values) for values in outputs.values]
    shapes = [_shapes(of) for of in (plain, zeros)]
    if shapes[0] != shapes[1]:
        return f"its output or loss has a row for each token: put out rows of sequences, or {_INSTEAD}"
    for one, other, what in ((plain, zeros, "the number of rows"), (zeros, noisy, "rows"), (noisy, named, "ids")):
        if not _alike(_flat(one, counts), _flat(other, counts)):
            return f"its loss, or a gradient, depends on {what} after the last token: {_INSTEAD}"
    return None


def _ids_of(ids: Tensor) -> Tensor:
    """Returns ids to put after the last one, as another batch might: from `ids`, as different as possible."""
    found = ids.unique(dim=0)
    if not len(found):
        found = torch.ones(1, *ids.shape[1:], dtype=ids.dtype, device=ids.device)
    return found[torch.linspace(0, len(found) - 1, _MORE, device=ids.device).round().long()]


def _padded(
    outputs: EmbeddingOutputs, more: Sequence[Tensor], ids_after: Sequence[Tensor] | None = None
) -> EmbeddingOutputs:
    """Returns padded outputs. more: rows to add after the last vectors. ids_after: ids to add; zeros by default."""
    values = [
        torch.cat([values, rows]) if jagged else values
        for values, rows, jagged in zip(outputs.values, more, outputs.jagged, strict=True)
    ]
    if ids_after is None:
        ids_after = [ids.new_zeros(_MORE, *ids.shape[1:]) for ids in outputs.tokens]
    tokens = [torch.cat(pair) for pair in zip(outputs.tokens, ids_after, strict=True)]
    return outputs.rebuilt(values, tokens).leaves()


def _shapes(result: tuple[Any, list[Tensor | None]]) -> list[Any]:
    losses, output, _ = result[0]
    return [losses.shape, *(leaf.shape for leaf in leaves(output) if isinstance(leaf, Tensor))]


def _flat(result: tuple[Any, list[Tensor | None]], counts: Sequence[int]) -> list[Tensor | None]:
    (losses, _, of_weights), of_values = result
    within = [None if grad is None else grad[:count] for grad, count in zip(of_values, counts, strict=True)]
    return [losses, *of_weights, *within]


def _alike(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    for a, b in zip(one, other, strict=True):
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None and a.numel():
            scale = a.abs().max()
            if not bool((torch.abs(a - b).max() <= _RTOL * scale + torch.finfo(a.dtype).tiny).item()):
                return False
    return True
