from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.dcnv2.data import shuffled_rows
from dlrm_bench.dlrm.dcnv2.data.shuffled_rows import COLUMNS, gather, gather_range, remove_gathered, scatter

ROWS = 1000


@pytest.fixture
def scattered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Path], np.ndarray]:
    """Two sources' rows in buckets, and all rows in their final order."""
    monkeypatch.setattr(shuffled_rows, "BUCKET_ROWS", 70)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2**32, (ROWS, COLUMNS), dtype=np.uint32)
    to = rng.permutation(ROWS).astype(np.uint32)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, part in zip(folders, (slice(0, 620), slice(620, ROWS)), strict=True):
        folder.mkdir()
        for piece in np.array_split(np.arange(ROWS)[part], 4):
            scatter(folder, rows[piece], to[piece])
    final = np.empty_like(rows)
    final[to] = rows
    return folders, final


@pytest.mark.parametrize(("start", "stop"), [(0, ROWS), (0, 70), (69, 71), (140, 499), (999, ROWS)])
def test_rows_arrive_where_they_should(scattered: tuple[list[Path], np.ndarray], start: int, stop: int) -> None:
    folders, final = scattered
    pieces = list(gather_range(folders, start, stop, ROWS))
    np.testing.assert_array_equal(np.concatenate(pieces), final[start:stop])


def test_only_what_is_gathered_goes(scattered: tuple[list[Path], np.ndarray]) -> None:
    folders, final = scattered
    remove_gathered(folders, 500)
    remove_gathered(folders, 500)
    np.testing.assert_array_equal(np.concatenate(list(gather_range(folders, 500, ROWS, ROWS))), final[500:])
    with pytest.raises(AssertionError, match="bucket 6 has 0 of 70 rows"):
        gather(folders, 6, ROWS)
