"""Files of counts: what was written, no other model's, and nothing damaged."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dlrm_bench.dlrm.tables.row_counts import read_counts, write_counts
from dlrm_bench.dlrm.tables.tables import Tables

TABLES = Tables(names=("a", "b", "c"), rows=(4, 2, 5), columns=8, hot=(1, 2, 3))
COUNTS = ([0, 3, 1, 900], [70_000, 0], [0, 0, 0, 0, 0])


def arrays() -> list[NDArray[np.uint32]]:
    return [np.array(counts, dtype=np.uint32) for counts in COUNTS]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "counts"  # without a suffix, which numpy would add
    write_counts(path, TABLES, arrays(), 1000, {"preset": "p", "seed": 3})
    return path


def test_counts_are_as_written_and_narrow(file: Path) -> None:
    counts = read_counts(file, TABLES)
    assert (counts.samples, counts.data) == (1000, {"preset": "p", "seed": 3})
    found = [counts.of_table(table) for table in range(3)]
    assert [of_table.tolist() for of_table in found] == [*COUNTS]
    assert [of_table.dtype for of_table in found] == [np.uint16, np.uint32, np.uint8]
    assert counts.rates(1).rates[0] == counts.row_rates(1)[0] == 70
    assert [path.name for path in file.parent.iterdir()] == ["counts"]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (Tables(names=("a", "b"), rows=(4, 2), columns=8, hot=(1, 2)), "it has 3 tables, not 2"),
        (
            Tables(names=("a", "b", "c"), rows=(4, 3, 5), columns=8, hot=(1, 2, 3)),
            "it has b of 2 rows, not b of 3 rows",
        ),
        (
            Tables(names=("a", "x", "c"), rows=(4, 2, 5), columns=8, hot=(1, 2, 3)),
            "it has b of 2 rows, not x of 2 rows",
        ),
    ],
)
def test_counts_of_another_model_are_refused(file: Path, tables: Tables, said: str) -> None:
    with pytest.raises(ValueError, match=f"--table-counts {file} is of another model: {said}"):
        read_counts(file, tables)


def test_what_is_no_file_of_counts_is_refused(tmp_path: Path, file: Path) -> None:
    text, plain, cut = (tmp_path / name for name in ("text", "plain.npz", "cut"))
    text.write_text("no counts")
    np.savez(plain, rows=np.arange(3))
    cut.write_bytes(file.read_bytes()[:-60])
    for path in (text, plain, cut):
        with pytest.raises(ValueError, match=f"--table-counts {path} is not a file of counts .*dlrm-bench data counts"):
            read_counts(path, TABLES)
    with pytest.raises(FileNotFoundError):
        read_counts(tmp_path / "none", TABLES)


def test_damage_is_named_when_a_table_is_read(file: Path) -> None:
    counts = read_counts(file, TABLES)
    whole = bytearray(file.read_bytes())
    at = whole.find(b"0.npy") + 60
    whole[at] ^= 255
    file.write_bytes(whole)
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        counts.of_table(0)
