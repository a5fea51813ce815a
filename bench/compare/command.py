"""dlrm-bench compare: reads the sides, prints the proven differences, and reports checks in its exit status."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from json import dumps

from rich.console import Console

from dlrm_bench.bench.compare.arguments import Compare
from dlrm_bench.bench.compare.checks import Check, check_equivalence, check_regression, percentage, worst
from dlrm_bench.bench.compare.comparison import Result, Terms, compare_paths
from dlrm_bench.bench.compare.tables import result_as_json, result_table, rungs_table, verdict_in_words
from dlrm_bench.bench.mlperf.published_logs import logs_table
from dlrm_bench.dlrm.runtime.command_line import EXIT_FAILED

EXIT_UNDECIDED = 5
"""Exit status of a check that the runs cannot answer: too few runs, or an order that allows no verdict. Statuses 3 and
4 are those of a run (bench/summary.py)."""
_STATUS = {"passed": 0, "failed": EXIT_FAILED, "not enough runs": EXIT_UNDECIDED, "no verdict": EXIT_UNDECIDED}


def compare_command(console: Console, asked: Compare) -> int:
    """Compares every side with the first, or two ladders rung by rung; prints the result and returns the exit status.

    ValueError names a side or a flag that cannot be used.
    """
    if len(asked.sides) < 2:
        raise ValueError("compare needs two sides: dlrm-bench compare A B")
    limit, margin = percentage("--fail-on", asked.fail_on), percentage("--equivalent", asked.equivalent)
    if margin == 0:
        raise ValueError("--equivalent 0%: no two programs take exactly the same time; name a margin, such as 2%")
    terms = Terms(accept_blocked_order=asked.accept_blocked_order, reference=asked.reference)
    results = compare_paths(asked.sides, terms)
    if asked.strict:
        for result in results:
            refused = dict.fromkeys([*result.differences, *result.a.unknown, *result.b.unknown])
            if refused:
                raise ValueError("\n  ".join(("--strict: the sides cannot be compared:", *refused)))
    checks = [[check_regression(result, limit)] if limit is not None else [] for result in results]
    for of_result, result in zip(checks, results, strict=True):
        of_result += [check_equivalence(result, margin)] if margin is not None else []
    if asked.json:
        _print_json(results, checks)
    else:
        _print_tables(console, results, checks)
    return _STATUS[worst([check for of_result in checks for check in of_result])]


def _print_tables(console: Console, results: Sequence[Result], checks: Sequence[Sequence[Check]]) -> None:
    logs = [run for side in (results[0].a, *(result.b for result in results)) for run in side.logs]
    if logs:
        console.print(logs_table(logs))
    of_ladders = results[0].name != results[0].b.label
    if of_ladders:
        console.print(rungs_table(results))
    printed: set[str] = set()
    for result, of_result in zip(results, checks, strict=True):
        name = f"{result.name}: " if of_ladders else ""
        if not of_ladders:
            console.print(result_table(result))
        console.print(name + verdict_in_words(result), style="bold", soft_wrap=True, highlight=False)
        for check in of_result:
            console.print(f"{check.outcome}: {name}{check.text}", soft_wrap=True, markup=False, highlight=False)
        for kind, texts in (("warning", result.differences), ("note", result.notes)):
            for text in map(partial(_of_any_rung, result) if of_ladders else str, texts):
                if not of_ladders or text not in printed:  # texts that hold for all rungs are printed once
                    console.print(f"{kind}: {text}", soft_wrap=True, markup=False, highlight=False)
                printed.add(text)


def _of_any_rung(result: Result, text: str) -> str:
    """Returns the text with A and B in place of the sides' labels, so that it is the same for all rungs."""
    names = {result.a.label: "A", result.b.label: "B"}
    if not all(label in text for label in names):
        return text
    for label in sorted(names, key=len, reverse=True):  # one label may be a suffix of the other
        text = text.replace(label, names[label])
    return text


def _print_json(results: Sequence[Result], checks: Sequence[Sequence[Check]]) -> None:
    found = [
        result_as_json(result) | {"checks": [asdict(check) for check in of_result]}
        for result, of_result in zip(results, checks, strict=True)
    ]
    print(dumps(found, indent=2))
