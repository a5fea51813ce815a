"""A diagnosis as a short text."""

import shlex
from collections.abc import Iterator

from .baseline import Change, Comparison
from .diagnosis import Diagnosis
from .findings import Finding
from .judge import OUTSIDE
from .rank_file import Frame

SHOWN = 12
"""Findings in the text; JSON and page hold all."""
COLUMNS = (
    "rank",
    "ms",
    "median",
    "CPU",
    "loop",
    "launches",
    "graphs",
    "syncs",
    "H2D page",
    "H2D pin",
    "D2H",
    "alloc",
    "GIL",
    "GPU ms",
    "idle",
)


def heading(diagnosis: Diagnosis) -> str:
    """Returns the command that was examined, and the time of an iteration."""
    found = {
        "mark": "marks of the script",
        "progress": "the pipeline's progress()",
        "optimizer": "the optimizer's step",
    }
    versions = ", ".join(f"{name} {version}" for name, version in diagnosis["versions"].items())
    return (
        f"{shlex.join(diagnosis['command'])}\n"
        f"{len(diagnosis['ranks'])} rank(s), {diagnosis['gpu'] or 'CPU'}, {versions}\n"
        f"{diagnosis['iteration_ms']:.3f} ms an iteration (slowest rank, mean of {diagnosis['iterations']}; iterations "
        f"found by {found[diagnosis['found_by']]})"
    )


def overhead(diagnosis: Diagnosis) -> str:
    """Returns the cost of the doctor itself."""
    o = diagnosis["overhead"]
    return (
        f"the doctor's own cost: an iteration takes {o['plain_ms']:.3f} ms without instruments (its hook "
        f"{o['hook_us']:.1f} us of it), {o['sampled_ms']:.3f} with the stack sampled every "
        f"{o['period_us'] / 1000:.2f} ms ({o['samples']} samples, {o['sample_us']:.0f} us each), {o['traced_ms']:.3f} "
        f"with the profiler, {o['marked_ms']:.3f} with calls marked by line"
    )


def rank_rows(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """Cells of COLUMNS for each rank: milliseconds, and counts an iteration."""
    rows = []
    for rank in diagnosis["ranks"]:
        calls, gpu = rank["calls"], diagnosis["device"] == "cuda"
        d2h = calls.get("DtoH pageable", 0.0) + calls.get("DtoH pinned", 0.0)
        names = ("launch", "graph_launch", "sync", "HtoD pageable", "HtoD pinned")
        counted = (*(calls.get(name, 0.0) for name in names), d2h, calls.get("allocator", 0.0))
        times = (rank["ms"], rank["median_ms"], rank["cpu_ms"], rank["thread_ms"])
        lock, works, idle = rank["gil_wait_ms"], rank["gpu_computing_ms"], rank["gpu_idle_fraction"]
        rows.append(
            (
                str(rank["rank"]),
                *(f"{ms:.3f}" for ms in times),
                *(f"{count:.4g}" if gpu else "" for count in counted),
                "" if lock is None else f"{lock:.3f}",
                "" if works is None else f"{works:.3f}",
                "" if idle is None else f"{idle:.0%}",
            )
        )
    return rows


def rank_lines(diagnosis: Diagnosis) -> list[str]:
    """The ranks as aligned columns, whole however narrow the terminal is; columns that no rank fills are left out."""
    rows = [COLUMNS, *rank_rows(diagnosis)]
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in zip(*kept, strict=True)
    ]


def finding_lines(number: int, finding: Finding) -> list[str]:
    """Returns the lines of a finding: cost, the user's line, the library's, and the remedy."""
    lines = [f"{number}. {finding['kind']}: {cost(finding)}{_cuda(finding)}"]
    lines += [f"   {line}" for line in (*places(finding), *details(finding))]
    return [*lines, f"   do: {finding['suggestion']}"]


def cost(finding: Finding) -> str:
    """Returns the gain of leaving the finding out, with its interval, and the number of its calls."""
    calls = f"{finding['count']:.4g} call(s)"
    if finding["ms"] is None:
        return f"{calls} an iteration, cost not known"
    said = f"{finding['ms']:.3f} ms an iteration"
    if finding["low_ms"] is not None and finding["high_ms"] is not None:
        said += f" ({finding['low_ms']:.3f} to {finding['high_ms']:.3f})"
    return said if finding["kind"] in OUTSIDE else f"{said}, {calls}"


