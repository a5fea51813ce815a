"""Remedies for findings, and the predicted time of an iteration with each, as far as the measured parts can say."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict

from . import judge
from .findings import Finding
from .judge import Place
from .parts import Parts

_SUGGESTIONS = {
    judge.SYNC: "keep the value on the device, or read it every few hundred iterations, or a batch later from pinned "
    "memory with an event",
    judge.SYNCHRONIZE: "leave it out: the stream keeps the order, and a timer needs events (torch.cuda.Event)",
    judge.PRINT: "print every few hundred iterations: a printed tensor is copied to the host and waited for",
    judge.METRIC: "update the metric every few hundred iterations, or collect predictions on the device and compute it "
    "at the evaluation",
    judge.FROM_LIST: "make the tensor once and keep it, or fill pinned memory and copy it with non_blocking=True: each "
    "such call is a blocking copy from pageable memory",
    judge.H2D: "read batches into pinned memory (DataLoader(pin_memory=True), Tensor.pin_memory()) and copy them "
    "with non_blocking=True",
    judge.D2H: "do without the copy, or make it every few hundred iterations",
    judge.ALLOCATOR: "keep shapes constant, so that the caching allocator finds its blocks again; see "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    judge.OPTIMIZER_LOOP: "give the optimizer fused=True or foreach=True: it updates all parameters with a few "
    "launches instead of several for each",
    judge.BURST: "do it for all elements with one call on the whole tensor, instead of a loop in Python",
    judge.PROCESS_GROUP: "make process groups once, before the loop: each is a rendezvous of all ranks, and NCCL "
    "connects anew",
    judge.SHAPE: "give batches one shape (drop_last=True, padding): changing shapes keep CUDA graphs out, have "
    "torch.compile compile again, and the allocator search",
    judge.LOADER: "the loop waits for its loader: more workers, a larger prefetch_factor, or less work for each "
    "sample; with num_workers=0 the loop's own thread reads each batch",
    judge.HOST_WAIT: "the loop's thread stands still here, outside of torch: read files, sleep and take locks on "
    "another thread, a batch ahead",
    judge.HOST_COMPUTE: "the loop's thread computes here in Python, outside of torch: do it once, on another process a "
    "batch ahead, or with one call on a whole tensor",
    judge.PERIODIC: "do it more rarely, on a side stream, or in another process from a copy; what it computes of "
    "tensors can stay on the device",
    judge.STRAGGLER: "all ranks wait for this one: give it the work, the data and the machine that the others have",
}
_DEVICE_METRICS = (
    "TorchRec's metrics read values back at each update: DeviceRecMetrics (pipeline/device_metrics) gives the same "
    "values under the same keys, without a wait, in the place of RecMetricModule"
)
_TORCHREC_SUGGESTIONS = {
    judge.SYNC: "TorchRec reads sizes that it needs on the host here: with bags of fixed sizes a trimmed input dist "
    "does without, otherwise read them through pinned memory (pipeline/five_stage: TrimmedEBCSharder, pinned_d2h)",
    judge.FROM_LIST: "TorchRec makes this tensor from a list for each batch: with bags of fixed sizes a trimmed "
    "input dist does without (pipeline/five_stage: TrimmedEBCSharder)",
    judge.SHAPE: "how many ids a rank gets of a table that is split by rows changes with the batch: plan tables "
    "table-wise or column-wise (ParameterConstraints) where shapes have to stay",
}


_REC_METRICS = "torchrec/metrics/"
_SPLITS = "five_stage/splits_exchange.py"
"""The file in which the five-stage pipeline reads the sizes of TorchRec's own input dist."""
_SPLITS_SUGGESTION = (
    "sizes that the host needs to exchange ids: with bags of fixed sizes a trimmed input dist does without "
    "(pipeline/five_stage: TrimmedEBCSharder)"
)
Part = Literal["dense_ms", "input_dist_ms", "record_streams_ms", "stages_ms"]


class Prediction(TypedDict):
    """The time and the findings that a change would take away."""

    remedy: str
    findings: list[int]
    """Their numbers, from 1."""
    parts: list[str]
    """Parts of the iteration that it takes away, which hold some of the findings."""
    removes_ms: float
    """Host time in them, an iteration."""
    removes_low_ms: float
    """Ends of its interval of 95 %: those of the findings together. Parts are taken as they were measured."""
    removes_high_ms: float
    at_best_ms: float
    """The iteration without that time; the GPU's own work is a floor of it."""
    caution: str
    keeps_out: list[str]
    """Changes that are needed first, as far as the examination shows them."""


