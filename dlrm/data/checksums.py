"""Checksums of data files: of all bytes, and of a few blocks, which takes milliseconds for any size of file."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlrm_bench.dlrm.data.npy import COPY_AGAIN
from dlrm_bench.dlrm.data.paths import why_not

DIGEST_BYTES = 16
SAMPLE_BLOCKS = 64
SAMPLE_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Checksum:
    """A manifest's entry for a file."""

    bytes: int
    """Its size."""
    blake2b: str
    """BLAKE2b of all bytes, 16 bytes in hexadecimal (b2sum -l 128)."""
    sample: str
    """BLAKE2b of its size and 64 blocks of 4 KiB, evenly spread from its first byte to its last."""


def checksum(path: Path) -> Checksum:
    """Reads a whole file; about 1 GB/s on one core."""
    with path.open("rb") as file:
        whole = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
    return Checksum(path.stat().st_size, whole.hexdigest(), sample_checksum(path))


def sample_checksum(path: Path) -> str:
    """Checksum.sample of a file."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=DIGEST_BYTES)
        last = max(size - SAMPLE_BLOCK_BYTES, 0)
        for block in range(SAMPLE_BLOCKS):
            digest.update(os.pread(file.fileno(), SAMPLE_BLOCK_BYTES, last * block // (SAMPLE_BLOCKS - 1)))
    return digest.hexdigest()


def changed_files(
    directory: Path, known: Mapping[str, Checksum], names: Iterable[str], *, whole: bool = False
) -> Iterator[str]:
    """Yields a line for each of the files `names` that differs from its entry, with the fix.

    Compares sizes and, by default, samples alone; `whole` compares all bytes. Names without an entry are left out.
    """
    for name in names:
        if name not in known:
            continue
        path, expected = directory / name, known[name]
        if not path.is_file():
            yield f"{path} {why_not(path)}, but the manifest has it: {COPY_AGAIN}"
            continue
        size = path.stat().st_size
        sample = sample_checksum(path)
        if sample != expected.sample and (other := _other_name(known, name, sample)):
            yield f"{path} has the content of {other}: files were swapped; give them their names back"
        elif size < expected.bytes:
            yield f"{path} is truncated: {size} bytes instead of {expected.bytes}: {COPY_AGAIN}"
        elif size > expected.bytes:
            yield f"{path} is too long: {size} bytes instead of {expected.bytes}: {COPY_AGAIN}"
        elif sample != expected.sample or (whole and checksum(path).blake2b != expected.blake2b):
            yield f"{path} was changed: its checksum is not that of the manifest: {COPY_AGAIN}"


def _other_name(known: Mapping[str, Checksum], name: str, sample: str) -> str | None:
    return next((other for other, sums in known.items() if other != name and sums.sample == sample), None)
