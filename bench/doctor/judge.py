"""The calls of an iteration that are worth a finding, their kind and their line.

On a GPU, CUDA's record decides: a line waited, copied, allocated. Without one, calls are judged by their effect on
tensors on a GPU.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import cuda_calls as cuda
from .cuda_calls import CudaCall
from .frames import Frames, is_torch
from .rank_file import Call, Frame, RankFile

SYNC = "sync"
SYNCHRONIZE = "synchronize"
PRINT = "print"
METRIC = "metric"
FROM_LIST = "tensor_from_list"
H2D = "h2d_copy"
D2H = "d2h_copy"
ALLOCATOR = "allocator"
OPTIMIZER_LOOP = "optimizer_loop"
BURST = "launch_burst"
PROCESS_GROUP = "process_group"
SHAPE = "shape_change"
LOADER = "loader_wait"
HOST_WAIT = "host_wait"
HOST_COMPUTE = "host_compute"
PERIODIC = "periodic_work"
STRAGGLER = "straggler"
KINDS = (
    SYNC,
    SYNCHRONIZE,
    PRINT,
    METRIC,
    FROM_LIST,
    H2D,
    D2H,
    ALLOCATOR,
    OPTIMIZER_LOOP,
    BURST,
    PROCESS_GROUP,
    SHAPE,
    LOADER,
    HOST_WAIT,
    HOST_COMPUTE,
    PERIODIC,
    STRAGGLER,
)
OUTSIDE = (LOADER, HOST_WAIT, HOST_COMPUTE, PERIODIC, STRAGGLER)
"""Kinds without a call of torch: from samples of the stack, and from ranks side by side."""
WAITING = (SYNC, SYNCHRONIZE, PRINT, METRIC, FROM_LIST, H2D)
"""Kinds that stop the host until the GPU has done something, or would."""

REPEATS = 8
"""Number of calls from one stack in an iteration that make a loop of it."""
LAUNCHES = 16
"""Minimum number of such launches per iteration at a line to be a burst: fewer cost less than 0.1 ms."""

_METRICS = re.compile(r"/(torchmetrics|torcheval|sklearn/metrics|torchrec/metrics)/")
_OPTIMIZERS = re.compile(r"/torch/optim/")
_READS = re.compile(
    r"\.(item|tolist|numpy|__array__|__bool__|__int__|__float__|__index__|__contains__|is_nonzero|nonzero|argwhere"
    r"|masked_select|unique|unique_consecutive|_unique2|equal|allclose|cpu)$|^torch\.distributed\..*(barrier|_object(_list)?)$"
)
_PRINTS = re.compile(r"^torch\.Tensor\.(__repr__|__format__|__str__)$")
_COLLECTIVES = re.compile(r"(^|\.)(all_reduce|broadcast|reduce|barrier|(all_gather|reduce_scatter|all_to_all)\w*)$")
_LAUNCHES_NOTHING = re.compile(
    r"\.(view|view_as|reshape|detach|unbind|split|chunk|narrow|select|permute|transpose|t|expand|expand_as|squeeze"
    r"|unsqueeze|flatten|size|dim|numel|stride|data_ptr|is_\w+|element_size|requires_grad_|__len__|__hash__|__iter__"
    r"|record_stream|storage_offset|untyped_storage|item|tolist)$"
)


class Line(NamedTuple):
    """A frame."""

    file: str
    line: int
    function: str
    text: str


class Place(NamedTuple):
    """The identity of a finding, by which calls are joined."""

    kind: str
    user: Line
    """The line of the script, without a file where no line of Python is known."""
    library: tuple[Line, ...]
    """The line that makes the call, and the one that calls its function; empty where it is the user's."""


