"""Agreement on the end of batches: an exchange of one number between all ranks, in parallel with the previous
iteration.

A rank that has run out of batches starts no more collectives, so the other ranks' collectives would wait for it
forever, on GPUs invisibly to the host. Ranks inform each other on the host, through gloo, while the previous iteration
runs: no stream and no device takes part.
"""

from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from .groups import group_timeout, lend_group

UnevenEnd = Literal["error", "stop", "ignore"]

_NOTHING, _NO_FORM, _FIRST_FORM = 0, 1, 2
"""Announced values: no batch, a batch without a form, a batch of the first form; higher numbers are other forms, and
negative ones do not fit beside the graphs."""


class BatchEnd:
    """A sequence of announcements; each is settled before the next."""

    def __init__(self, group: dist.ProcessGroup, mode: UnevenEnd) -> None:
        """Collective over `group`, except for a single rank and for mode "ignore", which exchange nothing."""
        self._mode, self._count = mode, 0
        self._group: dist.ProcessGroup | None = None
        ranks = dist.get_process_group_ranks(group)
        if mode != "ignore" and len(ranks) > 1:
            self._group = lend_group("host", ranks, partial(_on_the_host, ranks))
        self._ranks = ranks
        self._work: dist.Work | None = None
        self._of_ranks = torch.zeros(len(ranks), dtype=torch.int64)
        # Views, one per rank: all_gather_into_tensor warns from torch 2.13 on, and 2.11 has no alternative.
        self._views = list(self._of_ranks.split(1))
        self._own = torch.zeros(1, dtype=torch.int64)
        self.problem: str | None = None
        """The error to raise after the last common batch, if ranks have different numbers of batches; else None."""
        self.one_form = True
        """Whether the last settled batch has the same form of a graph on every rank that announces it."""
        self.fits = True
        """Whether the last settled batch fits beside the graphs on all ranks."""

    def begin(self) -> None:
        """Starts a new iterator: batches are counted from its first one."""
        self._count, self.problem = 0, None

    def announce(self, has_batch: bool, form: int | None = None, fits: bool = True) -> None:
        """Announces to all ranks whether this rank has a next batch, and the number of its form; None if no graph with
        all ranks' collectives could run it: ranks replay such a graph together or not at all. fits: beside the
        graphs."""
        self.fits = fits
        if self._group is not None:
            number = _NOTHING if not has_batch else _NO_FORM if form is None else _FIRST_FORM + form
            self._own.fill_(number if fits else -number)
            self._work = dist.all_gather(self._views, self._own, group=self._group, async_op=True)

    def last_group(self) -> dist.ProcessGroup | None:
        """Returns the process group, to be given back, after what has been announced on it; nothing else is."""
        if self._work is not None:
            self._work.wait()
        group, self._work, self._group = self._group, None, None
        return group

    def settle(self) -> bool:
        """Waits for the announcement; returns False if this rank must not train on its batch, because another rank has
        none."""
        if self._work is None:
            return True
        self._work.wait()
        self._work = None
        announced: list[int] = self._of_ranks.tolist()
        have = [*map(abs, announced)]
        self.fits = min(announced) >= 0
        self.one_form = len({*have} - {_NOTHING}) < 2
        self._count += 1
        if all(have) or not any(have):
            return True
        if self._mode == "error":
            ended = ", ".join(str(rank) for rank, has in zip(self._ranks, have, strict=True) if not has)
            others = ", ".join(str(rank) for rank, has in zip(self._ranks, have, strict=True) if has)
            self.problem = (
                f"the data of rank {ended} ended after {self._count - 1} batches, rank {others} had more: give all "
                "ranks the same number of batches, or FiveStageOptions(uneven_end='stop') to end after the shortest"
            )
        return False


def _on_the_host(ranks: list[int]) -> dist.ProcessGroup:
    """Returns a gloo group. ValueError if gloo finds no network."""
    try:
        return dist.new_group(ranks, timeout=group_timeout(), backend="gloo", use_local_synchronization=True)
    except RuntimeError as error:
        raise ValueError(
            f"uneven_end needs a gloo process group, but none can be made here ({error}): set GLOO_SOCKET_IFNAME, or "
            "FiveStageOptions(uneven_end='ignore')"
        ) from error
