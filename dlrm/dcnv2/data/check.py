"""Checks a directory of day files: dlrm-bench data check DIR

Each line on stdout is one finding, with the file and the fix; the exit status is 2 if there is a finding. Files in the
manifest are compared with their checksums. In all other files, such as MLPerf's own, every value is checked: types,
shapes, sizes, ids within their tables, labels 0 or 1, finite dense features. If any day has MLPerf's number of samples,
all days must. --mlperf requires MLPerf's own set: its numbers of samples and the MD5 sum of every file.
"""

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlrm_bench.dlrm.data.check import CheckConfig, run_check
from dlrm_bench.dlrm.data.checksums import changed_files
from dlrm_bench.dlrm.data.npy import COPY_AGAIN
from dlrm_bench.dlrm.data.paths import why_not
from dlrm_bench.dlrm.data.steps import Advance, step
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data import criteo
from dlrm_bench.dlrm.dcnv2.data.expansion import ExpansionTables
from dlrm_bench.dlrm.dcnv2.data.file_batches import FileBatches
from dlrm_bench.dlrm.dcnv2.data.manifest import MARKER, Manifest, read_manifest
from dlrm_bench.dlrm.dcnv2.data.mlperf_checksums import MLPERF_MD5
from dlrm_bench.dlrm.dcnv2.presets import training

READ_SAMPLES = 1 << 15
DAY_FILE = re.compile(r"day_(\d+)_(dense\.npy|labels\.npy|sparse\.npy|sparse_multi_hot\.npz)")

# Samples of Criteo's 24 days; the first 23 add up to MLPerf's 4,195,197,692 training samples.
# fmt: off
MLPERF_DAY_SAMPLES = (
    195841983, 199563535, 196792019, 181115208, 152115810, 172548507, 204846845, 200801003,
    193772492, 198424372, 185778055, 153588700, 169003364, 194216520, 194081279, 187154596,
    177984934, 163382602, 142061091, 156534237, 193627464, 192215183, 189747893, 178274637,
)
# fmt: on


@dataclass(kw_only=True, slots=True, frozen=True)
class DayFilesCheck(CheckConfig):
    """Checks a directory of day files. With --mlperf they must be MLPerf's own set, or made from Criteo's raw days."""

    preset: str = "mlperf-dcnv2"
    """The preset whose tables and features the files must fit, if there is no manifest."""
    table_scale: float | None = None
    """Factor on the preset's table rows, as --model.table-scale of the run; by default the preset's own."""
    raw_ids: bool = False
    """Whether ids are any int64, as --model.raw-ids of the run, if there is no manifest."""


@dataclass(frozen=True, slots=True)
class CheckedDays:
    """The result of a check."""

    findings: list[str]
    days: int
    """Number of days with at least one file."""
    samples: int
    """Number of samples of all days that could be opened."""

    @property
    def counts(self) -> str:
        """Days and samples, in words."""
        return f"{self.days} days, {self.samples} samples"


def check(config: DayFilesCheck) -> CheckedDays:
    """Checks a directory; ValueError if it does not exist, or the preset is unknown."""
    directory = config.directory
    run = training(config.preset)
    model = run.model if config.table_scale is None else replace(run.model, table_scale=config.table_scale)
    model = replace(model, raw_ids=config.raw_ids)
    if not directory.is_dir():
        raise ValueError(f"{directory} {why_not(directory)}: name the directory of the day files")
    findings: list[str] = []
    if (directory / MARKER).exists():
        findings.append(f"{directory / MARKER}: the data set is unfinished: run the program that makes it again")
    manifest = None
    try:
        manifest = read_manifest(directory)
    except ValueError as error:
        findings.append(str(error))
    if manifest:
        model = replace(
            model,
            num_embeddings=tuple(manifest.rows),
            multi_hot_sizes=tuple(manifest.multi_hot_sizes),
            table_scale=1.0,
            dense_in_features=manifest.dense_in_features,
            raw_ids=manifest.raw_ids,
        )
    found = {path.name for path in directory.iterdir() if DAY_FILE.fullmatch(path.name)}
    known = manifest.files if manifest else {}
    names = sorted(found | known.keys(), key=_order)
    size = sum((directory / name).stat().st_size for name in found)
    with step("check", max(size, 1) * (2 if config.mlperf else 1), "MB") as advance:
        if config.mlperf:
            findings += _check_md5(directory, names, advance)
        changed_days = set[int]()
        for name in names:
            lines = list(changed_files(directory, known, [name], whole=not config.fast))
            findings += lines
            if lines:
                changed_days.add(_order(name)[0])
            if name in known:
                advance(known[name].bytes)
        samples = []
        for day in range(_days(found | known.keys())):
            count, of_day = 0, list[str]()
            if day not in changed_days:
                unknown = not known.keys() >= {name for name in found if _order(name)[0] == day}
                count, of_day = _check_day(directory, day, model, found, unknown and not config.fast, advance)
            samples.append(count)
            findings += of_day
    findings += _check_samples(directory, samples, None if config.mlperf else manifest, config.mlperf)
    if not names:
        findings.append(f"{directory} holds no day files: name the directory of day_0_dense.npy and the others")
    return CheckedDays(findings, len(samples), sum(samples))


