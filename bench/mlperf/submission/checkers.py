"""MLPerf's checkers over a package: the verdict of each, read from its text.

Their exit codes mean nothing (the package and the repository checker always end with 0), and they write into the
package (scaling.json, logs beside it). So they run on a copy, and only their text counts.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from dlrm_bench.bench.mlperf.published_logs import read_mlperf_log
from dlrm_bench.bench.mlperf.submission.log_sense import senseless
from dlrm_bench.bench.mlperf.submission.package import (
    BYPASSES,
    Finding,
    Package,
    arrangement,
    read_run,
    rules_of,
)

Command = tuple[str, list[str]]
"""A module of mlperf_logging and its arguments."""


@dataclass(slots=True)
class Verdict:
    """One checker's verdict on a package."""

    checker: str
    findings: list[Finding] = field(default_factory=list)
    text: str = ""
    """All output of MLPerf's checker; empty for our own."""
    asked: bool = True
    """Whether the rules require this check in the package's division."""

    @property
    def passed(self) -> bool:
        """Whether nothing fatal was found."""
        return not any(finding.fatal for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Convergence:
    """A submission's convergence beside the reference's convergence points (RCP)."""

    mean_epochs: float
    """Mean of the runs' epochs to converge, or of their samples if the rules count samples, without the fastest and the
    slowest."""
    scaling: float
    """Factor on the score: reference mean / this mean if the submission converged faster and passed, else 1."""


def check_package(package: Package, version: str | None = None, made_data: bool = False) -> list[Verdict]:
    """Runs all checkers over one system of a package; returns a verdict for each, in a fixed order.

    version: of the ruleset; by default the newest that knows the benchmark. made_data: whether values that the rules
    fix for MLPerf's own data (Ruleset.pinned_to_data) are notes instead of errors.
    """
    logs, ruleset = package.logs(), package.ruleset(version)
    pinned = rules_of(package.benchmark).pinned_to_data if made_data else frozenset[str]()
    own = Verdict("arrangement", list(arrangement(package)))
    closed = _is_closed(logs)
    with TemporaryDirectory() as scratch:
        copy = _copy(package, Path(scratch))
        commands = [
            *(
                _command("compliance_checker", "--usage", "training", "--ruleset", ruleset, str(log))
                for log in copy.logs()
            ),
            _command("package_checker", str(copy.folder), "training", ruleset),
            _rcp_command(copy, ruleset),
            _command("system_desc_checker", str(copy.description), "training", ruleset),
            _command("repo_checker", str(package.folder.resolve()), "training", ruleset),
        ]
        texts = [_relative(text, copy.folder, package.folder) for text in run_checkers(commands, Path(scratch))]
    compliance, (packaged, rcp, system, repository) = texts[: len(logs)], texts[len(logs) :]
    return [
        own,
        _sense(logs),
        _compliance(logs, compliance, pinned),
        _packaged(packaged, package.benchmark, len(logs), pinned),
        _rcp(rcp, package) if closed else Verdict("RCP", text="", asked=False),
        _plain("system description", system, "System description checker passed"),
        _plain("repository", repository, "ALL CHECKS PASSED."),
    ]


def convergence(package: Package, version: str | None = None) -> tuple[Verdict, Convergence | None]:
    """Returns the RCP checker's verdict on a closed submission, and its figures; None if the checker printed none."""
    with TemporaryDirectory() as scratch:
        copy = _copy(package, Path(scratch))
        (text,) = run_checkers([_rcp_command(copy, package.ruleset(version))], Path(scratch))
    verdict = _rcp(_relative(text, copy.folder, package.folder), package)
    return verdict, _figures(text)


def run_checkers(commands: Sequence[Command], folder: Path) -> list[str]:
    """Runs checkers in a new process, which works in `folder`; returns the text of each."""
    program = Path(__file__).with_name("checker_process.py")
    process = subprocess.run(
        [sys.executable, "-P", str(program)],
        cwd=folder,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        errors="replace",
    )
    if process.returncode:
        raise ValueError(f"MLPerf's checkers could not be run: pip install '.[run]'\n{process.stderr}")
    texts: list[str] = json.loads(process.stdout.splitlines()[-1])
    return texts


def _command(checker: str, *arguments: str) -> Command:
    return f"mlperf_logging.{checker}", ["--log_output", os.devnull, *arguments]


def _rcp_command(package: Package, ruleset: str) -> Command:
    """Returns the RCP checker's command. The ruleset is explicit because the default may not know the benchmark; the
    points are pruned, as in the package checker, because the default of its functions is a name that they do not
    know."""
    return _command("rcp_checker", "--rcp_version", ruleset, "--rcp_pass", "pruned_rcps", str(package.results))


def _copy(package: Package, scratch: Path) -> Package:
    """Copies the files that the checkers read and write, of this system alone: its description, its logs, and the
    bypasses."""
    copy = Package(scratch / package.folder.resolve().name, package.system, package.benchmark)
    copy.results.mkdir(parents=True)
    copy.description.parent.mkdir()
    if package.description.exists():
        shutil.copyfile(package.description, copy.description)
    for log in package.logs():
        shutil.copyfile(log, copy.results / log.name)
    for theirs, ours in ((package.results, copy.results), (package.results.parent, copy.results.parent)):
        if (theirs / BYPASSES).exists():
            shutil.copyfile(theirs / BYPASSES, ours / BYPASSES)
    return copy


def _relative(text: str, copy: Path, folder: Path) -> str:
    return text.replace(str(copy), str(folder))


def _is_closed(logs: Iterable[Path]) -> bool:
    for log in logs:
        try:
            return read_mlperf_log(log)[0].division == "closed"
        except ValueError:
            continue
    return False


_LEVEL = re.compile(r"^(INFO|WARNING|ERROR|CRITICAL) - ", re.MULTILINE)


def messages(text: str) -> list[tuple[str, str]]:
    """Returns (level, message) of each message of a checker, with the lines that follow it; a crash has level CRASH."""
    before, *parts = _LEVEL.split(text)
    if "Traceback (most recent call last)" in text:
        crash = text[text.index("Traceback (most recent call last)") :].strip().splitlines()[-1]
        return [*_pairs(parts), ("CRASH", f"the checker crashed: {crash}")]
    if not parts and before.strip():
        return [("CRASH", f"the checker refused its arguments: {before.strip().splitlines()[-1]}")]
    return _pairs(parts)


def _pairs(parts: Sequence[str]) -> list[tuple[str, str]]:
    return [(level, message.strip()) for level, message in zip(parts[::2], parts[1::2], strict=True)]


def _findings(text: str, fatal: Callable[[str], bool]) -> list[Finding]:
    """Returns warnings, errors and crashes, each in one line: the first line of the message, and the failure."""
    found = []
    for level, message in messages(text):
        if level != "INFO":
            for part in message.split("\n" + "-" * 30 + "\n"):
                lines = [line.strip() for line in part.splitlines() if line.strip()]
                tests = [line for line in lines[1:] if line.startswith("failed test: ")]
                found.append(Finding(_short(" ".join([*lines[:1], *tests])), fatal(level)))
    return list(dict.fromkeys(found))


def _short(line: str) -> str:
    return line if len(line) <= 300 else f"{line[:300]} ..."


def _sense(logs: Sequence[Path]) -> Verdict:
    """Checks that each log can be true; unreadable logs are left to `arrangement`."""
    verdict = Verdict("sense of the logs")
    for log in logs:
        with contextlib.suppress(ValueError):
            verdict.findings += senseless(log)
    return verdict


def _compliance(logs: Sequence[Path], texts: Sequence[str], pinned: Collection[str]) -> Verdict:
    """Checks each log by itself: the package checker tolerates any one malformed log. pinned: keys whose values may be
    refused."""
    verdict = Verdict("compliance", text="\n".join(texts))
    for log, text in zip(logs, texts, strict=True):
        success = any(level == "INFO" and message.startswith("SUCCESS") for level, message in messages(text))
        try:
            converged = read_run(log).status == "success"
        except ValueError:
            converged = True  # an unreadable log is not a run that missed its target
        if not converged:
            # The checker passes an aborted run whose AUC once reached the target. One such run is allowed;
            # `arrangement` counts.
            verdict.findings.append(Finding(f"{log.name} did not converge: it counts as the slowest run", fatal=False))
            continue
        found = [f for f in _findings(text, lambda level: not success) if f.text != "FAILED"]  # noqa: B023
        if not success and not found:
            found = [Finding("the checker did not end with SUCCESS")]
        of_data = dict.fromkeys(key for finding in found if (key := _refused_key(finding.text)) in pinned)
        if of_data:
            found = [finding for finding in found if _refused_key(finding.text) not in pinned]
            found.append(
                Finding(f"{', '.join(map(str, of_data))}: the rules accept only those of MLPerf's own data", False)
            )
        verdict.findings += [Finding(f"{log.name}: {finding.text}", finding.fatal) for finding in found]
    return verdict


def _refused_key(finding: str) -> str | None:
    """Returns the key whose value a finding of the compliance checker refuses; None for another finding."""
    found = re.match(r"CHECK for '(\w+)' failed", finding)
    return found[1] if found else None


def _packaged(text: str, benchmark: str, logs: int, pinned: Collection[str]) -> Verdict:
    """Returns the package checker's verdict; its messages about single logs are left to the compliance checker. pinned:
    keys whose values may be refused, and with them the package."""
    verdict = Verdict("package", text=text)
    quiet = ("CHECK for", "Failed ", "Required ", "FAILED")
    verdict.findings = [
        replace(finding, fatal=False) if pinned and "files do not comply" in finding.text else finding
        for finding in _findings(text, lambda level: level in ("ERROR", "CRITICAL", "CRASH"))
        if not finding.text.startswith(quiet)
    ]
    checked = text.count("Running compliance on file:")
    if f"Skipping benchmark: {benchmark}" in text or checked != logs:
        verdict.findings.append(Finding(f"the checker read {checked} of {logs} logs"))
    if "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !" not in text and verdict.passed:
        verdict.findings.append(Finding("the checker did not end with SUCCESS", fatal=not pinned))
    return verdict


def _rcp(text: str, package: Package) -> Verdict:
    verdict = Verdict("RCP", _findings(text, lambda level: level != "WARNING"), text)
    if "RCP test PASSED" not in text and verdict.passed:
        verdict.findings.append(Finding("the checker did not end with PASSED"))
    figures = _figures(text)
    if figures is not None:
        mean = figures.mean_epochs
        of = f"{mean:,.0f} samples" if rules_of(package.benchmark).counts_samples else f"{mean:.4f} epochs"
        note = f"mean of {of} to converge; factor on the score {figures.scaling:.6f}"
        verdict.findings.append(Finding(note, fatal=False))
    return verdict


def _figures(text: str) -> Convergence | None:
    mean = re.search(r"Submission mean epochs: ([\d.]+)", text)
    factor = re.search(r"normalized by factor of [\d.]+ / [\d.]+ = ([\d.]+)", text)
    return Convergence(float(mean[1]), float(factor[1]) if factor else 1.0) if mean else None


def _plain(checker: str, text: str, success: str) -> Verdict:
    verdict = Verdict(checker, _findings(text, lambda level: level != "WARNING"), text)
    if success not in text and verdict.passed:
        verdict.findings.append(Finding("the checker did not report success"))
    return verdict
