"""The index of a checkpoint: the file and the bytes of each part of each tensor, and its checksum.

index.json lies beside files of plain fp32 numbers, so that reading a checkpoint runs no code from it. It is checked
like any input: file names stay within the folder, and the pieces of a tensor cover it exactly once. A snapshot in
memory has an index without checksums, which are computed when it is written to disk. Needs no torch.
"""

import json
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import FileIO
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np

INDEX_JSON = "index.json"
_FORMAT = 2
"""Format 1 was the pickled index of torch.distributed.checkpoint."""
_FILE = re.compile(r"rank-\d{1,9}-\d{1,9}\.bin")
_OTHER_FILE = re.compile(r"[a-z]{1,32}\.json")
_LARGEST = 1 << 60
"""Exceeds any valid count in an index."""
THREADS = 8
"""Number of pieces that a rank writes or reads at a time: a file system serializes writes to one file, and a checksum
takes a thread 0.4 s per GB (zlib 1.2.13)."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read."""


@dataclass(frozen=True, slots=True)
class Place:
    """Some rows and columns of a tensor."""

    tensor: str
    start: tuple[int, ...]
    """Index of the first element in the full tensor."""
    shape: tuple[int, ...]
    row_step: int
    """Distance between the rows in the full tensor."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of its elements in fp32."""
        return 4 * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A place's elements in a file, in C order."""

    place: Place
    file: str
    offset: int
    """First byte in the file."""
    crc32: int | None
    """zlib's CRC-32 of all its bytes; None for a snapshot in memory."""

    @property
    def name(self) -> str:
        """Description of the bytes, for a message."""
        return f"{self.file}, bytes {self.offset} to {self.offset + self.place.nbytes - 1}"


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of a checkpoint."""

    tensors: dict[str, tuple[int, ...]]
    """Shapes of the full tensors."""
    pieces: tuple[Piece, ...]
    others: dict[str, int]
    """Checksums of the other files in the folder, by name."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(4 * prod(shape) for shape in self.tensors.values())

    @property
    def unchecked(self) -> bool:
        """Whether it lacks checksums, as for a snapshot in memory."""
        return any(piece.crc32 is None for piece in self.pieces)


def index_text(index: Index) -> str:
    """Returns the content of index.json."""
    pieces = [{**asdict(piece.place), **asdict(piece)} for piece in index.pieces]
    for piece in pieces:
        del piece["place"]
    return json.dumps({"format": _FORMAT, "tensors": index.tensors, "pieces": pieces, "others": index.others})


def write_index(folder: Path, index: Index) -> None:
    """Writes index.json; it is on disk on return. OSError if it cannot be written."""
    with (folder / INDEX_JSON).open("w", encoding="utf-8") as file:
        file.write(index_text(index))
        file.flush()
        os.fsync(file.fileno())


def read_index(folder: Path) -> Index:
    """Reads and checks index.json. CheckpointError names the defect."""
    path = folder / INDEX_JSON
    if not path.exists() and (folder / ".metadata").exists():
        raise CheckpointError(
            f"{folder} is a checkpoint of an earlier version with a pickled index, which could run code, so it is not "
            "read; resume with the version that wrote it, or train from the start"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        index = _parsed(content)
        _check_cover(index)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        why = "not JSON" if isinstance(error, json.JSONDecodeError | RecursionError | UnicodeDecodeError) else error
        raise CheckpointError(f"{path} is damaged: {why}") from error
    return index


def _parsed(content: Any) -> Index:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"it is not of format {_FORMAT}, which this version reads")
    tensors, pieces, others = content.get("tensors"), content.get("pieces"), content.get("others")
    if not isinstance(tensors, dict) or not isinstance(pieces, list) or not isinstance(others, dict):
        raise ValueError("it lacks tensors, pieces or others")
    for name, crc32 in others.items():
        if not _OTHER_FILE.fullmatch(name) or not _counts([crc32]):
            raise ValueError(f"{name!r:.80} is not the name of another file, with its checksum")
    for key, shape in tensors.items():
        if not _counts(shape, least=1) or not shape:
            raise ValueError(f"the shape of {key!r} is {shape!r:.80}")
    shapes = {key: tuple(shape) for key, shape in tensors.items()}
    return Index(shapes, tuple(_piece(number, piece, shapes) for number, piece in enumerate(pieces)), others)


