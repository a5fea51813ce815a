"""Many file reads in one system call, by Linux's asynchronous I/O (man 2 io_submit).

io_submit itself reads pages in the page cache: one call copies all ranges to their destinations and never holds
Python's interpreter lock. One call per range would release and retake the lock each time, competing with the thread
that launches the training. io_uring could do the same, but containers usually forbid it.

The kernel context of a call is kept for later calls of any thread, for the life of the process: the kernel takes 30 to
80 ms to free it (io_destroy waits until no CPU uses it), and an evaluation has its own readers.
"""

import ctypes
import errno
import os
import platform

import numpy as np
from numpy.typing import NDArray

_CALLS = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}
"""Numbers of io_setup, io_getevents, io_submit: arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h of Linux."""

# struct iocb and struct io_event of include/uapi/linux/aio_abi.h, little-endian.
_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("file", "<u4"),
        ("address", "<u8"),
        ("bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("eventfd", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
_PREAD = 0  # IOCB_CMD_PREAD
_NOWAIT = 8  # RWF_NOWAIT: only from the page cache

_unlocked = ctypes.CDLL(None, use_errno=True).syscall
_locked = ctypes.PyDLL(None).syscall
"""Keeps the interpreter lock: for calls that return at once."""
for _syscall in (_unlocked, _locked):
    _syscall.restype = ctypes.c_long

_idle: "list[_Reader | None]" = []
"""Idle readers, and None for one that the system refused; at most the number of threads that have read at once."""
os.register_at_fork(after_in_child=_idle.clear)  # A child process does not inherit contexts.


def read_ranges(
    files: NDArray[np.uint32], offsets: NDArray[np.int64], addresses: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Reads sizes[i] bytes of the file with descriptor files[i], from byte offsets[i], to memory at addresses[i].

    Returns the number of bytes read in each range: fewer than requested if the file ends or the page cache lacks the
    rest; 0 or negative if the range cannot be read or the system has no asynchronous I/O. The caller reads the missing
    bytes by other means, which also report the reason. Thread-safe.
    """
    try:
        reader = _idle.pop()
    except IndexError:
        reader = _open_reader()
    done = np.zeros(len(sizes), dtype=np.int64) if reader is None else reader.read(files, offsets, addresses, sizes)
    _idle.append(reader)  # Not after an error: the kernel may still be using it.
    return done


def _open_reader() -> "_Reader | None":
    calls = _CALLS.get(platform.machine())
    if calls is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    context = ctypes.c_ulong(0)
    if _unlocked(ctypes.c_long(calls[0]), ctypes.c_long(_Reader.CAPACITY), ctypes.byref(context)) != 0:
        return None  # A sandbox forbids it, or fs.aio-max-nr contexts are in use.
    return _Reader(context, calls)


class _Reader:
    """A kernel context, with the requests of a call and their results."""

    CAPACITY = 64

    def __init__(self, context: ctypes.c_ulong, calls: tuple[int, int, int]) -> None:
        self._context = context
        _, self._get_events, self._submit = map(ctypes.c_long, calls)
        self._requests = np.zeros(self.CAPACITY, dtype=_IOCB)
        self._requests["opcode"], self._requests["rw_flags"] = _PREAD, _NOWAIT
        self._requests["data"] = np.arange(self.CAPACITY)
        self._pointers = self._requests.ctypes.data + _IOCB.itemsize * np.arange(self.CAPACITY, dtype=np.uint64)
        self._pointers_at = ctypes.c_void_p(self._pointers.ctypes.data)
        self._events = np.zeros(self.CAPACITY, dtype=_EVENT)
        self._events_at = ctypes.c_void_p(self._events.ctypes.data)

    def read(
        self,
        files: NDArray[np.uint32],
        offsets: NDArray[np.int64],
        addresses: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """See read_ranges."""
        done = np.zeros(len(sizes), dtype=np.int64)
        for start in range(0, len(sizes), self.CAPACITY):
            some = slice(start, start + self.CAPACITY)
            count = len(sizes[some])
            requests = self._requests[:count]
            requests["file"], requests["offset"] = files[some], offsets[some]
            requests["address"], requests["bytes"] = addresses[some], sizes[some]
            events = self._events[: self._run(count)]
            done[some][events["data"].astype(np.intp)] = events["result"]
        return done

    def _run(self, count: int) -> int:
        """Submits the first requests; returns the number of completed ones. Their results are in the first events."""
        submitted = _unlocked(self._submit, self._context, ctypes.c_long(count), self._pointers_at)
        if submitted < 0 and ctypes.get_errno() == errno.EOPNOTSUPP:  # a file system with blocking reads only, as NFS
            self._requests["rw_flags"] = 0
            submitted = _unlocked(self._submit, self._context, ctypes.c_long(count), self._pointers_at)
        ended = 0
        call = _locked
        while ended < submitted:
            left = ctypes.c_long(submitted - ended)
            least = left if call is _unlocked else ctypes.c_long(0)
            at = ctypes.c_void_p(self._events_at.value + ended * _EVENT.itemsize)  # type: ignore[operator]  # no null
            # Polls first: usually all have ended. The kernel writes to memory until they have.
            ended += max(0, call(self._get_events, self._context, least, left, at, None))
            call = _unlocked
        return ended