def details(finding: Finding) -> list[str]:
    """Returns further facts of a finding; none for most."""
    lines = [finding["detail"]] if finding["detail"] else []
    if finding["calls_ms"] is not None and finding["ms"] is not None and finding["ms"] > 1.5 * finding["calls_ms"]:
        lines.append(f"its calls alone take {finding['calls_ms']:.3f} ms; leaving the line out takes its Python too")
    for read in finding["reads"]:
        lines.append(f"waits within, {read['count']:.4g} an iteration: {_place(read)}")
    return lines


def line_rows(diagnosis: Diagnosis, most: int | None = None) -> list[tuple[str, str, str]]:
    """Milliseconds with their interval, those blocked, and place of the lines that take longest."""
    return [
        (
            f"{line['ms']:.3f} ({line['low_ms']:.3f} to {line['high_ms']:.3f})",
            f"{line['blocked_ms']:.3f}",
            _place(line),
        )
        for line in diagnosis["lines"][:most]
    ]


def collective_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yields a line for each rank's time in collectives; none for a single rank."""
    for rank in diagnosis["ranks"]:
        if rank["collective_wait_ms"] is not None:
            yield (
                f"rank {rank['rank']} waits in collectives for {rank['collective_wait_ms']:.3f} ms, transfers for "
                f"{rank['collective_transfer_ms']:.3f}, and comes {rank['late_ms']:.3f} ms after the last of the others"
            )


def places(finding: Finding) -> list[str]:
    """The user's line, and the library's if there is one."""
    if finding["file"] is None:
        return [f"no line of Python is known: {finding['function']}"]
    lines = [_place(finding)]
    library = finding["library"]
    if library is not None:
        lines.append("in " + _place(library))
    caller = finding["called_from"]
    if caller is not None:
        lines.append("called from " + _place(caller))
    return lines


def prediction_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yields a line for the best possible gain of each remedy."""
    for p in diagnosis["predictions"]:
        which = [*p["parts"]]
        if p["findings"]:
            which.append(f"finding(s) {', '.join(map(str, p['findings']))}")
        sure = p["removes_low_ms"] == p["removes_high_ms"]
        ends = "" if sure else f" ({p['removes_low_ms']:.3f} to {p['removes_high_ms']:.3f})"
        yield (
            f"{p['remedy']}: {' and '.join(which)}, {p['removes_ms']:.3f} ms{ends}; {p['at_best_ms']:.3f} ms an "
            f"iteration at best, if all of it is on the critical path ({p['caution']})"
            + "".join(f"\n  first: {what}" for what in p["keeps_out"])
        )


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yields a line for each change since the baseline."""
    before, after, predicted = comparison.before_ms, comparison.after_ms, comparison.predicted_ms
    yield f"since the baseline: {before:.3f} ms an iteration then, {after:.3f} now ({after / before - 1:+.1%})"
    for word, changes in (("new", comparison.new), ("gone", comparison.gone)):
        for change in changes:
            yield f"{word}: {_change(change)}"
    if comparison.gone_parts:
        yield f"taken to be gone as a whole: {', '.join(comparison.gone_parts)}"
    if comparison.gone or comparison.gone_parts:
        yield (
            f"what is gone took {comparison.gone_ms:.3f} ms then: {predicted:.3f} was predicted, {after:.3f} came "
            f"({100 * (after / predicted - 1):+.0f} % from the prediction); waits at unchanged places changed by "
            f"{comparison.moved_ms:+.3f} ms"
        )


def _change(change: Change) -> str:
    where = ", ".join(places(change.finding)[:2])
    return f"{change.finding['kind']}, {change.count:+.4g} call(s), {change.ms:+.3f} ms: {where}"


def _place(at: Frame | Finding) -> str:
    where = f"{at['file']}:{at['line']}" if at["line"] else at["file"]
    return f"{where} in {at['function']}" + (f": {at['text']}" if at["text"] else "")


def _cuda(finding: Finding) -> str:
    parts = [f"{finding['waits']:.4g} wait(s)"] if finding["waits"] else []
    parts += [f"{count:.4g} {name}" for name, count in finding["copies"].items()]
    return f" ({', '.join(parts)})" if parts else ""