def _piece(number: int, of: Any, tensors: dict[str, tuple[int, ...]]) -> Piece:
    if not isinstance(of, dict) or not isinstance(of.get("tensor"), str) or of["tensor"] not in tensors:
        raise ValueError(f"piece {number} belongs to no tensor")
    full, file = tensors[of["tensor"]], of.get("file")
    if not isinstance(file, str) or not _FILE.fullmatch(file):
        raise ValueError(f"piece {number} names {file!r:.80}, which is not a rank's file")
    start: Any = of.get("start")
    shape: Any = of.get("shape")
    row_step: Any = of.get("row_step")
    if not (_counts(start) and _counts(shape, least=1) and _counts([row_step], least=1)):
        raise ValueError(f"piece {number} has start {start!r:.80}, shape {shape!r:.80} and row_step {row_step!r:.80}")
    if not _counts([of.get("offset")]) or not ("crc32" in of and (of["crc32"] is None or _counts([of["crc32"]]))):
        raise ValueError(f"piece {number} has offset {of.get('offset')!r:.80} and crc32 {of.get('crc32')!r:.80}")
    steps = (row_step, *(1 for _ in full[1:]))
    if len(start) != len(full) or len(shape) != len(full):
        raise ValueError(f"piece {number} has a different number of dimensions than its tensor")
    if any(a + (n - 1) * step >= end for a, n, step, end in zip(start, shape, steps, full, strict=True)):
        raise ValueError(f"piece {number} goes beyond its tensor")
    return Piece(Place(of["tensor"], tuple(start), tuple(shape), row_step), file, of["offset"], of["crc32"])


def _counts(values: Any, least: int = 0) -> bool:
    """Whether `values` is a list of valid sizes."""
    return isinstance(values, list) and all(type(value) is int and least <= value < _LARGEST for value in values)


