"""The one rule of rounding: significant digits, at and around the places where their number changes."""

import pytest

from dlrm_bench.bench.report.rounding import milliseconds, times, with_interval


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.40749, "0.407"), (2.23649, "2.236"), (9.9994, "9.999"), (9.9996, "10.00"), (11.9749, "11.97"),
        (99.994, "99.99"), (99.996, "100.0"), (304.51, "304.5"),
    ],
)  # fmt: skip
def test_milliseconds_have_four_digits_and_three_decimals_at_most(value: float, text: str) -> None:
    assert milliseconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98744, "0.987"), (1.9994, "1.999"), (1.9996, "2.00"), (2.9249, "2.92"), (9.994, "9.99"), (9.996, "10.0"),
        (42.5717, "42.6"), (50.749, "50.7"),
    ],
)  # fmt: skip
def test_ratios_have_three_digits_and_three_decimals_below_two(value: float, text: str) -> None:
    assert times(value) == text


def test_an_interval_has_its_ends_by_the_same_rule() -> None:
    assert with_interval(20.79, 10.155, 42.5717) == "20.8 (10.2 to 42.6)"
