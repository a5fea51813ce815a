"""A comparison of two sides alone."""

from dlrm_bench.bench.compare.comparison import Result, compare_all
from dlrm_bench.bench.compare.sides import Side


def compare_sides(a: Side, b: Side) -> Result:
    """Compares B with A; pair by pair where their runs alternate in time in a balanced order, so that drift cancels."""
    return compare_all([("", a, b)])[0]