class Remedy(NamedTuple):
    """A change, the findings and the part of an iteration that it takes away, and its conditions."""

    name: str
    removes: Callable[[Finding], bool]
    caution: str
    parts: tuple[Part, ...] = ()
    """Parts that the change takes away; findings within a measured part are not counted again."""
    graphs: bool = False
    """Whether it replays the dense network."""
    trims: bool = False
    """Whether it takes away the input dist's reads, and its tensors made of lists."""
    anywhere: bool = False
    """Whether it is for scripts without TorchRec too."""


def suggestion(place: Place) -> str:
    """Returns the remedy for findings at a place."""
    library = place.library[0].file if place.library else ""
    if _REC_METRICS in library:
        return _DEVICE_METRICS
    if "/torchrec/" in library and place.kind in _TORCHREC_SUGGESTIONS:
        return _TORCHREC_SUGGESTIONS[place.kind]
    return _SPLITS_SUGGESTION if library.endswith(_SPLITS) else _SUGGESTIONS[place.kind]


def _of_torchrec(finding: Finding) -> bool:
    return finding["library"] is not None and finding["library"]["file"].startswith("torchrec/")


def in_input_dist(finding: Finding) -> bool:
    """Whether an untrimmed input dist causes the finding: a read of sizes, or a list that becomes a tensor."""
    exchanged = finding["library"] is not None and finding["library"]["file"].endswith(_SPLITS)
    return exchanged or (_of_torchrec(finding) and finding["kind"] in (judge.SYNC, judge.FROM_LIST))


def _own(finding: Finding) -> bool:
    library = finding["library"]
    if finding["kind"] in judge.OUTSIDE:
        return finding["kind"] in (judge.HOST_WAIT, judge.HOST_COMPUTE, judge.PERIODIC)
    outside = library is None or re.match(r"torch(metrics|eval)?/", library["file"]) is not None
    return finding["file"] is not None and outside and finding["kind"] not in (judge.SHAPE, judge.H2D)


WHOLE_ITERATION = "five-stage pipeline: cuda_graph='iteration'"
IN_DENSE = (judge.OPTIMIZER_LOOP,)
"""Kinds of findings that are within the dense network's part."""
PART_NAMES: dict[Part, str] = {
    "dense_ms": "host time of the dense network",
    "input_dist_ms": "host time of the input dist",
    "record_streams_ms": "calls of record_stream",
    "stages_ms": "host time of all five stages",
}
REMEDIES = (
    Remedy(
        "the script's own lines changed as suggested",
        _own,
        "a wait that is left out may be met at the next one, if the GPU is behind",
        anywhere=True,
    ),
    Remedy(
        "a loader that keeps up with the loop",
        lambda finding: finding["kind"] == judge.LOADER,
        "taking a batch out of a queue takes some time too",
        anywhere=True,
    ),
    Remedy(
        "the straggler as fast as the rank next to it",
        lambda finding: finding["kind"] == judge.STRAGGLER,
        "measured under the profiler",
        anywhere=True,
    ),
    Remedy(
        "DeviceRecMetrics in the place of RecMetricModule (pipeline/device_metrics)",
        lambda finding: (
            finding["kind"] == judge.METRIC
            and finding["library"] is not None
            and finding["library"]["file"].startswith(_REC_METRICS)
        ),
        "its own update is not counted: 20 us of the host for one task and 38 for twenty on an H200",
        anywhere=True,
    ),
    Remedy(
        "batches in pinned memory, with TorchRec's pipelines inplace_copy_batch_to_gpu=True",
        lambda finding: finding["kind"] == judge.H2D,
        "the copy itself stays, beside other work",
        anywhere=True,
    ),
    Remedy(
        "five-stage pipeline: pinned_d2h",
        lambda finding: _of_torchrec(finding) and finding["kind"] in (judge.SYNC, judge.D2H),
        "values are still waited for where they are needed, later",
    ),
    Remedy(
        "five-stage pipeline: trimmed input dist (TrimmedEBCSharder)",
        in_input_dist,
        "only for bags of fixed sizes and tables that are not split by rows; its own work, a gather and an exchange of "
        "ids, is not counted",
        ("input_dist_ms",),
        trims=True,
    ),
    Remedy(
        "five-stage pipeline: cuda_graph='dense'",
        lambda finding: finding["kind"] in IN_DENSE,
        "the replays' own time is not counted, and only the step of Adam, AdamW, SGD, Adagrad or an optimizer with "
        "`capturable` is replayed",
        ("dense_ms",),
        graphs=True,
    ),
    Remedy(
        "five-stage pipeline: trimmed input dist and cuda_graph='dense' together",
        lambda finding: finding["kind"] in IN_DENSE or in_input_dist(finding),
        "as for each of them: bags of fixed sizes",
        ("dense_ms", "input_dist_ms"),
        graphs=True,
        trims=True,
    ),
    Remedy(
        WHOLE_ITERATION,
        lambda finding: False,
        "its launch, the copies of a batch and lines of the script's own within the model are not counted",
        ("stages_ms",),
    ),
    Remedy(
        "five-stage pipeline: launch_threads=2",
        lambda finding: False,
        "both threads need the interpreter lock, so that most of it may come back as waiting for the lock",
        ("input_dist_ms",),
    ),
    Remedy(
        "five-stage pipeline: avoid_record_streams",
        lambda finding: False,
        "TorchRec's calls of record_stream are meant; the script's other calls are measured with them",
        ("record_streams_ms",),
    ),
)
UNKNOWN = (
    "remedies overlap: their gains add up only where a line says 'together'.",
    "launches outside of loops are in no finding; dense network and input dist of TorchRec's pipelines are measured "
    "as wholes.",
)
_SHAPES = "shapes change from batch to batch: such batches run without the graph"
_LEAST_MS = 0.01
"""Parts below this are left out."""


