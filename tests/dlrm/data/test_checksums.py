import hashlib
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.data.checksums import Checksum, changed_files, checksum, sample_checksum


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Checksum]:
    rng = np.random.default_rng(0)
    for name, size in (("a", 1_000_000), ("b", 1_000_000), ("c", 100), ("d", 0)):
        (tmp_path / name).write_bytes(rng.bytes(size))
    return {name: checksum(tmp_path / name) for name in "abcd"}


def lines(directory: Path, known: dict[str, Checksum], whole: bool = False) -> list[str]:
    found = list(changed_files(directory, known, [*known, "unknown"], whole=whole))
    assert not any("\n" in line for line in found)
    return [line.removeprefix(f"{directory}/") for line in found]


def test_unchanged(tmp_path: Path, known: dict[str, Checksum]) -> None:
    assert lines(tmp_path, known) == lines(tmp_path, known, whole=True) == []
    content = (tmp_path / "a").read_bytes()
    assert known["a"].bytes == len(content)
    assert known["a"].blake2b == hashlib.blake2b(content, digest_size=16).hexdigest()
    assert known["a"].sample == sample_checksum(tmp_path / "a")


@pytest.mark.parametrize("position", [0, 999_999, 4000])
def test_a_changed_byte_in_a_sampled_block(tmp_path: Path, known: dict[str, Checksum], position: int) -> None:
    content = bytearray((tmp_path / "a").read_bytes())
    content[position] ^= 1
    (tmp_path / "a").write_bytes(content)
    (found,) = lines(tmp_path, known)
    assert found == "a was changed: its checksum differs from the manifest's: copy or generate it again"


def test_only_the_whole_check_sees_every_byte(tmp_path: Path, known: dict[str, Checksum]) -> None:
    content = bytearray((tmp_path / "b").read_bytes())
    content[10_000] ^= 1  # Between the first block and the second, which begins at 15,808.
    (tmp_path / "b").write_bytes(content)
    assert lines(tmp_path, known) == []
    (found,) = lines(tmp_path, known, whole=True)
    assert found.startswith("b was changed")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x" * 99, "c is truncated: 99 bytes instead of 100: copy or generate it again"),
        (b"x" * 101, "c is too long: 101 bytes instead of 100: copy or generate it again"),
        (b"", "c has the content of d: the files were swapped; restore their names"),
    ],
)
def test_other_sizes(tmp_path: Path, known: dict[str, Checksum], content: bytes, message: str) -> None:
    (tmp_path / "c").write_bytes(content)
    assert lines(tmp_path, known) == [message]


def test_swapped_files(tmp_path: Path, known: dict[str, Checksum]) -> None:
    (tmp_path / "a").rename(tmp_path / "x")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "x").rename(tmp_path / "b")
    assert lines(tmp_path, known) == [
        "a has the content of b: the files were swapped; restore their names",
        "b has the content of a: the files were swapped; restore their names",
    ]


def test_a_missing_file(tmp_path: Path, known: dict[str, Checksum]) -> None:
    (tmp_path / "a").unlink()
    assert lines(tmp_path, known) == ["a does not exist, but the manifest lists it: copy or generate it again"]
