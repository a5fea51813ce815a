"""Rates of wrong verdicts, and of differences found, on simulated runs: the table of bench/stats/RATES.md.

python -m tests.bench.stats.rates > bench/stats/RATES.md makes it anew, in some three minutes.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from dlrm_bench.bench.compare.sides import Side
from dlrm_bench.bench.history.bisection import Finding, Pair, bisect
from dlrm_bench.bench.ladder.comparisons import as_judged, judge_sides
from dlrm_bench.bench.stats.change_points import Change, change_points
from dlrm_bench.bench.stats.series import AUTO_CONFIDENCE, CONFIDENCE, drift_within
from dlrm_bench.bench.stats.statistics import NO_VERDICT, UNPROVEN, compare
from tests.bench.compare.two_sides import compare_sides
from tests.bench.stats.test_rounds import places
from tests.bench.stats.test_series import autoregressive

TRIES = 400
_INTRODUCTION = """# Rates

How often a verdict is wrong, and how often it finds what is there, on simulated runs: {tries} tries a row, so that 5 %
is known to 1 % or so (standard error). Made by `python -m tests.bench.stats.rates > bench/stats/RATES.md`; the tests
beside hold the same rates in short runs. Runs spread by 1 % (normal, or Student's t of three degrees of freedom, heavy)
where nothing else is said.
"""

Row = tuple[str, ...]


def side(label: str, logs: np.ndarray, when: np.ndarray, confidence: float = CONFIDENCE) -> Side:
    """Runs of these logarithms of their median, which ran at these places of the order."""
    order = np.argsort(when)
    return Side(
        label=label,
        series=[np.array([math.exp(logs[i])]) for i in order],
        clock_ms=[math.exp(logs[i]) for i in order],
        finished=[f"{when[i]:05d}" for i in order],
        machines=["x"] * len(logs),
        settings={},
        global_batch_size=1024,
        mean_only=False,
        warnings=[],
        confidence=confidence,
    )


def wander(rng: np.random.Generator, kind: str, runs: int) -> np.ndarray:
    """What the machine does to each run: nothing, 2 % a run, a walk of 1 % a run, a step of 10 % at some run, a cycle
    of 2 % over seven runs, or 10 % that four runs settle from."""
    if kind == "cycle":
        return np.asarray(0.02 * np.sin(2 * np.pi * (np.arange(runs) / 7 + rng.uniform())))
    return {
        "settling": 0.1 * np.exp(-np.arange(runs) / 4),
        "none": np.zeros(runs),
        "2 % a run": 0.02 * np.arange(runs),
        "walk": np.cumsum(rng.normal(0, 0.01, runs)),
        "step": 0.1 * (np.arange(runs) >= rng.integers(1, runs)),
    }[kind]


def noise(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """1 % of spread from run to run: normal, heavy (Student's t), skewed (exponential), or of two kinds of runs, of
    which three in ten take 2.2 % more."""
    draws = {
        "normal": lambda: rng.normal(size=shape),
        "heavy": lambda: rng.standard_t(3, shape) / math.sqrt(3),
        "skewed": lambda: rng.exponential(size=shape),
        "two kinds": lambda: 2.2 * (rng.random(shape) < 0.3) + 0.1 * rng.normal(size=shape),
    }
    return 0.01 * draws[kind]()


def of_an_order(order: str, drift: str, tries: int, kind: str = "normal") -> Row:
    """compare A B of the same program, and of one that takes 10 % less: share of verdicts."""
    rng, said = np.random.default_rng(0), {0.0: [], -math.log(1.1): []}
    where = {name: np.array([i for i, each in enumerate(order) if each == name]) for name in "AB"}
    for _ in range(tries):
        machine = wander(rng, drift, len(order)) + noise(rng, kind, (len(order),))
        for effect, verdicts in said.items():
            a, b = (side(name, machine[at] + effect * (name == "B"), at) for name, at in where.items())
            verdicts.append(compare_sides(a, b).verdict)
    same, faster = said.values()
    wrong = np.mean([verdict not in (UNPROVEN, NO_VERDICT) for verdict in same])
    return (
        order,
        *((drift,) if kind == "normal" else (drift, kind)),
        f"{wrong:.1%}",
        f"{np.mean([v == 'faster' for v in faster]):.0%}",
        f"{same.count(NO_VERDICT) / tries:.0%}",
    )


def of_a_ladder(rungs: int, drift: str, kind: str, confidence: float, tries: int) -> Row:
    """Five rounds of rungs of one program, and with 10 % gained by the later half."""
    rng, words, covered, found = np.random.default_rng(0), 0, [], 0
    for seed in range(tries):
        at = places(rungs, 5, seed)
        logs = wander(rng, drift, at.size)[at] + noise(rng, kind, at.shape)
        same = judge_sides([side(str(i), *row, confidence) for i, row in enumerate(zip(logs, at, strict=True))])
        results = [r for rung in same for r in (rung.over_first, rung.over_previous) if r is not None]
        words += any((as_judged(result) or {})["proven"] for result in results)
        covered += [result.speedup.low <= 1 <= result.speedup.high for result in results]
        logs[rungs // 2 :] -= math.log(1.1)
        gained = judge_sides([side(str(i), *row, confidence) for i, row in enumerate(zip(logs, at, strict=True))])
        last = gained[-1].over_first
        found += last is not None and last.verdict == "faster"
    shown = f"{np.mean(covered):.1%} of {confidence:.0%}"
    return str(rungs), drift, kind, f"{words / tries:.1%}", shown, f"{found / tries:.0%}"


def of_a_window(iterations: int, coefficient: float, spread: float, tries: int) -> Row:
    """Autoregressive iterations of one run: steady, and with 20 % more in the third quarter."""
    series = np.exp(spread * autoregressive(tries, iterations, coefficient))
    excursion = series.copy()
    excursion[:, iterations // 2 : 3 * iterations // 4] *= 1.2
    shares = [np.mean([not (drift_within(row) or (0, True))[1] for row in rows]) for rows in (series, excursion)]
    return f"{iterations:,}", f"{coefficient:g}", f"{spread:.0%}", f"{shares[0]:.1%}", f"{shares[1]:.0%}"


def of_an_uneven_window(iterations: int, kind: str, tries: int) -> Row:
    """Iterations of one run with 2 % of noise that are steady all the same, or are not: how often they are called
    unsteady."""
    rng, at = np.random.default_rng(0), np.arange(iterations)
    called = 0
    for _ in range(tries):
        logs = 0.02 * rng.normal(size=iterations)
        logs += {
            "every hundredth takes twice as long": math.log(2) * (at % 100 == rng.integers(100)),
            "one in ten takes half as long again": math.log(1.5) * (rng.random(iterations) < 0.1),
            "15 % more for stretches of ten": 0.14 * (rng.random(iterations // 10 + 1) < 0.5)[at // 10],
            "10 % more from begin to end, evenly": 0.1 * at / iterations,
            "20 % more in the last eighth": 0.18 * (at >= iterations * 7 // 8),
            "10 % more in the second half": 0.1 * (at >= iterations // 2),
            "30 % more at first, settling": 0.26 * np.exp(-at / (iterations / 10)),
        }[kind]
        called += not (drift_within(np.exp(logs)) or (0, True))[1]
    return f"{iterations:,}", kind, f"{called / tries:.0%}"


def of_change_points(points: int, kind: str, tries: int) -> Row:
    """Points of one kind of noise: any change in a series without one, a step of 3 % in its middle, and an excursion of
    3 % in its third quarter, which are two."""
    rng, at = np.random.default_rng(0), np.arange(points)
    step, excursion = at >= points // 2, (at >= points // 2) & (at < 3 * points // 4)
    said: dict[str, list[list[Change]]] = {"none": [], "step": [], "excursion": []}
    for _ in range(tries):
        series = noise(rng, kind, (points,))
        for name, shape in (("none", 0.0), ("step", 0.03 * step), ("excursion", 0.03 * excursion)):
            said[name].append(change_points(series + shape))
    found = [changes for changes in said["step"] if changes]
    middle = points // 2
    first = [min(changes, key=lambda change: abs(change.at - middle)) for changes in found]
    place = sum(change.low <= middle <= change.high for change in first)
    size = sum(change.estimate.ratio().low <= math.exp(0.03) <= change.estimate.ratio().high for change in first)
    return (
        str(points),
        kind,
        f"{sum(map(bool, said['none'])) / tries:.1%}",
        f"{len(found) / tries:.0%}",
        f"{place / max(1, len(found)):.0%}",
        f"{size / max(1, len(found)):.0%}",
        f"{sum(len(changes) >= 2 for changes in said['excursion']) / tries:.0%}",
    )


def of_a_bisection(commits: int, size: float, kind: str, tries: int) -> Row:
    """Bisections for a change of this size at a random commit, on a machine that drifts by 2 % a pair, with 40 pairs of
    a commit at most."""
    rng, right, wrong, pairs = np.random.default_rng(0), 0, 0, 0
    names = [f"{i:03d}" for i in range(commits)]

    def of(at: int) -> Callable[[str], Iterator[Pair]]:
        def drawn(commit: str) -> Iterator[Pair]:
            for number in range(40):
                good, candidate = 0.02 * number + noise(rng, kind, (2,)) + (0, size * (int(commit) >= at))
                yield Pair(np.exp([good]), np.exp([candidate]))

        return drawn

    for _ in range(tries):
        at = int(rng.integers(commits))
        finding = [*bisect(names, of(at), CONFIDENCE, 40)][-1]
        assert isinstance(finding, Finding)
        known = finding.first is not None and len(finding.between) == 1
        right += known and finding.first == names[at]
        wrong += known and finding.first != names[at]
        pairs += sum(step.pairs for step in finding.steps)
    shares = (f"{right / tries:.0%}", f"{wrong / tries:.1%}", f"{1 - (right + wrong) / tries:.0%}")
    return str(commits), f"{size:.0%}", kind, *shares, f"{pairs / tries:.0f}"


def of_unequal_numbers(runs: tuple[int, int], tries: int) -> Row:
    """Sides of so many runs each: B equal to A, and 10 % faster."""
    rng, wrong, found, covered = np.random.default_rng(0), 0, 0, 0
    for _ in range(tries):
        a, b = ([np.array([math.exp(each)]) for each in noise(rng, "normal", (count,))] for count in runs)
        wrong += compare(a, b).estimates["p50"].verdict() != UNPROVEN
        estimate = compare(a, [run / 1.1 for run in b]).estimates["p50"]
        found += estimate.verdict() == "faster"
        low, high = estimate.speedup()[1:]
        covered += low <= 1.1 <= high
    return str(runs[0]), str(runs[1]), f"{wrong / tries:.1%}", f"{covered / tries:.1%}", f"{found / tries:.0%}"


def of_a_reference(runs: int, tries: int) -> Row:
    """Two sittings, the second 30 % slower, each with a reference beside: B equal to A, and 10 % faster."""
    rng, wrong, found, covered = np.random.default_rng(0), 0, 0, 0

    def sitting(effect: float, day: float):  # type: ignore[no-untyped-def]
        program, reference = (
            [np.array([math.exp(shift + day + noise(rng, "normal", ()))]) for _ in range(runs)]
            for shift in (effect, 0.0)
        )
        return compare(reference, program, paired=True)

    for _ in range(tries):
        wrong += sitting(0.0, 0.3).minus(sitting(0.0, 0.0)).estimates["p50"].verdict() != UNPROVEN
        estimate = sitting(-math.log(1.1), 0.3).minus(sitting(0.0, 0.0)).estimates["p50"]
        found += estimate.verdict() == "faster"
        low, high = estimate.speedup()[1:]
        covered += low <= 1.1 <= high
    return str(runs), f"{wrong / tries:.1%}", f"{covered / tries:.1%}", f"{found / tries:.0%}"


_DRIFTS = ("none", "cycle", "settling")
_KINDS = ("skewed", "two kinds")
_STEADY = (
    "every hundredth takes twice as long",
    "one in ten takes half as long again",
    "15 % more for stretches of ten",
)
_NOT_STEADY = (
    "10 % more from begin to end, evenly",
    "20 % more in the last eighth",
    "10 % more in the second half",
    "30 % more at first, settling",
)
_ORDERS = ("ABBAABBA", "ABABABAB", "AAABBB", "AAAABBBB", "AAAABBBBAB", "AAABBBBBBAAA", "AAABBBAAABBB")
TABLES: tuple[tuple[str, Row, tuple[Callable[[int], Row], ...]], ...] = (
    (
        "## `compare A B`, by the order of the runs",
        ("order", "drift", "same program: faster or slower", "10 % faster: found", "no verdict"),
        tuple(
            partial(of_an_order, order, drift) for order in _ORDERS for drift in ("none", "2 % a run", "step", "walk")
        ),
    ),
    (
        "## `compare A B`, unequal numbers of runs",
        ("runs of A", "runs of B", "same program: faster or slower", "interval covers", "10 % faster: found"),
        tuple(partial(of_unequal_numbers, runs) for runs in ((2, 4), (2, 10), (3, 12), (5, 20))),
    ),
    (
        "## Ladders of five rounds\n\nA word anywhere in the table, over the first rung or over the one before.",
        ("rungs", "drift", "noise", "same program: a word", "interval covers", "10 % faster: found"),
        tuple(
            partial(of_a_ladder, rungs, drift, kind, confidence)
            for rungs in (3, 8, 16)
            for drift, kind, confidence in (
                *((drift, "normal", CONFIDENCE) for drift in ("none", "2 % a run", "walk", "step")),
                ("2 % a run", "heavy", CONFIDENCE),
                ("none", "normal", AUTO_CONFIDENCE),
            )
        ),
    ),
    (
        "## `compare A B --reference OLD NEW`, the second sitting 30 % slower",
        ("runs of each", "same program: faster or slower", "interval covers", "10 % faster: found"),
        tuple(partial(of_a_reference, runs) for runs in (3, 5, 8)),
    ),
    (
        "## Steadiness of one run\n\nIterations in ten seconds of the big presets: 590 (stock, 17 ms), 1,000\n"
        "(stock, 10 ms), 4,300 (static, 2.3 ms). Below some 500, strongly correlated iterations wander by themselves.",
        ("iterations", "correlation", "spread", "steady, called unsteady", "20 % in the third quarter: found"),
        tuple(
            partial(of_a_window, iterations, coefficient, spread)
            for iterations in (250, 590, 1000, 4300)
            for coefficient in (0.0, 0.5, 0.9)
            for spread in (0.02, 0.1)
        ),
    ),
    (
        "## On other machines: `compare A B`\n\nA cycle of 2 % over seven runs, or 10 % that four runs settle from; "
        "skewed noise, or two kinds of runs, of\nwhich three in ten take 2.2 % more. Two runs a side may happen to be "
        "of one kind each, and prove too much: run more.",
        ("order", "drift", "noise", "same program: faster or slower", "10 % faster: found", "no verdict"),
        tuple(
            partial(of_an_order, order, drift, kind=kind)
            for order in ("ABBAABBA", "ABBA")
            for drift in _DRIFTS
            for kind in _KINDS
        ),
    ),
    (
        "## On other machines: ladders of five rounds\n\nA machine that swings by more than its noise within a few "
        "runs makes two rungs differ too often, and not eight.",
        ("rungs", "drift", "noise", "same program: a word", "interval covers", "10 % faster: found"),
        tuple(
            partial(of_a_ladder, rungs, drift, kind, CONFIDENCE)
            for rungs in (2, 8)
            for drift in _DRIFTS
            for kind in ("normal", *_KINDS)
        ),
    ),
    (
        "## On other machines: steadiness\n\nThe first three are steady in the mean of a section, the others are not.",
        ("iterations", "what differs", "called unsteady"),
        tuple(
            partial(of_an_uneven_window, iterations, kind)
            for iterations in (590, 4300)
            for kind in (*_STEADY, *_NOT_STEADY)
        ),
    ),
    (
        "## Change points of a history\n\nA change of 3 %, where points spread by 1 %. Place and size: of those found, "
        "how often their 95 % interval covers.",
        (
            "points",
            "noise",
            "none: a change",
            "a step: found",
            "its place",
            "its size",
            "an excursion: both ends found",
        ),
        tuple(
            partial(of_change_points, points, kind)
            for points in (8, 12, 24, 48)
            for kind in ("normal", "heavy", "two kinds")
        ),
    ),
    (
        "## `bisect`",
        ("commits", "change", "noise", "right", "wrong", "not proven", "pairs of runs"),
        tuple(
            partial(of_a_bisection, commits, size, kind)
            for commits in (8, 64)
            for size in (0.1, 0.03)
            for kind in ("normal", "heavy")
        ),
    ),
)


def lines(tries: int = TRIES) -> Iterator[str]:
    """Yields the lines of the page."""
    yield _INTRODUCTION.format(tries=tries)
    for heading, columns, cases in TABLES:
        yield f"{heading}\n"
        yield as_row(columns)
        yield as_row(("---",) * len(columns))
        yield from (as_row(case(tries)) for case in cases)
        yield ""


def as_row(cells: Row) -> str:
    """A row of Markdown."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(lines()).rstrip())
