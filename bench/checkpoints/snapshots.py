"""Snapshots of a run's state in its node's memory: taken within seconds, and kept when the ranks are killed.

All ranks copy their pieces to mapped files on a tmpfs (pipeline/checkpoint_memory.py); after all ranks have finished, a
rename makes the files a snapshot (memory_folder.py). There are two slots, or, if only one fits, one slot that is reused
only after its snapshot is on disk, so that at any time a snapshot or a checkpoint is complete.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from dlrm_bench.bench.checkpoints.folders import locked, on_rank_0
from dlrm_bench.bench.checkpoints.memory_folder import (
    Layout,
    Slots,
    check_left_over,
    close_slot,
    make_memory_folder,
    open_slot,
    prepare_slots,
    remove_slots,
)
from dlrm_bench.bench.checkpoints.saved_state import Resumed, RunState, samples_of
from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.checkpoint import OwnPieces, gathered, on_all_ranks, own_pieces
from dlrm_bench.pipeline.checkpoint_index import Index, Piece, index_text
from dlrm_bench.pipeline.checkpoint_memory import PiecesInMemory, Staging, file_sizes, placed
from dlrm_bench.pipeline.state import StateBlocks


@dataclass(slots=True)
class Snapshot:
    """A slot of memory, and the snapshot in it."""

    folder: Path
    memory: PiecesInMemory
    samples: int
    """Number of samples trained; 0 while nothing whole is in it."""
    state: RunState | None
    """The rest of the run's state; None while nothing of this run is in it."""
    iteration: int = 0
    paused_s: float = 0.0
    on_disk: bool = False


class Snapshots:
    """The snapshots of a run. All methods are collective."""

    def __init__(self, config: RunConfig, ranks: Ranks, blocks: StateBlocks, resumed: Resumed | None) -> None:
        """Allocates memory, or takes over that of a killed run. ValueError, on every rank, if there is too little."""
        if ranks.nodes > 1:
            raise ValueError(
                f"--snapshot.every: a snapshot is in the memory of one node, and this run has {ranks.nodes}: leave it "
                "out, and save with --checkpoint.every"
            )
        assert config.snapshot.folder is not None
        self._ranks, self._path = ranks, config.snapshot.folder
        self._lock: TextIO | None = None
        """Held by every rank: as long as one of them may copy, no other run takes the memory."""
        state = own_pieces(blocks, ranks.rank)
        self._shapes, own = state.shapes, placed(ranks.rank, [place for place, _ in state.pieces])
        every = gathered(own, None)
        layout = Layout(index_text(Index(self._shapes, every, {})), file_sizes(every))
        prepared = on_rank_0(ranks, partial(self._prepare, layout, config, resumed))
        self._other = prepared.other
        """A snapshot that the run resumes and that is no slot; see Slots."""
        self._slots: list[Snapshot] = []
        begun = time.monotonic()
        on_all_ranks(partial(self._map, prepared, own, resumed), None)
        self.prepared_s = round(time.monotonic() - begun, 3)
        """Seconds to make and map the memory."""
        self.left_out = 0
        """Number of snapshots that were due while the only slot was not yet on disk."""

    @property
    def newest(self) -> Snapshot | None:
        """The whole snapshot of most samples of this run, or of the one that it resumes; None without any."""
        return max((slot for slot in self._slots if slot.state is not None), key=lambda s: s.samples, default=None)

    def pieces(self, snapshot: Snapshot) -> OwnPieces:
        """Returns the pieces of this rank in a snapshot."""
        return OwnPieces(self._shapes, snapshot.memory.pieces)

    def take(
        self, state: RunState, blocks: StateBlocks, busy: Snapshot | None, on_piece: Callable[[], None]
    ) -> Snapshot | None:
        """Copies the present state and returns its snapshot, once it is whole on all ranks.

        busy: the snapshot that is being written to disk, which is not overwritten; if there is no other slot, returns
        None.
        """
        free = [slot for slot in self._slots if slot is not busy]
        if not free:
            self.left_out += 1
            return None
        slot = min(free, key=lambda slot: slot.samples)
        slot.folder = on_rank_0(self._ranks, partial(open_slot, slot.folder, state))
        slot.samples, slot.state, slot.on_disk = 0, None, False
        slot.memory.fill(own_pieces(blocks, self._ranks.rank).pieces, on_piece)
        dist.barrier()
        slot.folder = on_rank_0(self._ranks, partial(close_slot, slot.folder, state["samples"], self._other))
        self._other = None
        slot.samples, slot.state = state["samples"], state
        return slot

    def remove(self) -> None:
        """Removes all snapshots, of a run that has ended well."""
        on_rank_0(self._ranks, partial(remove_slots, self._path))

    def _prepare(self, layout: Layout, config: RunConfig, resumed: Resumed | None) -> Slots:
        make_memory_folder(self._path)
        self._lock = self._locked(shared=False)
        within = resumed is not None and resumed.folder.resolve().parent == self._path.resolve()
        kept = self._path / resumed.folder.name if resumed is not None and within else None
        if not config.resumes_newest:
            check_left_over(self._path, kept)
        slots = prepare_slots(self._path, layout, kept, config.checkpoint.path)
        self._locked(shared=True)  # before other ranks do
        return slots

    def _locked(self, shared: bool) -> TextIO:
        return locked(self._path, "--snapshot.path", self._lock, shared)

    def _map(self, prepared: Slots, own: list[Piece], resumed: Resumed | None) -> None:
        self._lock = self._locked(shared=True)
        staging = Staging(own, self._ranks.device)
        for folder in prepared.folders:
            slot = Snapshot(folder, PiecesInMemory(folder, own, staging), samples_of(folder), None)
            if resumed is not None and resumed.folder.resolve() == folder.resolve():
                slot.state, slot.iteration, slot.on_disk = resumed.state, resumed.first, prepared.on_disk
            self._slots.append(slot)
