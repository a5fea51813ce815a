"""Criteo's raw click logs: one line of 40 tab-separated fields per sample, read in blocks of bounded size.

A line is the label (0 or 1), 13 integers, and 26 hashes of up to 8 hexadecimal digits; an empty field means 0. Files
are plain or gzip, recognised by their first bytes. polars parses them. It would fill in missing fields, so these are
detected by counting, and an error is then located line by line.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.npy import COPY_AGAIN

DENSE_FIELDS = 13
HASH_FIELDS = 26
BLOCK_BYTES = 1 << 26
"""Bytes of text parsed at a time; text and parsed data together take about eight times as much memory."""
SAMPLE_BYTES = 1 << 22
"""Bytes of text from which a day's number of rows is estimated."""

DENSE_NAMES = [f"int_{field}" for field in range(DENSE_FIELDS)]
HASH_NAMES = [f"cat_{field}" for field in range(HASH_FIELDS)]
NAMES = ["label", *DENSE_NAMES, *HASH_NAMES]
INTEGER = re.compile(rb"[-+]?[0-9]+")
HASH = re.compile(rb"[0-9a-fA-F]{1,8}")
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive samples, n of them."""

    labels: NDArray[np.int32]
    """[n], 0 or 1."""
    dense: NDArray[np.int32]
    """[n, 13], C order."""
    hashes: list[NDArray[np.uint32]]
    """26 times [n]."""
    file_bytes: int
    """Number of bytes of the file read so far; compressed bytes for a gzip file."""


def raw_days(raw: Path) -> list[Path]:
    """Returns the files day_0, day_1, ... of a folder, each plain or with .gz, up to the first gap.

    ValueError if there is none, if a day exists twice, or if a day before a later one is missing.
    """
    found: dict[int, Path] = {}
    for path in sorted(raw.iterdir()):
        if match := re.fullmatch(r"day_(\d+)(\.gz)?", path.name):
            day = int(match[1])
            if day in found:
                raise ValueError(f"{raw} has {found[day].name} and {path.name}: remove one of them")
            if not path.is_file():  # opening a pipe would block until another process writes to it
                raise ValueError(f"{path} is not a regular file: give the raw day as a file, plain or gzip")
            found[day] = path
    if not found:
        raise ValueError(f"{raw} has no files day_0, day_1, ... (or day_0.gz, ...): name the folder of the raw days")
    for day in range(max(found)):
        if day not in found:
            raise ValueError(f"{raw} has {found[max(found)].name} but no day_{day}: copy the missing day")
    return [found[day] for day in range(len(found))]


def rows_per_byte(path: Path) -> float:
    """Returns the rows per byte of a raw day's file, from its first few megabytes; ValueError if it is unreadable."""
    with path.open("rb") as file:
        text = next(_texts(path, file, SAMPLE_BYTES), b"")
        return text.count(b"\n") / max(file.tell() if _is_gzip(path) else len(text), 1)


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC


def read_blocks(path: Path) -> Iterator[Block]:
    """Yields the samples of a raw day in order; reads and decompresses the next block while one is in use.

    ValueError names file, line and column of a malformed sample, and the fix.
    """
    line = 0
    with path.open("rb") as file, ThreadPoolExecutor(1) as reader:
        blocks = _texts(path, file, BLOCK_BYTES)
        ahead = reader.submit(next, blocks, None)
        while (text := ahead.result()) is not None:
            file_bytes = file.tell()
            ahead = reader.submit(next, blocks, None)
            block = _parse(path, text, line, file_bytes)
            line += len(block.labels)
            yield block
    if line == 0:
        raise ValueError(f"{path} is empty: {COPY_AGAIN}")


def _texts(path: Path, file: IO[bytes], block_bytes: int) -> Iterator[bytes]:
    """Yields whole lines, about `block_bytes` at a time; adds a missing newline at the end of the last line."""
    stream: IO[bytes] = gzip.GzipFile(fileobj=file) if _is_gzip(path) else file  # type: ignore[assignment]
    rest = b""
    while True:
        try:
            text = stream.read(block_bytes)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is not a complete gzip file ({error}): {COPY_AGAIN}") from error
        if not text:
            break
        end = text.rfind(b"\n") + 1
        if end:
            yield rest + text[:end]
            rest = text[end:]
        else:
            rest += text
    if rest:
        yield rest + b"\n"


def _parse(path: Path, text: bytes, first_line: int, file_bytes: int) -> Block:
    import polars as pl  # here, because training needs neither raw days nor polars

    schema = pl.Schema({name: pl.String if name in HASH_NAMES else pl.Int32 for name in NAMES})
    symbols = np.frombuffer(text, dtype=np.uint8)
    lines = int(np.count_nonzero(symbols == ord("\n")))
    tabs = int(np.count_nonzero(symbols == ord("\t")))
    try:
        table = pl.read_csv(text, separator="\t", has_header=False, schema=schema, quote_char=None)
        if tabs != lines * (len(NAMES) - 1) or len(table) != lines:
            raise ValueError(f"{tabs} tabs in {lines} lines")
        table = table.with_columns(pl.col(HASH_NAMES).str.to_integer(base=16, dtype=pl.UInt32)).fill_null(0)
        labels = table["label"].to_numpy()
        if labels.view(np.uint32).max() > 1:  # As unsigned numbers, negative ones are large.
            raise ValueError(f"labels from {labels.min()} to {labels.max()}")
    except (pl.exceptions.PolarsError, ValueError) as error:
        _find_malformed(path, text, first_line)
        raise ValueError(f"{path}: lines {first_line + 1} to {first_line + lines}: {error}: {COPY_AGAIN}") from error
    dense = np.ascontiguousarray(table.select(DENSE_NAMES).to_numpy())
    return Block(labels, dense, [table[name].to_numpy() for name in HASH_NAMES], file_bytes)


def _find_malformed(path: Path, text: bytes, first_line: int) -> None:
    """Raises ValueError about the first malformed line, if any."""
    for line, content in enumerate(text[:-1].split(b"\n"), start=first_line + 1):
        fields = content.removesuffix(b"\r").split(b"\t")
        if len(fields) != len(NAMES):
            raise ValueError(
                f"{path}: line {line} has {len(fields)} tab-separated fields instead of {len(NAMES)}: {COPY_AGAIN}, or "
                "remove the line"
            )
        for column, (name, value) in enumerate(zip(NAMES, fields, strict=True), start=1):
            if expected := _objection(name, value):
                shown = value[:40].decode(errors="backslashreplace")
                raise ValueError(
                    f"{path}: line {line}, column {column} ({name}): {shown!r} is not {expected}: {COPY_AGAIN}, or "
                    "remove the line"
                )


def _objection(name: str, value: bytes) -> str | None:
    """Returns the required form of a field; None if the value has it."""
    if not value:
        return None
    if name in HASH_NAMES:
        return None if HASH.fullmatch(value) else "a hash of up to 8 hexadecimal digits"
    if name == "label":
        return None if value in (b"0", b"1") else "0 or 1"
    fits = INTEGER.fullmatch(value) and -(2**31) <= int(value) < 2**31
    return None if fits else "an integer of 32 bits"
