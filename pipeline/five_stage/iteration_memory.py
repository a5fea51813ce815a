"""The memory of graphs of whole iterations: that of each form's batches, and the account of the graphs' own."""

from collections.abc import Sequence
from typing import Any

import torch

from .batch_forms import BatchForm
from .graph_memory import GraphMemory
from .in_flight import InFlight
from .input_dist import Distribution
from .iteration_pairs import Pair
from .iteration_slots import TURNS, FormMemory, Slot, Staging, batch_bytes


class IterationMemory(GraphMemory):
    """Slots and stagings by the number of a batch's form. A batch without them may run eagerly, and the graphs must
    leave enough memory for it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._of_forms: dict[int, FormMemory] = {}

    def __getitem__(self, form: int) -> FormMemory:
        """Returns the memory of a form."""
        return self._of_forms[form]

    def __contains__(self, form: int | None) -> bool:
        """Whether a form has memory."""
        return form in self._of_forms

    def __len__(self) -> int:
        """Returns the number of forms that have memory."""
        return len(self._of_forms)

    def add(
        self,
        now: InFlight[Any],
        distribution: Distribution,
        form: BatchForm,
        varying: Sequence[Sequence[int]],
        made: int,
    ) -> None:
        """Makes the memory of the form of a batch; see Slot, Staging and FormMemory."""
        assert now.form is not None, "of a form"
        slots = [Slot(now.batch, now.features, distribution, varying) for _ in range(TURNS)]
        staging = [Staging(now.batch, now.features, form) for _ in range(TURNS)]
        self._of_forms[now.form] = FormMemory(slots, staging, made)

    def stage(self, batch: InFlight[Any], turn: int, iterations: int) -> None:
        """Copies a batch into the staging of a turn, whose other batches are let go, on the current stream."""
        if batch.form is not None and batch.form in self and self[batch.form].made < iterations:
            for of_form in self._of_forms.values():
                of_form.staging[turn].holds = None
            self[batch.form].staging[turn].hold(batch)

    def holds(self, batch: InFlight[Any], turn: int) -> bool:
        """Whether a batch is in the slot of a turn."""
        return batch.form is not None and batch.form in self and self[batch.form].slots[turn].holds is batch

    def fits(self, batch: InFlight[Any]) -> bool:
        """Whether a batch fits beside the graphs, if it may have to run without one."""
        return batch.form in self or self.before_eager(batch_bytes(batch.batch))

    def size(self, pair: Pair) -> int:
        """Returns the bytes of the batches that a pair's graphs read and write."""
        return self[pair.now].nbytes + self[pair.ahead].nbytes

    def nbytes(self) -> dict[str, int]:
        """Returns the bytes that graphs use only during replays, those of KJTs by capacity in slots, used or not, and
        those of all else in slots and stagings."""
        rows = sum(of.capacity_bytes for of in self._of_forms.values())
        batches = sum(of.nbytes for of in self._of_forms.values()) - rows
        return {"graphs": self.idle, "batches": batches, "row_capacities": rows}
