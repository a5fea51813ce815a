"""How often verdicts are wrong, and what they find, on simulated runs: the table of bench/stats/RATES.md.

python -m tests.bench.stats.rates > bench/stats/RATES.md makes it anew, in some three minutes.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from dlrm_bench.bench.compare.comparison import compare_sides
from dlrm_bench.bench.compare.sides import Side
from dlrm_bench.bench.ladder.judge import as_judged, judge_sides
from dlrm_bench.bench.stats.series import AUTO_CONFIDENCE, CONFIDENCE, drift_within
from dlrm_bench.bench.stats.statistics import NO_VERDICT, UNPROVEN, compare
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
    """What the machine does to each run: nothing, 2 % a run, a walk of 1 % a run, or a step of 10 % at some run."""
    return {
        "none": np.zeros(runs),
        "2 % a run": 0.02 * np.arange(runs),
        "walk": np.cumsum(rng.normal(0, 0.01, runs)),
        "step": 0.1 * (np.arange(runs) >= rng.integers(1, runs)),
    }[kind]


def noise(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """1 % of spread from run to run."""
    return 0.01 * (rng.standard_t(3, shape) / math.sqrt(3) if kind == "heavy" else rng.normal(size=shape))


def of_an_order(order: str, drift: str, tries: int) -> Row:
    """compare A B of the same program, and of one that takes 10 % less: share of verdicts."""
    rng, said = np.random.default_rng(0), {0.0: [], -math.log(1.1): []}
    where = {name: np.array([i for i, each in enumerate(order) if each == name]) for name in "AB"}
    for _ in range(tries):
        machine = wander(rng, drift, len(order)) + noise(rng, "normal", (len(order),))
        for effect, verdicts in said.items():
            a, b = (side(name, machine[at] + effect * (name == "B"), at) for name, at in where.items())
            verdicts.append(compare_sides(a, b).verdict)
    same, faster = said.values()
    wrong = np.mean([verdict not in (UNPROVEN, NO_VERDICT) for verdict in same])
    return (
        order,
        drift,
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


_ORDERS = ("ABBAABBA", "ABABABAB", "AAABBB", "AAAABBBB", "AAAABBBBAB")
TABLES: tuple[tuple[str, Row, tuple[Callable[[int], Row], ...]], ...] = (
    (
        "## `compare A B`, by the order of the runs",
        ("order", "drift", "same program: faster or slower", "10 % faster: found", "no verdict"),
        tuple(partial(of_an_order, order, drift) for order in _ORDERS for drift in ("none", "2 % a run", "step")),
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
