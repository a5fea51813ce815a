"""A test, made once, before any batch is padded: whether tokens after the last one change a model's results.

A graph has a capacity for tokens, and most batches have fewer. Rows after the last token belong to no sequence: offsets
end before them. A model that reads them nevertheless, by a mean over all rows or by their number, must not be padded.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .batch_fields import buffers_outside, leaves
from .capture_errors import told
from .dense_run import Made
from .embedding_outputs import EmbeddingOutputs

_MORE = 8  # rows
_RTOL = 1e-4  # for sums in another order, as in products of other shapes
_INSTEAD = "pad to a fixed length first (to_padded_dense), or sum over sequences by their offsets"

Run = Callable[[EmbeddingOutputs], Made]


class _Trial(NamedTuple):
    """Results of a run."""

    output: list[Tensor]
    rest: list[Tensor | None]
    """The loss, gradients and buffers."""
    of_values: list[Tensor | None]


def why_padding_matters(
    model: nn.Module,
    sharded: Iterable[nn.Module],
    run: Run,
    outputs: EmbeddingOutputs,
    put_back: Callable[[], None],
) -> str | None:
    """Returns how the dense part's results change if rows are added after the last token; None if they do not.

    Runs it unchanged, with zeros after the last token, with noise instead of zeros, and with noise and, if the model
    receives ids, some of the batch's ids. sharded: modules whose buffers do not belong to the dense part. put_back:
    restores the state that a run changes. Reads the device.
    """
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm exchanges between ranks, of which not all may run this test"
    buffers = buffers_outside(model, sharded)

    def attempt(outputs: EmbeddingOutputs) -> _Trial:
        put_back()
        made = run(outputs)
        kept = [of.detach().clone() for of in (*_tensors(made.output), *buffers)]
        count = len(kept) - len(buffers)
        return _Trial(kept[:count], [made.losses, *made.of_weights, *kept[count:]], made.of_values)

    try:
        plain = attempt(outputs.leaves())
        return _difference(plain, attempt, outputs)
    except torch.OutOfMemoryError:
        return "there is too little memory to try out whether tokens after the last one matter"
    except Exception as error:
        return f"it fails with rows after the last token: {told(error)}"
    finally:
        put_back()


def _difference(plain: _Trial, attempt: Callable[[EmbeddingOutputs], _Trial], outputs: EmbeddingOutputs) -> str | None:
    """Returns how trials with rows after the last token differ from the one without; None if they do not."""
    noise = [
        torch.randn(_MORE, *values.shape[1:], dtype=values.dtype, device=values.device) for values in outputs.values
    ]
    zeros = attempt(_padded(outputs, [torch.zeros_like(of) for of in noise]))
    if _shapes(plain) != _shapes(zeros):
        return f"its output or loss has a row for each token: put out rows of sequences, or {_INSTEAD}"
    noisy = attempt(_padded(outputs, noise))
    named = attempt(_padded(outputs, noise, [_ids_of(ids) for ids in outputs.tokens])) if outputs.tokens else noisy
    counts = [len(values) for values in outputs.values]
    for one, other, what in ((plain, zeros, "the number of rows"), (zeros, noisy, "rows"), (noisy, named, "ids")):
        if not _alike(_flat(one, counts), _flat(other, counts)):
            return f"its loss, output, a gradient or a buffer depends on {what} after the last token: {_INSTEAD}"
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


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]


def _shapes(trial: _Trial) -> list[torch.Size]:
    (losses, *_), output = trial.rest, trial.output
    assert losses is not None, "a loss"
    return [losses.shape, *(of.shape for of in output)]


def _flat(trial: _Trial, counts: Sequence[int]) -> list[Tensor | None]:
    within = [None if grad is None else grad[:count] for grad, count in zip(trial.of_values, counts, strict=True)]
    return [*trial.output, *trial.rest, *within]


def _alike(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    """Whether tensors are equal within the rounding of sums in another order."""
    return all(_alike_tensors(a, b) for a, b in zip(one, other, strict=True))


def _alike_tensors(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if not one.is_floating_point():
        return torch.equal(one, other)
    if not one.numel():
        return True
    return bool((torch.abs(one - other).max() <= _RTOL * one.abs().max() + torch.finfo(one.dtype).tiny).item())
