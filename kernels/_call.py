"""A kernel's arguments, stated once for its public function, its plain twin and its launches."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
C = TypeVar("C")


def function(call: Callable[P, C], run: Callable[[C], None]) -> Callable[P, None]:
    """Returns `run` as a function of the fields of `call`, the NamedTuple of a kernel's arguments.

    The NamedTuple's fields and docstring are the function's parameters and documentation. Its methods: `plain`, in
    PyTorch; `triton` and `cuda`, the kernels; `launch`, which checks the arguments and runs the fastest that applies.
    """

    @functools.wraps(call, updated=())
    def of_arguments(*arguments: P.args, **named: P.kwargs) -> None:
        run(call(*arguments, **named))

    return of_arguments
