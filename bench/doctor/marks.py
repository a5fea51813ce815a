"""The Python line of each call of torch: every call of a few iterations, with its stack.

Torch's override protocol (torch.overrides) reports each call of its Python API, operators, item() and custom ops
included, without a change of what runs. Each call is within a range of the profiler, MARK and its number in the list of
calls: the CUDA calls below it in the trace are those of its line. Calls that the protocol leaves out are wrapped by
hook.py.
"""

import dis
import linecache
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch._C._profiler import _RecordFunctionFast
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode, resolve_name

from .process_state import recorded, state
from .rank_file import MARK, About, Call, Frame

_OWN = str(Path(__file__).parent)  # as the names of its files are in frames
_OVERRIDES = torch.overrides.__file__
_SILENT = ("profiler.", "torch.autograd.profiler", "_set_grad_enabled", "torch.Tensor.register_hook")
_MOVES = frozenset(f"torch.Tensor.{name}" for name in ("to", "cuda", "cpu", "copy_", "pin_memory"))
_FROM_DATA = frozenset(("torch.tensor", "torch.as_tensor", "torch.Tensor.new_tensor", "torch.asarray"))
# For a script under torch.compile: a torch function mode would recompile every compiled function.
_READS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "to",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__repr__",
)


class SeenStacks:
    """Numbers of the stacks that were seen, each once."""

    def __init__(self) -> None:
        self.places: list[list[tuple[str, int, str]]] = []
        """(file, line, function) of each stack's frames, the innermost first."""
        self.operators: list[int] = []
        """Numbers of the stacks whose innermost frame is at an operator, such as `a @ b`, `x[i]` or `if t:`."""
        self._numbers: dict[tuple[CodeType | int, ...], int] = {}

    def number(self, frames: Sequence[FrameType]) -> int:
        """Returns the number of a stack in `places`."""
        key = tuple(part for frame in frames for part in (frame.f_code, frame.f_lasti))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.places)
            # A frame that has just ended has no line any more.
            self.places.append([(f.f_code.co_filename, f.f_lineno or 0, f.f_code.co_qualname) for f in frames])
            if frames and not _calls(frames[0]):
                self.operators.append(number)
        return number


def _calls(frame: FrameType) -> bool:
    """Whether the frame's instruction is a call, and no operator."""
    return "CALL" in dis.opname[frame.f_code.co_code[frame.f_lasti]]


def with_text(place: tuple[str, int, str]) -> Frame:
    """Returns a frame with its line of text, which it reads from the file."""
    file, line, function = place
    return Frame(file=file, line=line, function=function, text=linecache.getline(file, line).strip())


