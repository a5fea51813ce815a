"""A number of every rank, exchanged on the host while it does something else: in memory that the ranks of one node
share, or through gloo.

gloo hands the number to threads of its own and to sockets: on a busy host some 0.2 ms from one rank to the other, as
long as a graph of a small model runs. Through shared memory it takes microseconds, and no other thread takes part.
"""

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import mkstemp
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from .groups import give_back, group_timeout, lend_group, of_all_ranks

FOLDER = Path("/dev/shm")
_TURNS = 2
_LINE = 8
"""Numbers of 8 bytes in a cache line: ranks do not write to one another's."""
_BITS = 32
"""Bits of a number beside the count of its exchange: both are stored by one instruction."""
_EAGER_S, _PAUSE_S, _ALIVE_S = 0.0002, 5e-5, 1.0
"""Time of polling without a pause, then time between two polls, and between two checks that the others are alive."""
_TIMEOUT_S = 1800.0
"""Timeout if the default process group has none."""


class HostExchange(Protocol):
    """Exchanges of one number, of at most 31 bits and a sign. Each is finished before the next one starts."""

    def start(self, number: int) -> None:
        """Gives this rank's number to all ranks."""

    def finish(self) -> list[int]:
        """Waits for all ranks; returns their numbers, in rank order."""

    def close(self) -> None:
        """Ends the exchanges, after the last start or finish."""


def host_exchange(group: dist.ProcessGroup) -> HostExchange:
    """Returns an exchange between the ranks of a group, through shared memory if all of them have some in common.
    Collective. ValueError if they need gloo and it finds no network."""
    path = _make(group.size()) if group.rank() == 0 else None
    path = next((of for of in of_all_ranks(path, group) if of is not None), None)
    own = None
    if path is not None:
        with suppress(OSError):  # on another node, or in a container with memory of its own
            own = SharedMemory(path, group.rank(), group.size())
    everywhere = all(of_all_ranks(own is not None, group))
    if path is not None and group.rank() == 0:
        path.unlink()  # whatever becomes of the ranks, nothing of it is left
    if everywhere and own is not None:
        return own
    if own is not None:
        own.close()
    return Gloo(group)


def _make(ranks: int) -> Path | None:
    """Returns a new file in memory for SharedMemory, all zeros; None if there is no such memory."""
    try:
        descriptor, name = mkstemp(prefix="host-exchange-", dir=FOLDER)
        try:
            os.posix_fallocate(descriptor, 0, 8 * _TURNS * ranks * _LINE)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return Path(name)


class SharedMemory:
    """An exchange between processes that map one file. Numbers alternate between two places: a rank is at most one
    exchange ahead of another one, which then still reads the last one."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        """path: of a file from `_make`. OSError if there is none."""
        self._rank, self._count = rank, 0
        self._file = path.open("r+b")
        # Held for as long as this process lives: another one that gets it knows that this one has ended.
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._places = np.memmap(self._file, np.int64, "r+", shape=(_TURNS, ranks, _LINE))[:, :, 0]
        timeout = group_timeout() if dist.is_initialized() else None
        self._timeout_s = _TIMEOUT_S if timeout is None else timeout.total_seconds()

    def start(self, number: int) -> None:
        """See HostExchange."""
        assert abs(number) < 1 << _BITS - 1, "a small number"
        self._count += 1
        self._places[self._count % _TURNS, self._rank] = (self._count << _BITS) + number

    def finish(self) -> list[int]:
        """See HostExchange. RuntimeError if a rank has ended, or does not come within the process group's timeout."""
        least = (self._count << _BITS) - (1 << _BITS - 1)
        places = self._places[self._count % _TURNS]
        begun = checked = time.monotonic()
        while (found := places.tolist()) and min(found) < least:
            now = time.monotonic()
            # sleep(0) lets Python's other threads run, such as those that read batches.
            time.sleep(0 if now - begun < _EAGER_S else _PAUSE_S)
            if now - checked > _ALIVE_S:
                checked = now
                self._check([rank for rank, value in enumerate(found) if value < least], now - begun)
        return [value - (self._count << _BITS) for value in found]

    def _check(self, awaited: Sequence[int], waited_s: float) -> None:
        for rank in awaited:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            except OSError:
                continue
            raise RuntimeError(f"rank {rank} has ended before this batch: see its messages")
        if waited_s > self._timeout_s:
            raise RuntimeError(f"ranks {list(awaited)} have not come to this batch within {self._timeout_s:.0f} s")

    def close(self) -> None:
        """See HostExchange."""
        self._file.close()


class Gloo:
    """An exchange by gloo, for several nodes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Collective. ValueError if gloo finds no network."""
        ranks = dist.get_process_group_ranks(group)
        self._group = lend_group("host", ranks, partial(_on_the_host, ranks))
        self._of_ranks = torch.zeros(len(ranks), dtype=torch.int64)
        # Views, one per rank: all_gather_into_tensor warns from torch 2.13 on, and 2.11 has no alternative.
        self._views = list(self._of_ranks.split(1))
        self._own = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def start(self, number: int) -> None:
        """See HostExchange."""
        self._own.fill_(number)
        self._work = dist.all_gather(self._views, self._own, group=self._group, async_op=True)

    def finish(self) -> list[int]:
        """See HostExchange."""
        assert self._work is not None, "started"
        self._work.wait()
        self._work = None
        found: list[int] = self._of_ranks.tolist()
        return found

    def close(self) -> None:
        """See HostExchange. Gives back the process group, after what has been started on it."""
        if self._work is not None:
            self.finish()
        give_back(self._group)


def _on_the_host(ranks: list[int]) -> dist.ProcessGroup:
    """Returns a gloo group. ValueError if gloo finds no network."""
    try:
        return dist.new_group(ranks, timeout=group_timeout(), backend="gloo", use_local_synchronization=True)
    except RuntimeError as error:
        raise ValueError(
            f"uneven_end needs a gloo process group, but none can be made here ({error}): set GLOO_SOCKET_IFNAME, or "
            "FiveStageOptions(uneven_end='ignore')"
        ) from error
