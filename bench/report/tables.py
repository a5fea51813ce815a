"""Tables from records, as rows of cells: the content of a Markdown file's tables (markdown.py).

Each kind takes the folder of the file and the lines of its comment, and returns rows, the headings first. ValueError
names what a line or a record lacks. Bold means proven: by the ladder's judgement if its own table has the comparison,
else by `compare`, with Holm's correction over all such comparisons of a table.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from dlrm_bench.bench.compare.comparison import Result, compare_all
from dlrm_bench.bench.compare.sides import Side, read_side
from dlrm_bench.bench.ladder.analysis import HOST_COLUMNS, host_cells, proven, read_judged_ladder
from dlrm_bench.bench.records.ladder import LADDER_JSON, Ladder
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.report.rounding import milliseconds, times, with_interval
from dlrm_bench.bench.stats.series import CONFIDENCE
from dlrm_bench.bench.stats.statistics import student_t

Rows = list[list[str]]
SUSTAINED_S = 10.0
"""Minimum seconds of timed iterations of each run in a table of kind `sustained`."""
LUCK = "\N{DAGGER}"
_RECORD = re.compile(r"\d\d+-")
_TIMES = re.compile(r"<!-- table: (?:times|sustained)\n.*\n(.+)\n")
"""The first comparison of a page's first table of kind `times` or `sustained`."""
_AUC = re.compile(r"<!-- table: auc\n(.+)\n")


class _Compared(NamedTuple):
    """A line of a table of comparisons."""

    words: str
    a: Side
    b: Side
    cell: str
    """The ratio of a's time to b's."""
    runs: str
    """Number of runs, with a link to their record."""

    @property
    def confidence(self) -> float:
        """Confidence of the interval in `cell`."""
        return max(self.a.confidence, self.b.confidence)


def _compared(folder: Path, lines: Sequence[str]) -> list[_Compared]:
    """Returns the comparisons of lines, the heading first: words | record | a side in it | another side.

    A side is a rung of a ladder, or a folder of runs.
    """
    if len(lines) < 2:
        raise ValueError("a heading and a line for each comparison are needed")
    pairs = [_pair(folder, line) for line in lines[1:]]
    cells = [_as_in_ladder(record, *sides) for record, (_, *sides) in pairs]
    others = [place for place, cell in enumerate(cells) if cell is None]
    for place, result in zip(others, compare_all([pairs[place][1] for place in others]), strict=True):
        cells[place] = _faster(result)
    found = []
    for (record, (name, left, right)), cell in zip(pairs, cells, strict=True):
        runs = " and ".join(map(str, dict.fromkeys((len(left.series), len(right.series)))))
        link = runs if record.resolve() == folder.resolve() else f"[{runs}]({record.relative_to(folder)})"
        found.append(_Compared(name, left, right, cell or "", link))
    return found


def _times(folder: Path, lines: Sequence[str]) -> Rows:
    """Returns a heading, then a row for each comparison; lines are those of _compared."""
    found = _compared(folder, lines)
    words, _, a, b = _cells(lines[0], 4)
    rows = [[words, f"{a}, ms", f"{b}, ms", f"times as fast ({_intervals(found)})", "runs"]]
    return rows + [[each.words, *map(milliseconds, _typical(each.a, each.b)), each.cell, each.runs] for each in found]


def _sustained(folder: Path, lines: Sequence[str]) -> Rows:
    """Returns the rows of _times with the time by the clock beside each median, and power and SM clock of b's GPUs.

    ValueError for a run with less than SUSTAINED_S of timed iterations: the result of a short run may not last.
    """
    found = _compared(folder, lines)
    words, _, a, b = _cells(lines[0], 4)
    both = (f"{a}, ms (by clock)", f"{b}, ms (by clock)")
    rows = [[words, *both, f"times as fast ({_intervals(found)})", f"{b}: W a GPU", "MHz", "runs"]]
    for each in found:
        for side in (each.a, each.b):
            if side.shortest_s() < SUSTAINED_S:
                raise ValueError(
                    f"{side.label} has a run of {side.shortest_s():.1f} s, but {SUSTAINED_S:g} are needed: run it with "
                    "--min-time, or use a table of kind times"
                )
        medians = zip(_typical(each.a, each.b), (each.a, each.b), strict=True)
        times_of_both = (f"{milliseconds(median)} ({milliseconds(side.by_clock())})" for median, side in medians)
        gpu = ("" if value is None else f"{value:.0f}" for value in (each.b.power_w, each.b.sm_clock_mhz))
        rows.append([each.words, *times_of_both, each.cell, *gpu, each.runs])
    return rows


def _intervals(found: Sequence[_Compared]) -> str:
    """Returns the heading of comparisons' intervals: those of `--rounds auto` have another confidence."""
    return f"{' or '.join(f'{each * 100:.0f} %' for each in sorted({each.confidence for each in found}))} interval"