def _check_cover(index: Index) -> None:
    """Raises ValueError unless each element of each tensor is in exactly one piece."""
    of_key: dict[str, list[Place]] = {key: [] for key in index.tensors}
    for piece in index.pieces:
        of_key[piece.place.tensor].append(piece.place)
    for key, places in of_key.items():
        if sum(prod(place.shape) for place in places) != prod(index.tensors[key]):
            raise ValueError(f"the pieces of {key!r} have a different number of elements")
        step = places[0].row_step
        if any(place.row_step != step for place in places):
            raise ValueError(f"the pieces of {key!r} have rows with different steps")
        # When rows are grouped by remainder modulo the step, all pieces are boxes.
        first = np.array([(p.start[0] % step, p.start[0] // step, *p.start[1:]) for p in places])
        end = first + np.array([(1, *place.shape) for place in places])
        for i in range(len(places) - 1):
            if ((first[i] < end[i + 1 :]) & (first[i + 1 :] < end[i])).all(axis=1).any():
                raise ValueError(f"pieces of {key!r} overlap")


Slices = tuple[slice, ...]


def common(one: Place, other: Place) -> tuple[Slices, Slices] | None:
    """Returns the common elements of two places of a tensor, as slices of each; None if there are none."""
    rows = _common_rows(one, other)
    if rows is None:
        return None
    first, second = [rows[0]], [rows[1]]
    for a, n, b, m in zip(one.start[1:], one.shape[1:], other.start[1:], other.shape[1:], strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        first.append(slice(low - a, high - a))
        second.append(slice(low - b, high - b))
    return tuple(first), tuple(second)


def _common_rows(one: Place, other: Place) -> tuple[slice, slice] | None:
    """Returns the common rows: a, a + s, ... and b, b + t, ... share every lcm(s, t)-th row from the first common one
    on, by the Chinese remainder theorem."""
    a, s, b, t = one.start[0], one.row_step, other.start[0], other.row_step
    divisor = gcd(s, t)
    if (b - a) % divisor:
        return None
    step = s // divisor * t
    first = a + s * ((b - a) // divisor * pow(s // divisor, -1, t // divisor) % (t // divisor))
    first += max(0, -((first - b) // step)) * step
    last = min(a + (one.shape[0] - 1) * s, b + (other.shape[0] - 1) * t)
    if first > last:
        return None
    count = (last - first) // step + 1

    def rows(start: int, each: int) -> slice:
        at, by = (first - start) // each, step // each
        return slice(at, at + (count - 1) * by + 1, by)

    return rows(a, s), rows(b, t)


def checksum(data: Any) -> int:
    """Returns the checksum of a piece's bytes, given as any buffer."""
    return zlib.crc32(data)


def read_piece(folder: Path, piece: Piece, data: memoryview) -> None:
    """Fills `data`, of the piece's size, with its bytes. CheckpointError, naming file and bytes, if the file is too
    short or the checksum does not match; OSError if the file cannot be read."""
    with (folder / piece.file).open("rb", buffering=0) as file:
        read = _copy_mapped if piece.crc32 is None else _read
        if not read(file, piece.offset, data):
            raise CheckpointError(f"{piece.name}, of {piece.place.tensor}: the file is truncated")
    if piece.crc32 is not None and checksum(data) != piece.crc32:
        raise CheckpointError(f"{piece.name}, of {piece.place.tensor}, are damaged: their checksum does not match")


def _read(file: FileIO, offset: int, data: memoryview) -> bool:
    """Fills `data` from a file; returns whether the file was long enough."""
    file.seek(offset)
    done = 0
    while done < len(data):
        count = file.readinto(data[done:])
        if not count:
            return False
        done += count
    return True


def _copy_mapped(file: FileIO, offset: int, data: memoryview) -> bool:
    """Does the work of `_read` on a file in memory, by a mapping instead of system calls."""
    if os.fstat(file.fileno()).st_size < offset + len(data):
        return False
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(file.fileno(), offset - start + len(data), prot=mmap.PROT_READ, offset=start) as memory:
        source = np.frombuffer(memory, np.uint8, len(data), offset - start)
        np.copyto(np.frombuffer(data, np.uint8), source)
        del source  # it would keep the mapping open
    return True


def other_files(folder: Path) -> dict[str, int]:
    """Returns the checksums of a checkpoint's files that no rank wrote."""
    names = (path.name for path in folder.iterdir())
    return {name: checksum((folder / name).read_bytes()) for name in names if _OTHER_FILE.fullmatch(name)}


def damaged_others(folder: Path, index: Index) -> Iterator[str]:
    """Yields a line for each file, not written by a rank, that differs from what was written."""
    for name, crc32 in index.others.items():
        try:
            if checksum((folder / name).read_bytes()) != crc32:
                yield f"{name} is damaged: its checksum does not match"
        except OSError as error:
            yield f"{name}: {error.strerror}"


def damage(folder: Path, index: Index, advance: Callable[[int], None]) -> Iterator[str]:
    """Reads all files; yields a line for each piece and each other file that differs from what was written.

    advance: called with the number of bytes of each step of the check.
    """

    def check(piece: Piece) -> str | None:
        try:
            read_piece(folder, piece, memoryview(bytearray(piece.place.nbytes)))
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return f"{piece.name}: {error.strerror}"
        return None

    yield from damaged_others(folder, index)
    with ThreadPoolExecutor(THREADS) as pool:
        for first in range(0, len(index.pieces), THREADS):
            pieces = index.pieces[first : first + THREADS]
            for piece, found in zip(pieces, pool.map(check, pieces), strict=True):
                advance(piece.place.nbytes)
                if found is not None:
                    yield found