class Judge:
    """Determines the kinds of calls of one rank."""

    def __init__(self, rank: RankFile) -> None:
        self._rank = rank
        self._gpu = rank["device"] == "cuda"
        self._frames = Frames(rank["libraries"])
        self._metrics = [any(_METRICS.search(frame["file"]) for frame in stack) for stack in rank["stacks"]]
        self._optim = [any(_OPTIMIZERS.search(frame["file"]) for frame in stack) for stack in rank["stacks"]]

    def kind(self, call: Call, below: Sequence[CudaCall]) -> str | None:
        """Returns the kind of finding of a call; None for most."""
        name = call["name"]
        if name.endswith((".new_group", ".init_process_group", ".destroy_process_group")):
            return PROCESS_GROUP
        if name.endswith(".synchronize"):
            return SYNCHRONIZE
        waits = self.waits(call, below)
        if self._metrics[call["stack"]]:
            return METRIC
        if _PRINTS.match(name):
            return PRINT if waits or not self._gpu else None
        if waits:
            if call["about"].get("from_list"):
                return FROM_LIST
            return H2D if self._moves_in(call, below) else SYNC
        if any((c.direction or "").startswith("DtoH") for c in below):
            return D2H
        if self._moves_in(call, below):
            return H2D
        return ALLOCATOR if any(c.kind == cuda.ALLOCATOR for c in below) else None

    def waits(self, call: Call, below: Sequence[CudaCall]) -> bool:
        """Whether the host waited in a call; without a GPU, whether it would."""
        if self._gpu:
            return any(c.kind == cuda.SYNC for c in below)
        if self._optim[call["stack"]]:
            return False  # counters of steps, which optimizers keep on the host
        about = call["about"]
        return bool(_READS.search(call["name"]) or about.get("mask") or about.get("from_list"))

    def _moves_in(self, call: Call, below: Sequence[CudaCall]) -> bool:
        """Whether a call copies pageable memory to the device, or waits for a copy to it.

        Without a GPU, whether it would copy pageable memory to one.
        """
        if self._gpu:
            directions = {c.direction for c in below}
            waits = any(c.kind == cuda.SYNC for c in below)
            return "HtoD pageable" in directions or (waits and "HtoD pinned" in directions)
        about = call["about"]
        if is_torch(self._rank["stacks"][call["stack"]][0]):
            return False  # torch moves what it has made, such as norms of gradients, to where it is
        moves = call["name"] in ("torch.Tensor.to", "torch.Tensor.cuda") and about.get("names_device", False)
        return moves and about.get("pinned") is False

    def connects(self, call: Call, below: Sequence[CudaCall]) -> bool:
        """Whether a call is a collective that waits or allocates: NCCL connects a new group in its first one."""
        slow = any(c.kind in (cuda.SYNC, cuda.ALLOCATOR) for c in below)
        return self._gpu and slow and _COLLECTIVES.search(call["name"]) is not None

    def place(self, kind: str, call: Call) -> Place:
        """Returns the lines of a call; for a library's work in many lines, its function alone."""
        stack = self._rank["stacks"][call["stack"]]
        user, library = self._frames.user(stack), self._frames.library(stack)
        if kind == PRINT:
            library = []
        elif kind in (METRIC, OPTIMIZER_LOOP):
            # The function entered first names the metric; for an optimizer's, the last one.
            own = _METRICS if kind == METRIC else _OPTIMIZERS
            named = [frame for frame in stack if own.search(frame["file"])]
            return Place(kind, line_of(user), (function_of(named[-1] if kind == METRIC else named[0]),))
        return Place(kind, line_of(user), tuple(line_of(frame) for frame in library))

    def line_in_metric(self, call: Call) -> Line:
        """The line of the metric's library that makes a call."""
        stack = self._rank["stacks"][call["stack"]]
        return line_of(next(frame for frame in stack if _METRICS.search(frame["file"])))

    def bursts(self, below: dict[int, list[CudaCall]]) -> Iterator[tuple[str, int, list[CudaCall]]]:
        """Yields numbers of calls of loops in Python, each with its launches: many small launches from one place."""
        repeats: Counter[tuple[int, int]] = Counter()
        launching = []
        for number, call in enumerate(self._rank["calls"]):
            stack = self._rank["stacks"][call["stack"]]
            launches = [c for c in below[number] if c.kind == cuda.LAUNCH]
            does = bool(launches) if self._gpu else _launches(call)
            # Modules in a row are different work, and no loop over data.
            if does and not any(frame["file"].endswith("torch/nn/modules/container.py") for frame in stack):
                repeats[call["iteration"], call["stack"]] += 1
                launching.append((number, call, launches))
        grouped: defaultdict[tuple[str, Place], list[tuple[int, list[CudaCall]]]] = defaultdict(list)
        for number, call, launches in launching:
            if repeats[call["iteration"], call["stack"]] >= REPEATS and not self._metrics[call["stack"]]:
                kind = OPTIMIZER_LOOP if self._optim[call["stack"]] else BURST
                grouped[kind, self.place(kind, call)].append((number, launches))
        for (kind, _), calls in grouped.items():
            if sum(max(1, len(launches)) for _, launches in calls) >= LAUNCHES * self._rank["marked"]["iterations"]:
                yield from ((kind, number, launches) for number, launches in calls)

    def first_change(self) -> Call | None:
        """The first call of an iteration whose result has another shape in another one: where it comes from."""
        shapes: defaultdict[tuple[int, str, int], dict[int, tuple[list[int], Call]]] = defaultdict(dict)
        counted: Counter[tuple[int, int, str]] = Counter()
        for call in self._rank["calls"]:
            if "shape" in call["about"]:
                site = (call["iteration"], call["stack"], call["name"])
                counted[site] += 1
                where = (call["stack"], call["name"], counted[site])
                shapes[where][call["iteration"]] = (call["about"]["shape"], call)
        n = self._rank["marked"]["iterations"]
        changing = [
            seen[0][1]
            for seen in shapes.values()
            if len(seen) == n and any(shape != seen[0][0] for shape, _ in seen.values())
        ]
        return min(changing, key=lambda call: call["start_us"], default=None)


def _launches(call: Call) -> bool:
    """Whether a call would launch something on a GPU: views do not."""
    if call["name"].endswith(".__getitem__"):
        return call["about"].get("gathers", False)
    return not _LAUNCHES_NOTHING.search(call["name"])


def function_of(frame: Frame) -> Line:
    """The frame's function, whichever line of it."""
    return Line(frame["file"], 0, frame["function"], "")


def line_of(frame: Frame) -> Line:
    """The frame as a value that can be a key."""
    return Line(frame["file"], frame["line"], frame["function"], frame["text"])
