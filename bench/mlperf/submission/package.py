"""The tree of a submission, as laid out by MLCommons' submission rules, and the defects of one.

ORG/systems/SYSTEM.json
ORG/results/SYSTEM/BENCHMARK/result_0.txt .. result_9.txt
ORG/benchmarks/BENCHMARK/implementations/{IMPLEMENTATION/..., SYSTEM/...}
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm_bench.bench.mlperf.published_logs import MLPerfRun, read_mlperf_log
from dlrm_bench.bench.mlperf.submission.system_description import (
    AVAILABILITY,
    malformed_fields,
    missing_fields,
    read_description,
)
from dlrm_bench.dlrm.benchmark import Ruleset
from dlrm_bench.dlrm.benchmarks import BENCHMARKS

RUNS = 10
"""Exact number of result logs of one benchmark on one system (training_rules.adoc)."""
RESULT_NAMES = tuple(f"result_{run}.txt" for run in range(RUNS))
BYPASSES = "package_checker_params"
"""File with which a submitter turns off the seed or the RCP checker."""


@dataclass(frozen=True, slots=True)
class Package:
    """One organisation's submission, and one of the systems in it, with one benchmark."""

    folder: Path
    """ORG."""
    system: str
    benchmark: str
    """Name of the benchmark in logs and folders."""

    def ruleset(self, version: str | None = None) -> str:
        """Returns a ruleset of the benchmark, by default the newest that knows it: the checkers' own default may not
        know it, and then passes or crashes. ValueError names the rulesets that do."""
        versions = rules_of(self.benchmark).versions
        if version is not None and version not in versions:
            raise ValueError(f"--ruleset {version} does not know {self.benchmark}: choose one of {', '.join(versions)}")
        return version or versions[-1]

    @property
    def description(self) -> Path:
        """The system description."""
        return self.folder / "systems" / f"{self.system}.json"

    @property
    def results(self) -> Path:
        """The folder of the result logs."""
        return self.folder / "results" / self.system / self.benchmark

    @property
    def implementations(self) -> Path:
        """The folder of the source code and of the system's scripts."""
        return self.folder / "benchmarks" / self.benchmark / "implementations"

    def logs(self) -> list[Path]:
        """Returns all files result_*.txt, by number."""
        return sorted(self.results.glob("result_*.txt"), key=lambda path: (len(path.name), path.name))


def open_packages(folder: Path, system: str | None = None) -> list[Package]:
    """Returns the packages in `folder`, which is ORG or holds only ORG: one for each system with results, or only for
    `system`, and for each benchmark of its results.

    ValueError, with the expected layout, if there is none.
    """
    roots = [path for path in (folder, *_folders(folder)) if (path / "results").is_dir()]
    if len(roots) != 1:
        found = f"{len(roots)} of them" if roots else "none"
        raise ValueError(
            f"{folder} is not a submission: it, or one folder in it, must hold results/SYSTEM/BENCHMARK; found {found}"
        )
    (root,) = roots
    known = _known()
    pairs = [(path.name, name) for path in _folders(root / "results") for name in known if (path / name).is_dir()]
    systems = list(dict.fromkeys(name for name, _ in pairs))
    if system is not None and system not in systems:
        raise ValueError(f"--system {system}: {root / 'results'} has {', '.join(systems) or 'no system'}")
    if not systems:
        raise ValueError(f"{root / 'results'} has no system with a folder {' or '.join(known)}: nothing to check")
    return [Package(root, name, benchmark) for name, benchmark in pairs if system in (None, name)]


def rules_of(benchmark: str | None) -> Ruleset:
    """Returns MLPerf's rules for a benchmark, by its name in logs; ValueError if it has none."""
    for known in BENCHMARKS:
        if known.name == benchmark and known.ruleset is not None:
            return known.ruleset
    raise ValueError(f"MLPerf's rules for {benchmark!r} are not known here: submit runs of {' or '.join(_known())}")


