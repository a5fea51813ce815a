import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.dcnv2.data import raw_tsv
from dlrm_bench.dlrm.dcnv2.data.raw_tsv import raw_days, read_blocks
from tests.dlrm.dcnv2.data.raw_days import raw_lines

GOOD = "\t".join(["1", *map(str, range(13)), *(f"{n:x}" for n in range(26))])


def write(path: Path, *lines: str) -> Path:
    file = path / "day_0"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def with_field(column: int, value: str) -> str:
    fields = GOOD.split("\t")
    fields[column - 1] = value
    return "\t".join(fields)


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
@pytest.mark.parametrize("zipped", [False, True])
def test_blocks_are_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool, ending: str) -> None:
    monkeypatch.setattr(raw_tsv, "BLOCK_BYTES", 5000)
    lines = raw_lines(np.random.default_rng(0), 300)
    text = ((ending or "\n").join(lines) + ending).encode()
    file = tmp_path / "day_0"
    file.write_bytes(gzip.compress(text) if zipped else text)
    blocks = list(read_blocks(file))
    assert len(blocks) > 5
    assert blocks[-1].file_bytes == file.stat().st_size
    fields = [line.split("\t") for line in lines]
    np.testing.assert_array_equal(np.concatenate([b.labels for b in blocks]), [int(f[0] or 0) for f in fields])
    dense = [[int(value or 0) for value in f[1:14]] for f in fields]
    np.testing.assert_array_equal(np.concatenate([b.dense for b in blocks]), dense)
    for feature in range(26):
        hashes = [int(f[14 + feature] or "0", 16) for f in fields]
        np.testing.assert_array_equal(np.concatenate([b.hashes[feature] for b in blocks]), hashes)
        assert blocks[0].hashes[feature].dtype == np.uint32
    assert blocks[0].dense.dtype == blocks[0].labels.dtype == np.int32


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (with_field(1, "2"), r"column 1 \(label\): '2' is not 0 or 1"),
        (with_field(1, "-1"), r"column 1 \(label\): '-1' is not 0 or 1"),
        (with_field(2, "x"), r"column 2 \(int_0\): 'x' is not an integer of 32 bits"),
        (with_field(14, "1.5"), r"column 14 \(int_12\): '1.5' is not an integer"),
        (with_field(9, "2147483648"), r"column 9 \(int_7\): '2147483648' is not an integer of 32 bits"),
        (with_field(15, "xyz"), r"column 15 \(cat_0\): 'xyz' is not a hash of up to 8 hexadecimal digits"),
        (with_field(40, "123456789"), r"column 40 \(cat_25\): '123456789' is not a hash"),
        (with_field(20, "-1"), r"column 20 \(cat_5\): '-1' is not a hash"),
        (with_field(20, "\xff"), r"column 20 \(cat_5\): .* is not a hash"),
        (with_field(20, '"'), r"column 20 \(cat_5\): '\"' is not a hash"),
        (GOOD.rpartition("\t")[0], "has 39 tab-separated fields instead of 40"),
        (GOOD + "\t", "has 41 tab-separated fields instead of 40"),
        ("", "has 1 tab-separated fields instead of 40"),
    ],
)
def test_what_is_malformed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    monkeypatch.setattr(raw_tsv, "BLOCK_BYTES", 5 * len(GOOD))
    file = write(tmp_path, *[GOOD] * 22, line, *[GOOD] * 7)
    with pytest.raises(ValueError, match=f"day_0: line 23,? {message}.*: copy or generate it again, or remove"):
        list(read_blocks(file))


def test_a_short_line_and_a_long_one_do_not_cancel(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, GOOD + "\t0", GOOD.rpartition("\t")[0])
    with pytest.raises(ValueError, match="line 2 has 41"):
        list(read_blocks(file))


def test_a_truncated_gzip_file(tmp_path: Path) -> None:
    file = tmp_path / "day_0.gz"
    file.write_bytes(gzip.compress(f"{GOOD}\n".encode() * 1000)[:-20])
    with pytest.raises(ValueError, match=r"day_0\.gz is not a complete gzip file"):
        list(read_blocks(file))


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="day_0 is empty"):
        list(read_blocks(write(tmp_path)))


def test_days_are_found_in_order(tmp_path: Path) -> None:
    for name in ("day_10", *(f"day_{day}.gz" for day in range(10)), "day_0_dense.npy", "readme"):
        (tmp_path / name).touch()
    assert [path.name for path in raw_days(tmp_path)] == [*(f"day_{day}.gz" for day in range(10)), "day_10"]
    (tmp_path / "day_3.gz").unlink()
    with pytest.raises(ValueError, match="has day_10 but no day_3: copy the missing day"):
        raw_days(tmp_path)
    (tmp_path / "day_3.gz").touch()
    (tmp_path / "day_3").touch()
    with pytest.raises(ValueError, match=r"has day_3 and day_3\.gz: remove one"):
        raw_days(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    os.mkfifo(tmp_path / "day_1")
    with pytest.raises(ValueError, match=r"day_1 is not a regular file: give the raw day as a file"):
        raw_days(tmp_path)
