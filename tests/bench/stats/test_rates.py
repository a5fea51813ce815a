"""The committed table of rates is what its script makes."""

from functools import partial

import pytest

from dlrm_bench.bench import ROOT
from tests.bench.stats.rates import (
    TABLES,
    TRIES,
    Row,
    as_row,
    of_a_ladder,
    of_a_reference,
    of_a_window,
    of_an_uneven_window,
    of_change_points,
    of_unequal_numbers,
)

PAGE = (ROOT / "bench" / "stats" / "RATES.md").read_text(encoding="utf-8").splitlines()


def test_the_page_has_every_table_and_case() -> None:
    rows = [line for line in PAGE if line.startswith("| ")]
    assert len(rows) == sum(2 + len(cases) for _, _, cases in TABLES)
    assert all(as_row(columns) in PAGE for _, columns, _ in TABLES)


@pytest.mark.parametrize(
    "case",
    [
        partial(of_a_reference, 3),
        partial(of_unequal_numbers, (2, 10)),
        partial(of_a_window, 250, 0.0, 0.02),
        partial(of_a_ladder, 3, "2 % a run", "normal", 0.95),
        partial(of_an_uneven_window, 590, "10 % more from begin to end, evenly"),
        partial(of_change_points, 8, "heavy"),
    ],
)
def test_rows_come_out_again(case: partial[Row]) -> None:
    """The same draws give the same rates."""
    assert as_row(case(TRIES)) in PAGE
