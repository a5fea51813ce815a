from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_bench.dlrm.dcnv2.data import permutation
from dlrm_bench.dlrm.dcnv2.data.permutation import write_destinations


def destinations(path: Path, rows: int, seed: int) -> np.ndarray:
    steps: list[int] = []
    write_destinations(path / "to.u32", rows, seed, steps.append)
    assert sum(steps) == rows
    assert [file.name for file in path.iterdir()] == ["to.u32"]
    return np.fromfile(path / "to.u32", dtype=np.uint32)


@given(rows=st.integers(1, 1500), seed=st.integers(0, 2**32 - 1), block=st.integers(40, 700))
@settings(max_examples=60, deadline=None)
def test_rows_go_where_numpy_shuffles_them(
    tmp_path_factory: pytest.TempPathFactory, rows: int, seed: int, block: int
) -> None:
    expected = np.arange(rows)[:, None].repeat(2, axis=1)
    np.random.seed(seed)
    np.random.shuffle(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "BLOCK_ROWS", block)
        to = destinations(tmp_path_factory.mktemp("shuffle"), rows, seed)
    np.testing.assert_array_equal(expected[to, 0], np.arange(rows))


def test_blocks_of_usual_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "BLOCK_ROWS", 1 << 18)
    order = np.random.RandomState(0).permutation(1_000_000)
    np.testing.assert_array_equal(destinations(tmp_path, 1_000_000, 0)[order], np.arange(1_000_000))


def test_draws_are_those_of_wide_bounds() -> None:
    """The bounds of the full set pass 2^31; its first steps are compared with single draws of numpy's generator."""
    rows = 4_195_197_692
    random, words = np.random.RandomState(0), np.random.RandomState(0)
    drawn = random.randint(0, np.arange(rows, rows - 1000, -1), dtype=np.uint32)
    for bound, number in zip(range(rows, rows - 1000, -1), drawn, strict=True):
        while (word := int(words.randint(0, 2**32, dtype=np.uint32))) >= bound:
            pass
        assert word == number


def test_too_many_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4294967296 training rows"):
        write_destinations(tmp_path / "to.u32", 1 << 32, 0, lambda _: None)
