"""Unused places of a lookup name its feature's rows that the batch names, in turn."""

import pytest
import torch

from dlrm_bench.pipeline.five_stage.trimmed.named_rows import NamedRows

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("lengths", "rows", "filled"),
    [
        ([4], [7, -1, -1, 5], [7, 5, 7, 5]),
        ([3, 5], [-1, 2, -1, 9, -1, 8, -1, -1], [2, 2, 2, 9, 8, 8, 8, 9]),
        ([2, 2], [1, 3, 5, 4], [1, 3, 5, 4]),
        ([2, 3], [1, -1, -1, -1, -1], [1, 1, 0, 0, 0]),
        ([0, 2, 0], [6, -1], [6, 6]),
        ([], [], []),
    ],
)
def test_unused_places_name_rows_in_turn(lengths: list[int], rows: list[int], filled: list[int]) -> None:
    found = NamedRows.of(lengths, CPU).fill(torch.tensor(rows, dtype=torch.int32))
    assert found.dtype == torch.int32
    assert found.tolist() == filled


def test_rows_of_many_features_are_their_own() -> None:
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 40, (50,), generator=random).tolist()
    rows = torch.cat([torch.randint(100 * f, 100 * f + 99, (n,), generator=random) for f, n in enumerate(lengths)])
    given = torch.where(torch.rand(len(rows), generator=random) < 0.4, rows, -1).to(torch.int32)
    filled = NamedRows.of(lengths, CPU).fill(given)
    for of_given, of_filled in zip(given.split(lengths), filled.split(lengths), strict=True):
        named = of_given[of_given >= 0].tolist() or [0]
        expected = [row if row >= 0 else named[i % len(named)] for i, row in enumerate(of_given.tolist())]
        assert of_filled.tolist() == expected
