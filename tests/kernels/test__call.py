"""A kernel's functions share the signature and the documentation of its arguments."""

import inspect
from typing import NamedTuple

import pytest

from dlrm_bench.kernels._call import function


class Sum(NamedTuple):
    """out = a + b."""

    a: float
    b: float
    out: list[float]
    scale: float = 1

    def plain(self) -> None:
        self.out.append(self.scale * (self.a + self.b))


plain_sum = function(Sum, Sum.plain)


def test_a_function_takes_the_fields_by_place_and_by_name():
    out: list[float] = []
    plain_sum(1, 2, out)
    plain_sum(1, b=2, out=out, scale=2)
    assert out == [3, 6]
    with pytest.raises(TypeError, match="out"):
        plain_sum(1, 2)  # type: ignore[call-arg]


def test_signature_and_documentation_are_those_of_the_arguments():
    assert inspect.signature(plain_sum) == inspect.signature(Sum)
    assert plain_sum.__doc__ == "out = a + b."