def _order(name: str) -> tuple[int, str]:
    match = re.match(r"day_(\d+)", name)
    return (int(match[1]) if match else -1, name)


def _days(names: set[str]) -> int:
    return max((_order(name)[0] for name in names), default=-1) + 1


def _check_day(
    directory: Path, day: int, model: ModelConfig, found: set[str], values: bool, advance: Advance
) -> tuple[int, list[str]]:
    """Returns the number of samples (0 if unknown) and the findings of a day, in each available format."""
    formats: list[type[criteo.Day]] = []
    if criteo.multi_hot_file(directory, day).name in found:
        formats.append(criteo.MultiHotDay)
    if criteo.one_hot_file(directory, day).name in found:
        formats.append(criteo.OneHotDay)
    if not formats:
        one_hot, multi_hot = criteo.one_hot_file(directory, day), criteo.multi_hot_file(directory, day)
        return 0, [f"{multi_hot} does not exist, nor does {one_hot.name}: copy the missing day"]
    samples, findings = 0, list[str]()
    for kind in formats:
        try:
            as_stored = model
            if kind is criteo.OneHotDay:
                as_stored = replace(model, multi_hot_sizes=(1,) * model.num_features)
            opened = kind(directory, day, as_stored)
            samples = opened.num_samples
            if isinstance(opened, criteo.OneHotDay):
                opened.tables = ExpansionTables((None,) * model.num_features)
            if values:
                findings += _check_values(opened, as_stored)
                advance(_bytes_of(directory, day, found) / len(formats))
        except ValueError as error:
            findings.append(str(error))
    return samples, list(dict.fromkeys(findings))  # Both formats share dense features and labels.


def _check_values(day: criteo.Day, model: ModelConfig) -> Iterator[str]:
    """Yields the first invalid value, if any."""
    batches = range(-(-day.num_samples // READ_SAMPLES))
    try:
        for _ in FileBatches([(day, day.num_samples)], model, batches, 0, 1, READ_SAMPLES, pin=False):
            pass
    except ValueError as error:
        yield str(error)


def _bytes_of(directory: Path, day: int, found: set[str]) -> int:
    return sum((directory / name).stat().st_size for name in found if _order(name)[0] == day)


def _check_md5(directory: Path, names: Sequence[str], advance: Advance) -> Iterator[str]:
    """Yields the files of MLPerf's set whose bytes differ."""
    for name in names:
        path = directory / name
        if name in MLPERF_MD5 and path.is_file():
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "md5").hexdigest()
            if found != MLPERF_MD5[name]:
                other = next((other for other, md5 in MLPERF_MD5.items() if md5 == found), None)
                fix = COPY_AGAIN if other is None else f"it is {other}; restore the files' names"
                yield f"{path} is not MLPerf's: its MD5 sum is {found} instead of {MLPERF_MD5[name]}: {fix}"
            advance(path.stat().st_size)


def _check_samples(
    directory: Path, samples: Sequence[int], manifest: Manifest | None, mlperf: bool = False
) -> Iterator[str]:
    """Yields the days whose number of samples differs from the manifest's, or from MLPerf's."""
    if manifest:
        expected, whose = tuple(manifest.samples_per_day), "the manifest"
    elif mlperf or any(count == of_mlperf for count, of_mlperf in zip(samples, MLPERF_DAY_SAMPLES, strict=False)):
        expected, whose = MLPERF_DAY_SAMPLES, "MLPerf's set"
    else:
        return
    for day in range(max(len(expected), len(samples))):
        count = samples[day] if day < len(samples) else 0
        name = criteo.dense_file(directory, day)
        if day >= len(expected):
            yield f"{name} is one day more than the {len(expected)} of {whose}: remove the day"
        elif day >= len(samples):  # neither a file nor a checksum of it
            yield f"{name} does not exist, and {whose} has {len(expected)} days: copy the missing day"
        elif count and count != expected[day]:
            other = expected.index(count) if count in expected else None
            fix = COPY_AGAIN if other is None else f"that is day {other}'s number: restore the days' names"
            yield f"{name} has {count} samples, but {whose} has {expected[day]}: {fix}"


def main(args: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status, 2 if there are findings."""
    return run_check(DayFilesCheck, check, args, __doc__)


if __name__ == "__main__":
    sys.exit(main())