def _as_in_ladder(record: Path, a: Side, b: Side) -> str | None:
    """Returns the cell of the ladder's own table for two of its rungs; None if it has none."""
    if not (record / LADDER_JSON).exists():
        return None
    ladder, _ = read_judged_ladder(record)
    names = [str(record / rung["name"]) for rung in ladder["rungs"]]
    place = names.index(b.label) if b.label in names else 0
    if place and a.label == names[0]:
        return _over(ladder, "first")[place - 1]
    return _over(ladder, "previous")[place - 1] if place and a.label == names[place - 1] else None


def _rungs(folder: Path, lines: Sequence[str]) -> Rows:
    """Returns the rungs of the ladder in `folder`: times, ratios to the first and to the previous rung, cost to the
    host.

    Takes no lines. Judged as by `dlrm-bench ladder`, corrected for all rungs.
    """
    if lines:
        raise ValueError("it shows the ladder of its own folder, and takes no lines")
    ladder, _ = read_judged_ladder(folder)
    rungs = ladder["rungs"]
    rounds = "one round" if ladder["rounds"] == 1 else f"{ladder['rounds']} rounds"
    columns = [
        ["rung", *(rung["name"] for rung in rungs)],
        ["median, ms", *(milliseconds(rung["median_ms"]) for rung in rungs)],
        ["p99, ms", *(milliseconds(rung["p99_ms"]) for rung in rungs)],
        [f"times as fast as {rungs[0]['name']}, {rounds}", "", *_over(ladder, "first")],
    ]
    if len(rungs) > 2:
        columns.append(["as the rung before", "", "", *_over(ladder, "previous")[1:]])
    if any(rung["host"] for rung in rungs):
        hosts = [host_cells(rung["host"]) if rung["host"] else [""] * len(HOST_COLUMNS) for rung in rungs]
        columns.append(["CPU, ms", *(cells[0] for cells in hosts)])
        columns.append(["launches, graphs, syncs, reads", *(", ".join(filter(None, cells[1:5])) for cells in hosts)])
    return [list(row) for row in zip(*columns, strict=True)]


def _over(ladder: Ladder, against: Literal["first", "previous"]) -> list[str]:
    """Returns a cell for each rung except the first."""
    found, rungs = proven(ladder, against), ladder["rungs"]
    cells = []
    for before, rung in pairwise(rungs):
        first = against == "first"
        value = rung["speedup_vs_first"] if first else rung["speedup_vs_previous"]
        interval = rung["ci95"] if first else rung["ci95_vs_previous"]
        other = rungs[0] if first else before
        by_luck = f" to {other['name']} agree " in (rung["agrees_by_luck"] or "")
        cells.append(_ratio_cell(value, interval, rung["name"] in found, by_luck))
    return cells


def _latencies(folder: Path, lines: Sequence[str]) -> Rows:
    """Returns a heading, then a row for each side; a side's line is: words | path."""
    if len(lines) < 2:
        raise ValueError("a heading and a line for each side are needed")
    rows = [[_cells(lines[0], 2)[0], "runs", "median, ms", "p99, ms", "99.9 %, ms", "mean, ms"]]
    for line in lines[1:]:
        words, path = _cells(line, 2)
        side = read_side(folder / path)
        metrics = side.metrics()
        tail = float(np.exp(np.mean([np.log(np.percentile(run, 99.9)) for run in side.series])))
        figures = (metrics["p50"], metrics["p99"], tail, metrics["mean"])
        rows.append([words, str(len(side.series)), *map(milliseconds, figures)])
    return rows


def _auc(folder: Path, lines: Sequence[str]) -> Rows:
    """Returns a row for each seed, and one with the mean of the differences and its 95 % interval by Student's t.

    One line: folder | side | side. The runs are SIDE-0, SIDE-1, ..., numbered by their seeds.
    """
    if len(lines) != 1:
        raise ValueError(f"one line is needed, folder | side | side, and there are {len(lines)}")
    place, a, b = _cells(lines[0], 3)
    seeds, others = (_seeds(folder / place, side) for side in (a, b))
    if len(seeds) < 2:
        raise ValueError(f"{folder / place} has no run {a}-0, {a}-1 and so on: an interval needs two")
    if seeds != others:
        raise ValueError(
            f"{folder / place} has seeds {', '.join(seeds)} of {a}, but {', '.join(others) or 'none'} of {b}: both "
            "sides need a run of each seed"
        )
    aucs = {side: [_final_auc(folder / place / f"{side}-{seed}") for seed in seeds] for side in (a, b)}
    rows = [["seed", a, b, f"{b} - {a}"]]
    rows += [[s, f"{x:.6f}", f"{y:.6f}", f"{y - x:+.6f}"] for s, x, y in zip(seeds, *aucs.values(), strict=True)]
    differences = np.subtract(aucs[b], aucs[a])
    error = float(differences.std(ddof=1)) / len(differences) ** 0.5
    mean, half = float(differences.mean()), student_t((1 + CONFIDENCE) / 2, len(differences) - 1) * error
    rows.append(["mean, 95 % interval", "", "", f"{mean:+.5f} ({mean - half:+.5f} to {mean + half:+.5f})"])
    return rows


