"""The fields of a batch's buffer, as named by a benchmark; needs no torch."""

from typing import Literal, NamedTuple, Protocol


class Field(NamedTuple):
    """One field of every sample."""

    name: str
    dtype: Literal["float32", "int32", "int64"]
    columns: int
    """Elements per sample."""


class BatchFields(Protocol):
    """The aspect of a benchmark's model that batches depend on."""

    @property
    def batch_fields(self) -> tuple[Field, ...]:
        """The fields, in buffer order. `labels` and `ids` are among them."""
        ...
