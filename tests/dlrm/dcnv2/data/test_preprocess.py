"""Raw days to MLPerf's files: equal to the reference's byte by byte, in small pieces, killed and started again."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrec.datasets.criteo import BinaryCriteoUtils

from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.dcnv2.data import permutation, preprocess_job, raw_tsv, shuffled_rows
from dlrm_bench.dlrm.dcnv2.data.dataset import open_dataset
from dlrm_bench.dlrm.dcnv2.data.manifest import MARKER, read_manifest
from dlrm_bench.dlrm.dcnv2.data.preprocess import PreprocessConfig, main, preprocess
from dlrm_bench.dlrm.dcnv2.data.preprocess_job import SCRATCH
from tests.dlrm.dcnv2.data.raw_days import reference_multi_hot, run_reference, write_raw_days
from tests.launched import fork, wait

ROWS = (700, 310, 1, 529, 401)
LAST = len(ROWS) - 1
MODEL = preset("smoke").model
FLAGS = ("--preset", "smoke", "--frequency-threshold", "2")


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    write_raw_days(tmp_path / "raw", ROWS)
    return tmp_path / "raw"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch)


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, buckets and pieces a day."""
    monkeypatch.setattr(raw_tsv, "BLOCK_BYTES", 40_000)
    monkeypatch.setattr(permutation, "BLOCK_ROWS", 130)
    monkeypatch.setattr(shuffled_rows, "BUCKET_ROWS", 170)
    monkeypatch.setattr(preprocess_job, "BUCKET_ROWS", 170)
    monkeypatch.setattr(preprocess_job, "ROWS_AT_ONCE", 113)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("day_*")}


def same(found: Path, expected: Path) -> bool:
    return found.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("threshold", [0, 1, 3])
@pytest.mark.usefixtures("small_pieces")
def test_one_hot_files_are_the_references(tmp_path: Path, raw: Path, threshold: int) -> None:
    out, reference = tmp_path / "out", tmp_path / "reference"
    run_reference(raw, tmp_path / "temporary", reference, len(ROWS), threshold)
    preprocess(PreprocessConfig(raw=raw, out=out, formats="one_hot", preset="smoke", frequency_threshold=threshold))
    assert len(list(out.iterdir())) == 3 * len(ROWS) + 1
    for day in range(len(ROWS)):
        for kind in ("dense", "labels", "sparse"):
            name = f"day_{day}_{kind}.npy"
            if (day, kind) == (LAST, "sparse"):
                # torchrec leaves these in 64 bits, which MLPerf's files do not have.
                np.save(reference / name, np.load(reference / name).astype(np.int32))
            assert same(out / name, reference / name), name


@pytest.mark.usefixtures("small_pieces")
def test_multi_hot_files_are_the_references(tmp_path: Path, raw: Path) -> None:
    out = tmp_path / "out"
    manifest, done = preprocess(PreprocessConfig(raw=raw, out=out, preset="smoke"))
    assert done
    assert manifest.samples_per_day == list(ROWS)
    for day in range(len(ROWS)):
        expected = reference_multi_hot(np.load(out / f"day_{day}_sparse.npy"), MODEL)
        np.savez(tmp_path / "expected.npz", **expected)
        assert same(out / f"day_{day}_sparse_multi_hot.npz", tmp_path / "expected.npz")


def test_sizes_of_pieces_do_not_matter(tmp_path: Path, raw: Path, request: pytest.FixtureRequest) -> None:
    preprocess(PreprocessConfig(raw=raw, out=tmp_path / "large", preset="smoke"))
    request.getfixturevalue("small_pieces")
    preprocess(PreprocessConfig(raw=raw, out=tmp_path / "small", preset="smoke"))
    assert contents(tmp_path / "large") == contents(tmp_path / "small")


def test_workers_write_the_same(tmp_path: Path, raw: Path, request: pytest.FixtureRequest) -> None:
    """And go on after an error: day 1 cannot be written while later ones are."""
    request.getfixturevalue("small_pieces")
    preprocess(PreprocessConfig(raw=raw, out=tmp_path / "one", preset="smoke"))
    config = PreprocessConfig(raw=raw, out=tmp_path / "three", preset="smoke", workers=3)
    write_day = preprocess_job.PreprocessJob._write_day

    def failing(job: preprocess_job.PreprocessJob, day: int, *arguments: Any) -> list[Path]:
        if day == 1:
            raise ValueError("the disk is full")
        return write_day(job, day, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess_job.PreprocessJob, "_write_day", failing)
        with pytest.raises(ValueError, match="the disk is full"):
            preprocess(config)
    preprocess(config)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    with pytest.raises(ValueError, match="--workers is 0"):
        PreprocessConfig(raw=raw, out=tmp_path, workers=0)