def _seeds(folder: Path, side: str) -> list[str]:
    """Returns the seeds of a side's runs, in order; another side's name may begin as this one's does."""
    names = (path.name for path in folder.glob("*-*"))
    return sorted(
        (seed for name, _, seed in (n.rpartition("-") for n in names) if name == side and seed.isdecimal()), key=int
    )


def _final_auc(record: Path) -> float:
    training = read_record(record).run["training"]
    if training is None or training["auc"] is None:
        raise ValueError(f"{record} has no AUC")
    return training["auc"]


def _records(folder: Path, lines: Sequence[str]) -> Rows:
    """Returns a row for each record in `folder`: what it shows, its machine and its result. Takes no lines."""
    if lines:
        raise ValueError("it shows the records of its own folder, and takes no lines")
    rows = [["record", "what it shows", "machine", "result"]]
    for record in sorted((path for path in folder.iterdir() if _RECORD.match(path.name)), key=lambda path: path.name):
        text = (record / "README.md").read_text(encoding="utf-8")
        number = record.name.partition("-")[0]
        heading = re.match(rf"# {number}: (.+)\n", text)
        machine = re.search(r"^- Machine: (.+)$", text, re.MULTILINE)
        if heading is None or machine is None:
            raise ValueError(f"{record / 'README.md'} needs a heading '# {number}: ...' and a line '- Machine: ...'")
        rows.append([f"[{number}]({record.name})", heading[1], machine[1], _result(record, text)])
    return rows


def _result(record: Path, text: str) -> str:
    """Returns the record's own line '- Result: ...', or its AUC, or its first comparison, or the ends of its ladder."""
    own = re.search(r"^- Result: ((?:.+\n)(?:  .+\n)*)", text, re.MULTILINE)
    if own is not None:
        return " ".join(own[1].split())
    if auc := _AUC.search(text):
        rows = _auc(record, [auc[1]])
        return f"AUC, {rows[0][-1]}: {rows[-1][-1]}"
    if line := _TIMES.search(text):
        place, (_, a, b) = _pair(record, line[1])
        (result,) = compare_all([("", a, b)])
        cell, runs = _as_in_ladder(place, a, b) or _faster(result), min(result.comparison.runs)
        before, after = _typical(a, b)
    elif (record / LADDER_JSON).exists():
        ladder, _ = read_judged_ladder(record)
        before, after = (ladder["rungs"][place]["median_ms"] for place in (0, -1))
        cell, runs = _over(ladder, "first")[-1], ladder["rounds"]
    else:
        raise ValueError(f"{record / 'README.md'} has neither a line '- Result: ...' nor a comparison")
    alone = ", one run" if runs == 1 else ""
    return f"{milliseconds(before)} and {milliseconds(after)} ms, times as fast: {cell}{alone}"


def _pair(folder: Path, line: str) -> tuple[Path, tuple[str, Side, Side]]:
    words, record, a, b = _cells(line, 4)
    return folder / record, (words, read_side(folder / record / a), read_side(folder / record / b))


def _typical(a: Side, b: Side) -> tuple[float, float]:
    """Returns the median latencies in ms, or the times by the clock where a side has no other."""
    if a.mean_only or b.mean_only:
        return a.by_clock(), b.by_clock()
    return a.metrics()["p50"], b.metrics()["p50"]


def _faster(result: Result) -> str:
    ratio = result.speedup
    interval = [ratio.low, ratio.high] if result.comparison.between_runs else None
    by_luck = any("by luck" in note for note in result.notes)
    return _ratio_cell(ratio.value, interval, result.verdict in ("faster", "slower"), by_luck)


def _ratio_cell(value: float, interval: Sequence[float] | None, is_proven: bool, by_luck: bool) -> str:
    """Returns the ratio of times in a cell: bold if proven; only the ratio after one run.

    A dagger marks runs that agree better than their iterations predict: the interval may be too narrow.
    """
    if interval is None:
        return times(value)
    cell = with_interval(value, *interval)
    return f"{cell} {LUCK}" if by_luck else f"**{cell}**" if is_proven else cell


def _cells(line: str, count: int) -> list[str]:
    cells = [cell.strip() for cell in line.split("|")]
    if len(cells) != count:
        raise ValueError(f"expected {count} cells with | between them, found {line!r}")
    return cells


KINDS: dict[str, Callable[[Path, Sequence[str]], Rows]] = {
    "times": _times,
    "sustained": _sustained,
    "rungs": _rungs,
    "latencies": _latencies,
    "auc": _auc,
    "records": _records,
}
