"""Triton's interpreter for tests: with a GPU's rules for NaN and for rounding, and in less than half of its time.

The interpreter does much of its work anew for each operation of each program. The parts that take most time are
replaced, from outside: they are private to Triton, whose version is pinned. Other values stay the same to the bit.
"""

import math
import operator
from typing import Any

import numpy as np
import torch

from tests.program_races import watch_programs

_EXACTLY = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def prepare_interpreter() -> None:
    """Changes the interpreter in this process, and in those that are forked from it, where kernels are interpreted."""
    # Not at the top: importing it asks whether there is a GPU, and conftest.py says first by which way.
    from dlrm_bench.kernels._triton import INTERPRETED, triton

    if triton is None or not INTERPRETED:
        return
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    _choose_numbers_as_on_gpus(interpreter.InterpreterBuilder)
    _round_as_on_gpus(interpreter)
    _fuse_as_on_gpus(interpreter)
    _patch_once_a_launch(interpreter)
    _type_tuples_when_asked(core)
    _make_tensors_without_shapes(core)
    _compare_types_by_name(core)
    interpreter._get_np_dtype = _NumpyTypes(interpreter._get_np_dtype)
    interpreter.ScanOps.generic_scan = _scan
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    watch_programs(interpreter)


def _choose_numbers_as_on_gpus(builder: Any) -> None:
    """Gives the interpreter a GPU's rule for the greater and the smaller of a number and NaN: the number, unless a
    kernel asks for NaN. The interpreter has NaN either way, so that no test on a CPU would see a kernel hide it."""
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


def _round_as_on_gpus(interpreter: Any) -> None:
    """Rounds fp32 to bf16 and e4m3 to the nearest, ties to even, with NaN as NaN; the interpreter truncates. What is
    too large for e4m3 becomes NaN, as in PyTorch, not the largest number, as on GPUs: a kernel that does not saturate
    fails."""
    convert = interpreter._convert_float
    formats = {"bf16": (torch.bfloat16, torch.uint16), "fp8e4nv": (torch.float8_e4m3fn, torch.uint8)}

    def rounded(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name != "fp32" or target.name not in formats:
            return convert(values, source, target, rounding)
        kind, bits = formats[target.name]
        return torch.from_numpy(np.ascontiguousarray(values)).to(kind).view(bits).numpy().reshape(values.shape)

    interpreter._convert_float = rounded


def _fuse_as_on_gpus(interpreter: Any) -> None:
    """Rounds the fma of fp32 to fp64 and then to fp32, which differs from one rounding for one in 2**29 random numbers;
    the interpreter rounds the product to fp32."""

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        assert z.dtype.scalar.name == "fp32", "an fma of fp32"
        one, other, term = (of.data.astype(np.float64) for of in (x, y, z))
        return interpreter.TensorHandle((one * other + term).astype(np.float32), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma


def _patch_once_a_launch(interpreter: Any) -> None:
    """The interpreter patches triton.language, member by member, also at each call of a function by a kernel; a launch
    needs that once for each module of such functions."""
    patched: set[int] = set()
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None  # which only a launch reads, and that one is the first of its module
        patched.add(module)
        return patch(function)

    def launch_anew(self: Any, *arguments: Any, **named: Any) -> None:
        patched.clear()
        launch(self, *arguments, **named)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _type_tuples_when_asked(core: Any) -> None:
    """Each value makes tuples of sizes; a tuple's type has a name made of all elements, which hardly anybody reads."""
    begin, names = core.tuple.__init__, core._type_for_tuple_values

    def init(self: Any, values: Any, type: Any = None) -> None:
        if type is None:
            self.values, self.__dict__["of_values"] = [*values], None
        else:
            begin(self, values, type)

    def get(self: Any) -> Any:
        if self.__dict__["of_values"] is None:
            self.__dict__["of_values"] = names(self.values)
        return self.__dict__["of_values"]

    def put(self: Any, type: Any) -> None:
        self.__dict__["of_values"] = type

    core.tuple.__init__, core.tuple.type = init, property(get, put)


def _make_tensors_without_shapes(core: Any) -> None:
    """A value's type holds its shape: only values that are asked for shape or numel make them."""

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def sizes(self: Any) -> Any:
        return self.type.shape if self.type.is_block() else ()

    core.tensor.__init__ = init
    core.tensor.shape = property(lambda self: core.tuple([core.constexpr(size) for size in sizes(self)]))
    core.tensor.numel = property(lambda self: core.constexpr(math.prod(sizes(self))))


def _compare_types_by_name(core: Any) -> None:
    equal = core.dtype.__eq__

    def fast(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is core.dtype else equal(self, other)

    core.dtype.__eq__ = fast


class _NumpyTypes:
    """NumPy's type of a Triton type: for scalars, found once."""

    def __init__(self, find: Any) -> None:
        self._find, self._known = find, {}

    def __call__(self, kind: Any) -> Any:
        name = kind.name
        if name not in self._known:
            self._known[name] = self._find(kind)
        return self._known[name]


def _check_overflow(semantic: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """Computes again in 64 bits, by NumPy in place of a dozen interpreted operations."""
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64:
        return
    result = _EXACTLY[operation.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    inside = kind.get_int_min_value() <= result.min() and result.max() <= kind.get_int_max_value()
    assert inside, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"


def _scan(self: Any, values: Any) -> list[Any]:
    """An associative scan along the axis, of all its neighbours at once in place of element by element."""
    inputs = [np.moveaxis(value.handle.data, self.axis, 0) for value in values]
    outputs = [np.empty_like(data) for data in inputs]
    for i in range(len(inputs[0])):
        found: Any = [data[i] for data in inputs]
        if i > 0:
            before = [self.to_tensor(data[i - 1], value.dtype) for data, value in zip(outputs, values, strict=True)]
            here = [self.to_tensor(data, value.dtype) for data, value in zip(found, values, strict=True)]
            combined = self.combine_fn.fn(*before, *here)
            combined = combined if isinstance(combined, tuple) else (combined,)
            found = [value.handle.data for value in combined]
        for data, result in zip(outputs, found, strict=True):
            data[i] = np.reshape(result, data[i].shape)
    moved = [np.moveaxis(data, 0, self.axis) for data in outputs]
    return [self.to_tensor(data, value.dtype) for data, value in zip(moved, values, strict=True)]