class Marks:
    """The calls of torch from switch_on() to switch_off(), by iteration and stack."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.iteration = -1
        """The present iteration of calls; those of a negative one are not kept."""
        self.own_us = 0.0
        """Time that the marks themselves took, in all iterations that are kept."""
        self.reduced = compiles()
        """Whether only reads of values are marked, because the script compiles functions."""
        self._stacks = SeenStacks()
        self._names: dict[Any, str | None] = {}
        self._mode = _Mode(self)
        self._thread = threading.get_ident()
        self._backward: list[FrameType] = []
        self._backward_call: int | None = None
        self._replaced: list[str] = []
        self._inside = _Inside()
        self._nested_us: defaultdict[int, float] = defaultdict(float)
        """Time that marks within a call took, by its number, while it runs."""
        self._numbering = threading.Lock()  # autograd's thread and others make calls too

    @property
    def stacks(self) -> list[list[Frame]]:
        """Frames of each stack, the innermost first. Reads their lines: the loop does not wait for files."""
        return [[with_text(place) for place in places] for places in self._stacks.places]

    @property
    def operators(self) -> list[int]:
        """Numbers of the stacks whose call an operator makes."""
        return self._stacks.operators

    def switch_on(self) -> None:
        """Marks calls from now on, on this thread and on those of autograd's engine that work for it."""
        state.marker = self.marked
        if self.reduced:
            for name in _READS:
                self._replaced += [name] if name not in vars(Tensor) else []
                setattr(Tensor, name, recorded(f"torch.Tensor.{name}", getattr(Tensor, name)))
            return
        # At the bottom of the stack of modes: the script may leave one of its own before this one is switched off.
        others = _popped_modes()
        _push_mode(self._mode)
        for mode in others:
            _push_mode(mode)
        state.around_backward = self._around_backward

    def switch_off(self) -> None:
        """Removes all marks and changes."""
        state.marker = state.around_backward = None
        if self.reduced:
            for name in _READS:
                original = getattr(Tensor, name).__wrapped__
                if name in self._replaced:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, original)
            return
        for mode in [mode for mode in _popped_modes() if mode is not self._mode]:
            _push_mode(mode)

    def of_torch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch's API."""
        name = self._name(function)
        return function(*args, **kwargs) if name is None else self.marked(name, function, args, kwargs)

    def marked(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function within a range, and keeps the call."""
        if self.iteration < 0 or (self.reduced and self._inside.call is not None):
            return function(*args, **kwargs)
        begin = time.perf_counter()
        # A mode is off within a call of torch's API, but not within functions that hook.py wraps, and autograd's thread
        # works for a call of the loop's.
        outer = self._inside.call if self._main() or self._inside.call is not None else self._backward_call
        about = _about_arguments(name, args, kwargs)
        call = Call(
            iteration=self.iteration,
            name=name,
            stack=self._stack(),
            start_us=0.0,
            us=0.0,
            within=outer,
            about=about,
            main=self._main(),
        )
        with self._numbering:
            number = len(self.calls)
            self.calls.append(call)
        with _RecordFunctionFast(f"{MARK}{number}"):
            before, self._inside.call = self._inside.call, number
            call["start_us"] = time.perf_counter() * 1e6
            try:
                result = function(*args, **kwargs)
            finally:
                us = time.perf_counter() * 1e6 - call["start_us"]
                nested_us = self._nested_us.pop(number, 0.0)
                call["us"] = us - nested_us
                self._inside.call = before
        if isinstance(result, Tensor):
            about["shape"] = list(result.shape)
        own_us = (time.perf_counter() - begin) * 1e6 - us
        self.own_us += own_us
        if outer is not None:
            self._nested_us[outer] += nested_us + own_us
        return result

    def _name(self, function: Callable[..., Any]) -> str | None:
        """Returns the name of a function that is worth a mark, else None: getters of attributes, such as grad, launch
        nothing."""
        if function not in self._names:
            name = resolve_name(function) or getattr(function, "__name__", repr(function))
            self._names[function] = (
                None if name.endswith((".__get__", ".__set__")) or name.startswith(_SILENT) else name
            )
        return self._names[function]

    def _main(self) -> bool:
        return threading.get_ident() == self._thread

    def _stack(self) -> int:
        """The number of the stack of the caller, without the doctor's frames and torch's dispatch of overrides."""
        frames = list(walk(sys._getframe(2)))
        if not self._main():
            frames += self._backward  # autograd's own thread begins where backward() was called
        return self._stacks.number(frames)

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        """backward() is itself a call of the API, in which the mode is off: it is on again for what autograd calls."""
        before = self._backward, self._backward_call
        self._backward, self._backward_call = list(walk(sys._getframe(2))), self._inside.call
        try:
            with self._mode:
                yield
        finally:
            self._backward, self._backward_call = before


class _Inside(threading.local):
    """Number of the innermost marked call that this thread runs."""

    call: int | None = None


class _Mode(TorchFunctionMode):
    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._marks.of_torch(func, args, kwargs or {})


def compiles() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def _popped_modes() -> list[Any]:
    """All modes of this thread, which are off now; the outermost first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]


def walk(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and its callers, without the doctor's own and those of torch's dispatch of overrides."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file != _OVERRIDES and not file.startswith(_OWN) and not file.endswith("contextlib.py"):
            yield frame
        frame = frame.f_back


def _tensor_in(values: Any) -> Tensor | None:
    """The first tensor of the arguments, also within a list of them."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return value[0]
    return None


def _about_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> About:
    about = About()
    tensor = _tensor_in(args)
    if name == "torch.Tensor.copy_" and len(args) > 1 and isinstance(args[1], Tensor):
        tensor = args[1]  # the source
    if tensor is not None and name in _MOVES and tensor.device.type == "cpu":
        about["pinned"] = tensor.is_pinned()
        about["names_device"] = any(isinstance(value, torch.device | str) for value in (*args, *kwargs.values()))
    if name == "torch.Tensor.__getitem__":
        indices = args[1] if isinstance(args[1], tuple) else args[1:]
        about["gathers"] = any(isinstance(index, Tensor | list) for index in indices)
        about["mask"] = any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)
    if name in _FROM_DATA:
        about["from_list"] = not any(isinstance(value, Tensor) for value in args)
    return about