def _known() -> list[str]:
    return [benchmark.name for benchmark in BENCHMARKS if benchmark.ruleset is not None]


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def read_run(log: Path) -> MLPerfRun:
    """Returns the one run of a result log; ValueError if it has another number of runs."""
    runs = read_mlperf_log(log)
    if len(runs) != 1:
        raise ValueError(f"{log} holds {len(runs)} runs: a result log has one; split it")
    return runs[0]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or that a reviewer would ask about."""

    text: str
    """One line, which names the file and the fix."""
    fatal: bool = True
    """Whether it prevents the acceptance of the package."""


def arrangement(package: Package) -> Iterator[Finding]:
    """Yields defects that MLPerf's checkers miss, crash on, or accept against the rules."""
    names = [path.name for path in package.logs()]
    missing, odd = sorted(set(RESULT_NAMES) - set(names)), sorted(set(names) - set(RESULT_NAMES))
    if len(names) != RUNS:
        which = "; ".join(f"{', '.join(n)} {word}" for n, word in ((missing, "missing"), (odd, "too many")) if n)
        yield Finding(f"{package.results} has {len(names)} result logs, but a submission exactly {RUNS}: {which}")
    elif odd:
        text = f"{package.results}: {', '.join(odd)}: the names by the rules are result_0.txt to result_9.txt"
        yield Finding(text, fatal=False)
    for folder in (package.folder, package.results.parent, package.results):
        if (folder / BYPASSES).exists():
            yield Finding(f"{folder / BYPASSES} turns checkers off: the submitter must justify that", fatal=False)
    if not any(path.is_file() for path in package.implementations.rglob("*")):
        yield Finding(f"{package.implementations} holds no source code: the rules require it in both divisions")
    runs = []
    for log in package.logs():
        try:
            runs.append(read_run(log))
        except ValueError as error:
            yield Finding(str(error))
    yield from _description_findings(package, runs)
    yield from disagreements(runs)


def _description_findings(package: Package, runs: Sequence[MLPerfRun]) -> Iterator[Finding]:
    try:
        description = read_description(package.description)
    except ValueError as error:
        yield Finding(str(error))
        return
    path = package.description
    malformed = list(malformed_fields(path, description))
    yield from (Finding(text) for text in malformed)
    if missing := [field for field in missing_fields(description) if field in description]:
        yield Finding(f"{path}: still to be filled in: {', '.join(missing)}", fatal=False)
    for run in runs[:1]:
        if not malformed and description["division"] != run.division:
            # The checker would run neither seed nor RCP checks, or the wrong ones.
            yield Finding(
                f"{path}: division is {description['division']!r}, but {run.division!r} in the logs: edit the file"
            )
        expected = AVAILABILITY.get(run.availability or "")
        if not malformed and expected and description["status"] != expected:
            text = (
                f"{path}: status is {description['status']!r}, but {run.availability} of the logs is {expected!r} there"
            )
            yield Finding(f"{text}: edit the file")


def disagreements(runs: Sequence[MLPerfRun]) -> Iterator[Finding]:
    """Yields differences that runs of one submission must not have, and differences that they must have and lack."""
    for field in ("benchmark", "org", "division", "availability", "platform", "global_batch_size", "train_samples"):
        values = {getattr(run, field) for run in runs}
        if len(values) > 1:
            shown = ", ".join(sorted(map(str, values)))
            yield Finding(f"the runs differ in {field} ({shown}): submit runs of one configuration")
    if unseeded := [run.path.name for run in runs if run.seed is None]:
        text = f"no seed in {', '.join(unseeded)}: the closed division asks for one in each log"
        yield Finding(text, fatal=runs[0].division == "closed")
    seen: dict[int, Path] = {}
    for run in runs:
        if run.seed is not None and (first := seen.setdefault(run.seed, run.path)) != run.path:
            yield Finding(f"{run.path} has the seed {run.seed} of {first.name}: each run needs its own")
    begun: dict[float, Path] = {}
    for run in runs:
        if run.start_ms is not None and (first := begun.setdefault(run.start_ms, run.path)) != run.path:
            yield Finding(f"{run.path} began in the same millisecond as {first.name}: submit ten distinct runs")
    if len(failed := [run.path.name for run in runs if run.status != "success"]) > 1:
        yield Finding(f"{len(failed)} runs did not converge ({', '.join(failed)}): one may, and counts as the slowest")