def test_gzip_is_the_same(tmp_path: Path, raw: Path) -> None:
    write_raw_days(tmp_path / "zipped", ROWS, zipped=(0, 3, 4))
    for name in ("raw", "zipped"):
        preprocess(PreprocessConfig(raw=tmp_path / name, out=tmp_path / f"{name}_out", preset="smoke"))
    assert contents(tmp_path / "raw_out") == contents(tmp_path / "zipped_out")


def test_training_ids_are_rounded_as_float32(tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids past 2^24, which no small file has: the reference's shuffle is given the same ones."""
    far = (1 << 24) - 3
    monkeypatch.setattr(preprocess_job, "FIRST_ID", far + 2)
    out, reference, temporary = tmp_path / "out", tmp_path / "reference", tmp_path / "temporary"
    preprocess(PreprocessConfig(raw=raw, out=out, formats="one_hot", preset="smoke"))
    run_reference(raw, temporary, reference, len(ROWS), 0)
    rows = dict(enumerate(ROWS[:-1]))
    for day in range(len(ROWS)):
        name = temporary / "contiguous" / f"day_{day}_sparse.npy"
        np.save(name, np.load(name) + far)
    shutil.rmtree(reference)
    reference.mkdir()
    BinaryCriteoUtils.shuffle(str(temporary), str(temporary / "contiguous"), str(reference), rows, days=len(ROWS))
    ids = np.load(out / "day_0_sparse.npy")
    assert (ids > 1 << 24).any()
    assert (ids[ids > 1 << 24] % 2 == 0).all()
    for day in range(LAST):
        assert same(out / f"day_{day}_sparse.npy", reference / f"day_{day}_sparse.npy")
    np.testing.assert_array_equal(
        np.load(out / f"day_{LAST}_sparse.npy"), np.load(reference / f"day_{LAST}_sparse.npy")
    )


def test_training_reads_both_formats(tmp_path: Path, raw: Path) -> None:
    preprocess(PreprocessConfig(raw=raw, out=tmp_path / "out", preset="smoke"))
    data = [DataConfig(source=s, path=tmp_path / "out", train_days=LAST) for s in ("multi_hot", "one_hot")]  # type: ignore[arg-type]
    multi_hot, one_hot = (open_dataset(d, MODEL, seed=0) for d in data)
    assert multi_hot.train_samples == sum(ROWS[:-1])
    assert multi_hot.eval_samples == 201
    assert multi_hot.best_auc is None
    for a, b in zip(multi_hot.train_batches(0, 1, 100), one_hot.train_batches(0, 1, 100), strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)


def main_until(place: str, calls: int, arguments: list[str]) -> int:
    """Runs main() in small pieces, in a forked process that is killed at call number `calls` of `place`."""
    patch = pytest.MonkeyPatch()
    cut_small(patch)
    owner = os if place == "replace" else preprocess_job
    wrapped = getattr(owner, place)
    left = iter(range(calls))

    def until(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return wrapped(*args, **kwargs)

    patch.setattr(owner, place, until)
    return main(arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the result of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    write_raw_days(folder / "raw", ROWS)
    assert main([str(folder / "raw"), str(folder / "out"), *FLAGS]) == 0
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "calls"),
    [
        ("read_blocks", 2),
        ("_replace", 1),
        ("_write_json", 3),
        ("write_header", 10),
        ("scatter", 11),
        ("checksum", 5),
        ("ids_of_numbers", 9),
        ("write_destinations", 0),
        ("_pieces", 150),
        ("gather_range", 3),
        ("remove_gathered", 2),
        ("replace", 20),
    ],
)
def test_killed_anywhere_the_next_start_completes_the_same_files(
    tmp_path: Path, raw: Path, whole: Path, place: str, calls: int
) -> None:
    out = tmp_path / "out"
    arguments = [str(raw), str(out), *FLAGS]
    killed = wait(fork(1, tmp_path, main_until, place, calls, arguments), tmp_path)
    assert killed.statuses == [-signal.SIGKILL], killed.outputs
    assert (out / MARKER).exists()
    assert read_manifest(out) is None
    resumed = wait(fork(1, tmp_path, main_until, place, 10**9, arguments), tmp_path)
    assert resumed.statuses == [0], resumed.outputs
    assert contents(out) == contents(whole)
    assert read_manifest(out) == read_manifest(whole)
    assert not (out / SCRATCH).exists()
    assert not (out / MARKER).exists()


def start(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "dlrm_bench.dlrm.dcnv2.data.preprocess", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_command_line(tmp_path: Path, raw: Path) -> None:
    out = tmp_path / "out"
    first = start(str(raw), str(out), "--preset", "smoke", "--formats", "one_hot")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"wrote {out}: 5 days, 1540 training and 201 evaluation samples\n"
    for title in ("1/5 parse", "2/5 number hashes", "3/5 shuffle", "4/5 scatter rows", "5/5 write days"):
        assert f"{title}: done in" in first.stderr
    again = start(str(raw), str(out), "--preset", "smoke", "--formats", "one_hot")
    assert again.returncode == 0
    assert again.stdout.startswith("nothing to do")
    other = start(str(raw), str(out), "--preset", "smoke")
    assert other.returncode == 2
    assert other.stderr == (
        f"error: {out} holds a data set made with formats one_hot, not both: choose another OUT, or remove it\n"
    )
    assert not (out / MARKER).exists()


def test_malformed_rows_end_it_and_mending_them_lets_it_go_on(tmp_path: Path, raw: Path) -> None:
    good = (raw / "day_3").read_bytes()
    lines = good.split(b"\n")
    lines[17] = lines[17].rpartition(b"\t")[0] + b"\tnot hex!"
    (raw / "day_3").write_bytes(b"\n".join(lines)[: len(good)])
    config = PreprocessConfig(raw=raw, out=tmp_path / "out", preset="smoke")
    with pytest.raises(ValueError, match=r"day_3: line 18, column 40 \(cat_25\): 'not hex!' is not a hash"):
        preprocess(config)
    with pytest.raises(ValueError, match="unfinished data set"):
        open_dataset(DataConfig(source="one_hot", path=tmp_path / "out"), MODEL, seed=0)
    (raw / "day_3").write_bytes(good)
    assert preprocess(config)[1]
    whole = tmp_path / "whole"
    preprocess(PreprocessConfig(raw=raw, out=whole, preset="smoke"))
    assert contents(config.out) == contents(whole)


def test_state_of_other_parameters_is_not_continued(tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preprocess_job, "write_destinations", interrupt)
        with pytest.raises(KeyboardInterrupt):
            preprocess(PreprocessConfig(raw=raw, out=tmp_path / "out", preset="smoke"))
    with pytest.raises(ValueError, match="made with frequency_threshold 0, not 5"):
        preprocess(PreprocessConfig(raw=raw, out=tmp_path / "out", preset="smoke", frequency_threshold=5))


def test_foreign_day_files_are_left_alone(tmp_path: Path, raw: Path) -> None:
    (tmp_path / "day_0_sparse.npy").write_text("terabytes")
    with pytest.raises(ValueError, match=r"holds day_0_sparse.npy, which this program did not make"):
        preprocess(PreprocessConfig(raw=raw, out=tmp_path, preset="smoke"))
    assert (tmp_path / "day_0_sparse.npy").read_text() == "terabytes"
    assert not (tmp_path / MARKER).exists()


def test_integers_too_far_apart(tmp_path: Path, raw: Path) -> None:
    text = (raw / "day_1").read_text().split("\n")
    for line, value in ((3, -(2**31)), (4, 5)):
        fields = text[line].split("\t")
        fields[6] = str(value)
        text[line] = "\t".join(fields)
    (raw / "day_1").write_text("\n".join(text))
    with pytest.raises(ValueError, match=r"day_1: its integers range from -2147483648 to \d+"):
        preprocess(PreprocessConfig(raw=raw, out=tmp_path / "out", preset="smoke"))


@pytest.mark.parametrize("raw_name", ["nowhere", "out"])
def test_no_raw_days(tmp_path: Path, raw_name: str) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=f"{raw_name} (is not a directory|does not exist|has no files day_0)"):
        preprocess(PreprocessConfig(raw=tmp_path / raw_name, out=tmp_path / "out2", preset="smoke"))


def test_one_day_is_too_few(tmp_path: Path) -> None:
    write_raw_days(tmp_path / "raw", (5,))
    with pytest.raises(ValueError, match="one day only"):
        preprocess(PreprocessConfig(raw=tmp_path / "raw", out=tmp_path / "out", preset="smoke"))


def test_a_negative_threshold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--frequency-threshold is -1"):
        PreprocessConfig(raw=tmp_path, out=tmp_path, frequency_threshold=-1)
