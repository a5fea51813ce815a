"""The fields of a batch's one buffer, as a benchmark names them; needs no torch."""

from typing import Literal, NamedTuple, Protocol


class Field(NamedTuple):
    """One field of every sample."""

    name: str
    dtype: Literal["float32", "int32"]
    columns: int
    """Elements of a sample."""


class BatchFields(Protocol):
    """A benchmark's model, as far as batches depend on it."""

    @property
    def batch_fields(self) -> tuple[Field, ...]:
        """The fields, in their order in the buffer. `labels` and `ids` are among them."""
        ...
