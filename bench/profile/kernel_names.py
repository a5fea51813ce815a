"""Readable names of GPU kernels, and their stages if no range around a launch gives one.

All kernels of a CUDA graph's replay have one launch. Most names belong to one stage. Sorts, regrouping and all-to-alls
belong to several: their stage follows from the order of the replay as far as the stages' dependencies determine it, and
is OTHER otherwise.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dlrm_bench.bench.doctor import trace
from dlrm_bench.bench.doctor.trace import BARRIER
from dlrm_bench.kernels import stages
from dlrm_bench.kernels.stages import KERNELS

STAGES = stages.STAGES
OTHER = trace.OTHER

_INPUT, _LOOKUP, _DENSE, _BACKWARD, _UPDATE = STAGES

# Names in traces of earlier versions, whose functions have been renamed.
_FORMER_NAMES = {
    "_fetch": "_fetch_next_kernel",
    "_copy_pieces": "_gather_segments_kernel",
    "_push_pieces": "_push_segments_kernel",
    "_copy_runs": "_regroup_kernel",
    "_forward": "_cross_forward_kernel",
    "_backward": "_cross_backward_kernel",
    "_sum_rows": "_column_sums_kernel",
    "_bce": "_logit_loss_backward_kernel",
    "_sum_partials": "_add_up_kernel",
    "_sum_tiles": "_row_sums_kernel",
    "_update_chunks": "_sorted_adagrad_kernel",
    "_merge_runs": "_sorted_adagrad_merge_kernel",
    "_update": "_flat_adagrad_kernel",
    "_update_slice": "_sharded_adagrad_kernel",
    "_lookup": "_pooled_lookup_kernel",
    "_push_runs": "_push_columns_kernel",
}
# A former name of two kernels, of one stage.
_SHARED_NAMES = {"_backward": "cross or mlp"}

GEMM = "GEMM"
"""First word of the names of all matrix products."""
_LOSS = re.compile(r"^_logit_loss_backward_kernel$|cross_entropy")
_SORT = re.compile(r"RadixSort|linearize_index|DeviceRle|RunLength|DeviceCompactInit|DeviceScan|DeviceReduceByKey")
_ALL_TO_ALL = re.compile(r"SendRecv|all_?to_?all", re.I)
_TABLE_UPDATE = re.compile(r"^(_sorted_adagrad_kernel|sorted_adagrad)$|embedding\w*_(backward|grad)")
_TABLE_LOOKUP = re.compile(r"^_pooled_lookup_kernel$|embedding\w*_forward")
_BEFORE_BARRIERS = ("_push_segments_kernel", "_pooled_lookup_kernel", "_push_columns_kernel", "_push_to_ranks_kernel")
"""Kernels that write to other ranks' memory, after which a barrier publishes the writes. The last one is the drop-in's,
of ids, pooled vectors and gradients, and has no stage of its own."""
_BEFORE_ALL_TO_ALLS = (
    "_rest_of_lists_kernel",
    "_gather_rows_kernel",
    "_distinct_sums_kernel",
    "_distinct_sums_merge_kernel",
)
"""Kernels of unpooled rows that write a send buffer. No kernel of the loss tells forward from backward there."""


# The results of _functor and the families below; a demangled C++ name has no blank before its parameters.
_SHORT = re.compile(r"[\w, ]+ \([\w, ]+\)")


class _Family(NamedTuple):
    pattern: re.Pattern[str]
    name: str | Callable[[str], str]
    stage: str | None
    """None if several stages have such kernels."""


def _identifier(name: str) -> str:
    """Returns b of `void a::(anonymous namespace)::b<c>(d)`."""
    return (
        re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""))[0].split("::")[-1] or name
    )


def _functor(name: str) -> str:
    """Returns the identifier and, for PyTorch's generic kernels, their operation."""
    found = re.search(r"[<:, ](?:\w+::)*(\w*Functor\w*|\w+_kernel_(?:cuda|impl)\w*|\w+Op)\b", name)
    identifier = _identifier(name)
    return identifier if found is None or found[1] == identifier else f"{identifier} ({found[1]})"