def predict(
    findings: Sequence[Finding],
    iteration_ms: float,
    parts: Parts,
    *,
    graphs: bool,
    pipelined: bool,
    keeps_out: Sequence[str] = (),
) -> list[Prediction]:
    """Returns the predicted gain of each remedy, the largest first.

    graphs: whether the script replays CUDA graphs already. pipelined: whether a TorchRec pipeline, or one in its place,
    runs the iterations; without one, and without a finding in TorchRec, the five-stage pipeline has no place there.
    keeps_out: what is in the way of a graph of the whole iteration.
    """
    for_torchrec = pipelined or any(map(_of_torchrec, findings))
    shape_changes = any(finding["kind"] == judge.SHAPE for finding in findings)
    predictions = []
    for remedy in REMEDIES:
        numbers = [number for number, finding in enumerate(findings, start=1) if remedy.removes(finding)]
        measured = [part for part in remedy.parts if parts[part] >= _LEAST_MS]
        if (not numbers and not measured) or not (for_torchrec or remedy.anywhere):
            continue
        if (remedy.graphs and graphs) or (remedy.trims and not any(map(in_input_dist, findings))):
            continue  # the script has it already
        taken, wholes = [findings[number - 1] for number in numbers], {part: parts[part] for part in measured}
        removes = without_twice(taken, wholes)
        caution = remedy.caution
        if "fixed sizes" in caution and shape_changes:
            caution += "; shapes change in this script, so it may not apply"
        predictions.append(
            Prediction(
                remedy=remedy.name,
                findings=numbers,
                parts=[PART_NAMES[part] for part in measured],
                removes_ms=removes,
                removes_low_ms=without_twice([_at_end(finding, "low_ms") for finding in taken], wholes),
                removes_high_ms=without_twice([_at_end(finding, "high_ms") for finding in taken], wholes),
                at_best_ms=max(iteration_ms - removes, parts["gpu_ms"]),
                caution=caution,
                keeps_out=[*keeps_out, *([_SHAPES] * shape_changes)] if remedy.name == WHOLE_ITERATION else [],
            )
        )
    return sorted(predictions, key=lambda prediction: -prediction["removes_ms"])


def _at_end(finding: Finding, end: Literal["low_ms", "high_ms"]) -> Finding:
    """The finding at an end of its interval; as it is, where it has none."""
    return finding if finding[end] is None else {**finding, "ms": finding[end]}


def without_twice(findings: Sequence[Finding], parts: Mapping[Part, float]) -> float:
    """Milliseconds of the parts, and of the findings that are within none of them."""

    def within(finding: Finding) -> bool:
        dense, dist = "dense_ms" in parts, "input_dist_ms" in parts
        return (dense and finding["kind"] in IN_DENSE) or (dist and in_input_dist(finding))

    return sum(parts.values()) + sum(finding["ms"] or 0.0 for finding in findings if not within(finding))
