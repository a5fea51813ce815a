"""Arrays in .npy format, in a file of their own or inside an uncompressed zip: written in pieces, read in place."""

import os
import struct
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import DTypeLike, NDArray

from dlrm_bench.dlrm.data.linux_aio import read_ranges

COPY_AGAIN = "copy or generate it again"
_PARSING = threading.Lock()
"""Lock of the parser with which numpy reads headers: in CPython 3.11, several threads in it may end in a SystemError
(github.com/python/cpython/issues/106905)."""


def write_header(file: IO[bytes], dtype: DTypeLike, shape: tuple[int, ...]) -> None:
    """Writes the header of a C-ordered .npy array; its bytes are to follow.

    Uses plain writes, not a writable memory map: on a full disk they raise OSError, while a map kills the process.
    """
    header = {"descr": npy_format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(file, header)


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """A C-ordered .npy array [N, columns] on disk, open for reading by any number of threads at once.

    Uses reads, not a memory map: the kernel copies straight to the destination of the rows, without page faults and
    without Python's interpreter lock, and truncation during a read is an error, while a map kills the process. RowFiles
    reads several files in one system call; this class reads the rest.
    """

    name: str
    """File and member, for messages."""
    file: FileIO
    start: int
    """Byte position of the first row."""
    row_bytes: int
    shape: tuple[int, int]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, first: int, out: NDArray[Any]) -> None:
        """Fills `out`, C-ordered and of this dtype's size, with consecutive rows from row `first`. ValueError names the
        file if it cannot be read or has been truncated."""
        position = self.start + first * self.row_bytes
        done = self._read(position, out.data)
        while done < out.nbytes:  # short reads occur on network file systems and beyond 2 GB
            done += self._read(position + done, out.data.cast("B")[done:])

    def _read(self, position: int, out: memoryview) -> int:
        """Returns the number of bytes read, at least one."""
        try:
            count = os.preadv(self.file.fileno(), (out,), position)
        except OSError as error:
            raise ValueError(
                f"{self.name} cannot be read ({error.strerror or error}): check the disk, or {COPY_AGAIN}"
            ) from error
        if count == 0:
            raise ValueError(
                f"{self.name} is truncated: it ends at byte {position} but was longer when it was opened: {COPY_AGAIN}"
            )
        return count


class RowFiles:
    """Several ArrayFiles whose same rows are read together, in one system call if Linux supports it."""

    def __init__(self, arrays: Sequence[ArrayFile]) -> None:
        self._arrays = arrays
        self._files = np.array([array.file.fileno() for array in arrays], dtype=np.uint32)
        self._starts = np.array([array.start for array in arrays], dtype=np.int64)
        self._row_bytes = np.array([array.row_bytes for array in arrays], dtype=np.int64)

    def read(self, first: int, count: int, memory: NDArray[np.uint8], positions: NDArray[np.int64]) -> None:
        """Fills `memory` with rows [first, first + count) of each array, array i starting at byte positions[i].

        Thread-safe. ValueError as for ArrayFile.read.
        """
        sizes = self._row_bytes * count
        assert (positions + sizes).max() <= memory.nbytes
        offsets = self._starts + self._row_bytes * first
        done = read_ranges(self._files, offsets, memory.ctypes.data + positions, sizes)
        if (done != sizes).any():
            missing = [i for i in range(len(self._arrays)) if done[i] != sizes[i]]
            for i in missing:  # reads all of them in parallel
                os.posix_fadvise(int(self._files[i]), int(offsets[i]), int(sizes[i]), os.POSIX_FADV_WILLNEED)
            for i in missing:
                self._arrays[i].read(first, memory[positions[i] : positions[i] + sizes[i]])


def open_array(
    path: Path,
    dtype: DTypeLike,
    columns: int,
    *,
    fix: str = COPY_AGAIN,
    member: str = "",
    span: tuple[int, int] | None = None,
    file: FileIO | None = None,
    convert: str = "convert it with numpy's astype",
) -> ArrayFile:
    """Opens the C-ordered .npy array [N, columns], N > 0, that fills bytes `span` of a file (default: all of it).

    file: the file at `path`, if already open. Raises ValueError, naming file, member and the remedy (`fix`, if the
    shape is wrong; `convert`, if the dtype is), if it is anything else.
    """
    name = f"{path}[{member}]" if member else str(path)
    start, end = span or (0, path.stat().st_size)
    file = file or FileIO(path)
    file.seek(start)
    try:
        version = npy_format.read_magic(file)
        read_header = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        with _PARSING:
            shape, fortran_order, found = read_header(file)
    except (ValueError, SyntaxError, TokenError) as error:
        # numpy lets errors of Python's own parser through, where the header's text or length is damaged.
        what: object = error if isinstance(error, ValueError) else "its header is damaged"
        if "allow_pickle" in str(error):  # for a header that is too long, numpy advises to trust it
            what = "its header is too long"
        raise ValueError(f"{name} is not a .npy array ({what}): {COPY_AGAIN}") from error
    data_start = file.tell()
    if found != dtype:
        raise ValueError(f"{name}: expected dtype {np.dtype(dtype)}, found {found}: {convert}")
    if len(shape) != 2 or shape[1] != columns or shape[0] == 0:
        raise ValueError(f"{name}: expected shape (N, {columns}) with N > 0, found {shape}: {fix}")
    if fortran_order:
        raise ValueError(f"{name}: expected C order, found Fortran order: convert it with numpy.ascontiguousarray")
    needed = shape[0] * columns * found.itemsize
    if end - data_start < needed:
        raise ValueError(
            f"{name} is truncated: expected {needed} bytes of data for shape {shape}, found "
            f"{max(end - data_start, 0)}: {COPY_AGAIN}"
        )
    return ArrayFile(name, file, data_start, columns * found.itemsize, shape, found)


def map_array(path: Path, dtype: DTypeLike, columns: int) -> NDArray[Any]:
    """Memory-maps a file's C-ordered .npy array [N, columns], N > 0; ValueError as for `open_array`."""
    array = open_array(path, dtype, columns)
    array.file.close()
    return np.memmap(path, dtype=array.dtype, mode="r", offset=array.start, shape=array.shape).view(np.ndarray)


def member_span(path: Path, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Returns the start and end, in the zip file, of a stored member's bytes; ValueError if compressed or damaged.

    The bytes follow the member's local header, whose name and extra field have their own lengths (APPNOTE.TXT 4.3.7);
    those in the directory at the end of the file, which zipfile reads, may differ.
    """
    name = f"{path}[{info.filename}]"
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(
            f"{name} is compressed, and only stored members can be memory-mapped: "
            "write the file again with numpy.savez instead of numpy.savez_compressed"
        )
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise ValueError(f"{name} has a damaged zip header: {COPY_AGAIN}")
    name_length, extra_length = struct.unpack("<HH", header[26:])
    start = info.header_offset + len(header) + int(name_length) + int(extra_length)
    return start, start + info.file_size