def _nccl(name: str) -> str:
    return "NCCL " + re.sub(r"^nccl\w*?Kernel_|[(<].*", "", name)


def _fbgemm(name: str) -> str:
    return re.sub(r"_(codegen|unweighted|kernel)(?=_|$)", "", _identifier(name))


# The first match counts. FBGEMM's namespace must not match as a GEMM.
_FAMILIES = (
    _Family(re.compile(r"^Memcpy HtoD"), str, _INPUT),
    _Family(re.compile(r"^Mem(cpy|set)"), str, None),
    _Family(re.compile(r"^nccl\w*Kernel_.*(SendRecv|AllToAll)", re.I), _nccl, None),
    _Family(re.compile(r"^nccl\w*Kernel_(AllReduce|ReduceScatter)"), _nccl, _DENSE),
    _Family(re.compile(r"^nccl\w*Kernel_AllGather"), _nccl, _UPDATE),  # weights of which each rank updated a part
    _Family(re.compile(r"^nccl\w*Kernel_"), _nccl, None),
    _Family(BARRIER, "peer memory: barrier", None),
    _Family(re.compile(r"RadixSort"), "radix sort", None),
    _Family(_SORT, _identifier, None),
    _Family(_TABLE_UPDATE, _fbgemm, _BACKWARD),
    _Family(_TABLE_LOOKUP, _fbgemm, _LOOKUP),
    _Family(re.compile(r"permute_(1|2)D|bucketize|jagged_index_select", re.I), _fbgemm, _INPUT),
    _Family(re.compile(r"nvjet"), f"{GEMM} (nvjet)", _DENSE),
    _Family(re.compile(r"cutlass.*align1(?!\d)"), f"{GEMM} (cutlass, unaligned)", _DENSE),
    _Family(re.compile(r"cutlass"), f"{GEMM} (cutlass)", _DENSE),
    _Family(
        re.compile(r"splitK_?reduce|(?<!fb)gemm|gemv|cublas|^void dot_kernel|reduce_1Block", re.I),
        f"{GEMM} (cublas)",
        _DENSE,
    ),
    _Family(re.compile(r"multi_tensor|adagrad", re.I), _functor, _UPDATE),
    _Family(re.compile(r"relu|cross_entropy", re.I), _functor, _DENSE),
)


def short_kernel_name(name: str) -> str:
    """Returns `name` without templates, parameters and namespaces; kernels of one library's matrix products share one
    name.

    A short name stays as it is: records hold names that were shortened by the rules of their time.
    """
    if _SHORT.fullmatch(name):
        return name
    own = KERNELS.get(_current(name))
    if own is not None:
        return f"{_SHARED_NAMES.get(name, own[0])}: {name}"
    family = _family(name)
    if family is None:
        return _functor(name)
    return family.name if isinstance(family.name, str) else family.name(name)


def _current(name: str) -> str:
    return _FORMER_NAMES.get(name, name)


def stage_of_name(name: str) -> str:
    """Returns the stage of all kernels of this name; OTHER if there is none."""
    own = KERNELS.get(_current(name))
    if own is not None:
        return own[1] or OTHER
    family = _family(name)
    return (family.stage if family else None) or OTHER


