"""One graph of stage 3, with the memory that it reads and writes; for jagged inputs, with a capacity for tokens."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import reasons
from .batch_fields import leaves, map_fields, over_same_memory
from .batch_signature import CONSTANT
from .copies import copies_of
from .cuda_graph import record
from .embedding_outputs import EmbeddingOutputs

Run = Callable[[Any, list[Any], EmbeddingOutputs], tuple[Any, list[Tensor | None]]]
"""Stage 3 of a batch: returns the output, and the gradients of the embedding outputs' values."""


class FeaturesRead:
    """Stand-in for a KJT while the dense part is captured: every replay would have another batch's ids."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(reasons.READS_KJT(attribute=name))


class Room:
    """Memory from which graphs read vectors or ids; each graph reads the number of first rows that it was captured
    with."""

    def __init__(self, like: Tensor, rows: int) -> None:
        self.memory = _zeros(like, rows)
        self.filled = 0
        """All rows from this index on are zero."""

    def fill(self, count: int, rows: int) -> None:
        """Zeroes the rows after the first `count`, for a graph that reads `rows`; the first `count` are then
        written."""
        if count < rows and count < self.filled:
            self.memory[count : self.filled].zero_()
            self.filled = count
        self.filled = max(self.filled, count)


class Captured:
    """A graph of batches of one form, with a maximum number of tokens."""

    def __init__(
        self,
        batch: Any,
        features: Sequence[Any],
        outputs: EmbeddingOutputs,
        rows: Sequence[int],
        rooms: Sequence[Room],
    ) -> None:
        """rows: number of rows of each of outputs.values, in the memory of `rooms`."""
        self.rows, self._rooms = list(rows), list(rooms)
        stand_ins = {id(kjt): FeaturesRead() for kjt in features}  # several modules may share a KJT
        self._features = [stand_ins[id(kjt)] for kjt in features]
        self._batch = map_fields(batch, _empty_like, stand_ins)
        self._memory = [room.memory[:count] for room, count in zip(rooms, rows, strict=True)]
        self._token_rooms = [Room(ids, rows[of]) for ids, of in zip(outputs.tokens, outputs.token_of, strict=True)]
        self._tokens = [room.memory for room in self._token_rooms]
        self._lengths = [torch.zeros_like(lengths) for lengths in outputs.lengths]
        self._outputs = outputs.rebuilt(self._memory, self._tokens, self._lengths)
        skipped = set(map(id, self._features))
        self._fields = [leaf for leaf in leaves(self._batch, skipped) if isinstance(leaf, Tensor)]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.used: list[bool] = []
        """Whether the graph makes a gradient of each dense parameter."""

    def rehearse(self, run: Run, fields: Sequence[Any], outputs: EmbeddingOutputs) -> tuple[Any, list[Tensor | None]]:
        """Runs what `capture` captures, eagerly, and returns what `replay` returns. A capture cannot compile, and
        torch.compile also specializes on what differs in the graph's memory, such as storage offsets."""
        self._fill(fields, outputs)
        output, grads = self._run(run)
        return copies_of(map_fields(output, of_graph)), _of_counts(grads, outputs)

    def capture(self, run: Run, pool: Any) -> None:
        """Captures `run`, without running anything on the GPU. An error of `run` leaves the device unchanged. pool: the
        memory pool of all graphs that are never replayed at the same time."""
        returned: list[tuple[Any, list[Tensor | None]]] = []
        # The graph would forever read a cast that autocast has cached before the capture.
        torch.clear_autocast_cache()
        try:
            self.graph = record(lambda: returned.append(self._run(run)), pool=pool)
        finally:
            torch.clear_autocast_cache()
        ((output, self._grads),) = returned
        self._output = map_fields(output, of_graph)

    def replay(self, fields: Sequence[Any], outputs: EmbeddingOutputs) -> tuple[Any, list[Tensor | None]]:
        """Returns a copy of the output, and the gradients of outputs.values, which the next replay overwrites.

        fields: the leaves of the batch.
        """
        assert self.graph is not None, "captured"
        self._fill(fields, outputs)
        with torch.no_grad():
            self.graph.replay()
            return copies_of(self._output), _of_counts(self._grads, outputs)

    def _run(self, run: Run) -> tuple[Any, list[Tensor | None]]:
        """Calls `run` with new containers, tensors and leaves over the graph's memory: a forward may set fields or
        register hooks, and a JaggedTensor keeps the offsets that it has computed."""
        return run(over_same_memory(self._batch), self._features, self._outputs.leaves())

    @torch.no_grad()
    def _fill(self, fields: Sequence[Any], outputs: EmbeddingOutputs) -> None:
        """Copies a batch into the graph's memory."""
        counts = [len(values) for values in outputs.values]
        into, tokens = self._memory, self._tokens
        for room, count, rows in zip(self._rooms, counts, self.rows, strict=True):
            room.fill(count, rows)
        for room, of in zip(self._token_rooms, outputs.token_of, strict=True):
            room.fill(counts[of], self.rows[of])
        if counts != self.rows:
            into = [values[:count] for values, count in zip(self._memory, counts, strict=True)]
            tokens = [ids[: counts[of]] for ids, of in zip(tokens, outputs.token_of, strict=True)]
        torch._foreach_copy_(
            [*self._fields, *into, *tokens, *self._lengths],
            [
                *(leaf for leaf in fields if isinstance(leaf, Tensor)),
                *outputs.values,
                *outputs.tokens,
                *outputs.lengths,
            ],
        )


def _of_counts(grads: Sequence[Tensor | None], outputs: EmbeddingOutputs) -> list[Tensor | None]:
    """Returns the gradients of the rows that a batch has."""
    counts = [len(values) for values in outputs.values]
    return [
        grad if grad is None or len(grad) == count else grad[:count] for grad, count in zip(grads, counts, strict=True)
    ]


def _zeros(tensor: Tensor, rows: int) -> Tensor:
    """Returns zeros like `tensor`, but with this number of rows."""
    return torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)


def _empty_like(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf


def of_graph(leaf: Any) -> Any:
    """Returns a copy of a leaf of the output, which is in the graph's memory. ValueError if it cannot be copied."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if isinstance(leaf, CONSTANT):
        return leaf
    found = "the batch's KJT" if isinstance(leaf, FeaturesRead) else f"a {type(leaf).__name__}"
    raise ValueError(
        f"the model's output holds {found}, which the next replay might overwrite: return only tensors, numbers and "
        "strings, in dataclasses, tuples, lists and dicts"
    )
