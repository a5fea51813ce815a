"""Agreement on the end of batches: an exchange of one number between all ranks, in parallel with the previous
iteration.

A rank that has run out of batches starts no more collectives, so the other ranks' collectives would wait for it
forever, on GPUs invisibly to the host. Ranks inform each other on the host (host_exchange.py), while the previous
iteration runs: no stream and no device takes part.
"""

from typing import Literal, NoReturn

import torch.distributed as dist

from .host_exchange import HostExchange, host_exchange

UnevenEnd = Literal["error", "stop", "ignore"]

_NOTHING, _NO_FORM, _FIRST_FORM = 0, 1, 2
"""Announced values: no batch, a batch without a form, a batch of the first form; higher numbers are other forms, and
negative ones do not fit beside the graphs."""
EVALUATES = "the model is in eval mode, or has no such graph"
_WHOLE = 1 << 30
"""Added to the value if the present iteration is in a graph of whole iterations."""


class BatchEnd:
    """A sequence of announcements; each is settled before the next."""

    def __init__(self, group: dist.ProcessGroup, mode: UnevenEnd) -> None:
        """Collective over `group`, except for a single rank and for mode "ignore", which exchange nothing."""
        self._mode, self._count, self._started = mode, 0, False
        self._ranks = dist.get_process_group_ranks(group)
        self._exchange: HostExchange | None = None
        if mode != "ignore" and len(self._ranks) > 1:
            self._exchange = host_exchange(group)
        self._problem: str | None = None
        """The error to raise after the last common batch, if ranks have different numbers of batches; else None."""
        self._raised = False
        self.one_form = True
        """Whether the last settled batch has the same form of a graph on every rank that announces it."""
        self.fits = True
        """Whether the last settled batch fits beside the graphs on all ranks."""
        self._why_not: str | None = EVALUATES

    def begin(self) -> None:
        """Starts a new iterator: batches are counted from its first one."""
        self._count, self._problem, self._raised = 0, None, False

    @property
    def owes_error(self) -> bool:
        """Whether ranks have different numbers of batches, and `end` has not said so: another iterator has come before
        the end of the last one, and a batch that was read ahead is lost."""
        return self._problem is not None and not self._raised

    def end(self) -> NoReturn:
        """Raises what follows the last common batch: StopIteration, or ValueError if ranks have different numbers of
        batches."""
        self._raised = True
        if self._problem is not None:
            raise ValueError(self._problem)
        raise StopIteration

    def runs(self, why_not: str | None) -> str | None:
        """Notes why this rank's present iteration is not in a graph of whole iterations; None if it is. Returns it.
        Announced with the next batch: where ranks differ, their collectives wait for one another on the device."""
        self._why_not = why_not
        return why_not

    def announce(self, has_batch: bool, form: int | None = None, fits: bool = True) -> None:
        """Announces to all ranks whether this rank has a next batch, and the number of its form; None if no graph with
        all ranks' collectives could run it: ranks replay such a graph together or not at all. fits: beside the
        graphs."""
        self.fits = fits
        if self._exchange is not None:
            number = _NOTHING if not has_batch else _NO_FORM if form is None else _FIRST_FORM + form
            number += _WHOLE if self._why_not is None else 0
            self._exchange.start(number if fits else -number)
            self._started = True

    def close(self) -> None:
        """Ends the announcements; nothing is announced after it."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange, self._started = None, False

    def settle(self) -> bool:
        """Waits for the announcement; returns False if this rank must not train on its batch, because another rank has
        none. ValueError, on every rank, if some of them ran the last iteration in a graph and others did not."""
        if self._exchange is None or not self._started:
            return True
        announced, self._started = self._exchange.finish(), False
        have = [abs(number) % _WHOLE for number in announced]
        self._check_alike([abs(number) >= _WHOLE for number in announced])
        self.fits = min(announced) >= 0
        self.one_form = len({*have} - {_NOTHING}) < 2
        self._count += 1
        if all(have) or not any(have):
            return True
        if self._mode == "error":
            ended = ", ".join(str(rank) for rank, has in zip(self._ranks, have, strict=True) if not has)
            others = ", ".join(str(rank) for rank, has in zip(self._ranks, have, strict=True) if has)
            self._problem = (
                f"the data of rank {ended} ended after {self._count - 1} batches, rank {others} had more: give all "
                "ranks the same number of batches, or FiveStageOptions(uneven_end='stop') to end after the shortest"
            )
        return False

    def _check_alike(self, whole: list[bool]) -> None:
        if all(whole) or not any(whole):
            return
        eager = ", ".join(str(rank) for rank, is_whole in zip(self._ranks, whole, strict=True) if not is_whole)
        here = "" if self._why_not is None else f" (here: {self._why_not})"
        raise ValueError(
            f"rank {eager} ran an iteration without the graph that the other ranks took{here}: change the model, the "
            "optimizer and autocast on all ranks alike, after the same batch"
        )
