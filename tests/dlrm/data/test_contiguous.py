import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_bench.dlrm.data import contiguous
from dlrm_bench.dlrm.data.contiguous import Numbering, ids_of_numbers


def plain_numbers(hashes: list[int]) -> list[int]:
    numbers: dict[int, int] = {}
    return [numbers.setdefault(value, len(numbers) + 1) for value in hashes]


@given(
    pieces=st.lists(
        st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**32 - 1), st.just(2**32 - 1)), max_size=60), max_size=20
    ),
    slots=st.sampled_from([2, 16, 1024]),
)
@settings(deadline=None)
def test_numbers_by_first_appearance(pieces: list[list[int]], slots: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contiguous, "FEWEST_SLOTS", slots)
        patch.setattr(contiguous, "GROW_PIECE", 7)
        numbering = Numbering()
        found = [numbering.number(np.array(piece, dtype=np.uint32)) for piece in pieces]
    everything = [value for piece in pieces for value in piece]
    assert [int(n) for piece in found for n in piece] == plain_numbers(everything)
    assert numbering.distinct == len(set(everything))


def test_many_hashes_in_every_order() -> None:
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**32, 300_000, dtype=np.uint32)
    numbering = Numbering()
    for piece in np.array_split(hashes, 5):
        numbering.number(piece)
    numbers = numbering.number(hashes)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    expected = np.argsort(np.argsort(first)) + 1
    np.testing.assert_array_equal(numbers, expected[inverse])
    shuffled = rng.permutation(len(hashes))
    np.testing.assert_array_equal(numbering.number(hashes[shuffled]), numbers[shuffled])


def test_a_run_of_hashes_with_one_home_fills_neighbouring_slots() -> None:
    # Hashes whose products begin alike land in the last slots of the table, and go on at its start.
    hashes = [h for h in range(1 << 22) if (h * 0x9E3779B97F4A7C15 % 2**64) >> 54 >= 1020][:300]
    assert len(hashes) == 300
    numbering = Numbering()
    assert numbering.number(np.array(hashes, dtype=np.uint32)).tolist() == list(range(1, len(hashes) + 1))
    assert numbering.number(np.array(hashes[::-1], dtype=np.uint32)).tolist() == list(range(len(hashes), 0, -1))


@pytest.mark.parametrize(
    ("counts", "threshold", "ids"),
    [
        ([0, 5, 1, 3, 2, 9], 3, [1, 2, 1, 3, 1, 4]),
        ([0, 1, 1], 2, [1, 1, 1]),
        ([0], 2, [1]),
    ],
)
def test_frequent_hashes_keep_their_order(counts: list[int], threshold: int, ids: list[int]) -> None:
    assert ids_of_numbers(np.array(counts), threshold).tolist() == ids