def stages_of_replay(events: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the stage of each event of one replay of an iteration's graph; events have name, ts, dur and tid (the
    stream).

    Facts used: events before the loss are forward and events after it are backward, except for the next batch's input
    dist, which may be anywhere; an all-to-all runs after its send buffer is written and before its receive buffer is
    read.
    """
    events = [{**event, "name": _current(event["name"])} for event in events]
    order = _Order(events)
    return [order.stage(event) for event in events]


class _Order:
    """Times in one replay of the kernels that others depend on."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self._events = sorted(events, key=lambda event: event["ts"])
        loss = self._times(_LOSS)
        self._loss = (loss[0][0], max(end for _, end in loss)) if loss else None
        lookups, updates = self._times(_TABLE_LOOKUP), self._times(_TABLE_UPDATE)
        names = {event["name"] for event in events}
        self._presorts, self._replicates = (
            bool({"_sorted_adagrad_kernel", "sorted_adagrad"} & names),
            "_row_sums_kernel" in names,
        )
        self._updates = bool(updates)
        # The only all-to-alls within these are that of the pooled vectors, and that of their gradients.
        self._within = {}
        if self._loss and lookups:
            self._within[_LOOKUP] = (min(end for _, end in lookups), self._loss[0])
        if self._loss and updates:
            self._within[_BACKWARD] = (self._loss[1], updates[0][0])

    def stage(self, event: dict[str, Any]) -> str:
        name = event["name"]
        if name == "_regroup_kernel" and self._loss:
            return _LOOKUP if event["ts"] < self._loss[0] else _BACKWARD
        if _SORT.search(name):
            return self._stage_of_sort(event)
        if _ALL_TO_ALL.search(name):
            return self._stage_of_all_to_all(event)
        if BARRIER.search(name):
            return self._stage_of_barrier(event)
        return stage_of_name(name)

    def _stage_of_barrier(self, event: dict[str, Any]) -> str:
        """Returns the stage of a barrier. There is one before and after each dense update, and one after ids, pooled
        vectors and their gradients."""
        stream = [other for other in self._events if other["tid"] == event["tid"]]
        at = stream.index(event)
        if "_sharded_adagrad_kernel" in (other["name"] for other in stream[max(at - 1, 0) : at + 2]):
            return _UPDATE
        if at > 0 and stream[at - 1]["name"] in _BEFORE_BARRIERS:
            return stage_of_name(stream[at - 1]["name"])
        if self._loss is None:
            return OTHER
        return _LOOKUP if event["ts"] < self._loss[0] else _BACKWARD

    def _stage_of_sort(self, event: dict[str, Any]) -> str:
        if self._presorts or (self._replicates and self._loss and event["ts"] < self._loss[1]):
            return _INPUT
        # FBGEMM's backward has its own sort; replicated tables sort in the input dist.
        return _BACKWARD if self._updates and not self._replicates else OTHER

    def _stage_of_all_to_all(self, event: dict[str, Any]) -> str:
        before = [other for other in self._events if other["tid"] == event["tid"] and _end(other) <= event["ts"]]
        sender = before[-1]["name"] if before else ""
        if sender in _BEFORE_ALL_TO_ALLS:
            return stage_of_name(sender)
        possible = [stage for stage, span in self._within.items() if _inside(event, span)]
        for stage in possible:
            if sum(_inside(other, self._within[stage]) for other in self._all_to_alls()) == 1:
                return stage
        if not possible:
            return _INPUT if len(self._within) == 2 else OTHER
        if sender == "_gather_segments_kernel":
            return _INPUT
        sends = {_LOOKUP: bool(_TABLE_LOOKUP.search(sender)), _BACKWARD: sender == "_regroup_kernel"}
        return next((stage for stage in possible if sends[stage]), OTHER)

    def _all_to_alls(self) -> list[dict[str, Any]]:
        return [event for event in self._events if _ALL_TO_ALL.search(event["name"])]

    def _times(self, pattern: re.Pattern[str]) -> list[tuple[float, float]]:
        return [(event["ts"], _end(event)) for event in self._events if pattern.search(event["name"])]


def _inside(event: dict[str, Any], span: tuple[float, float]) -> bool:
    return span[0] <= event["ts"] and _end(event) <= span[1]


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def _family(name: str) -> _Family | None:
    return next((family for family in _FAMILIES if family.pattern.search(name)), None)
