"""Small raw days like Criteo's, and the reference's results for them."""

import gzip
from pathlib import Path

import numpy as np
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, INT_FEATURE_COUNT, BinaryCriteoUtils

from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from tests.dlrm.conftest import reference_tables


def raw_lines(rng: np.random.Generator, rows: int, hashes: int = 400) -> list[str]:
    """Lines with empty fields, negative integers, hash 0 and the largest hash among them.

    hashes: distinct ones of a feature, skewed, the same in all days; features 5 and 16 have three.
    """
    labels = rng.integers(0, 2, rows)
    dense = (rng.lognormal(2, 2, (rows, INT_FEATURE_COUNT)) - 3).astype(int)
    known = np.random.default_rng(99).integers(0, 2**32, (CAT_FEATURE_COUNT, hashes))
    known[:, :2] = 0, 2**32 - 1
    picks = (rng.random((rows, CAT_FEATURE_COUNT)) ** 3 * hashes).astype(int)
    picks[:, [5, 16]] %= 3
    lines = []
    for row in range(rows):
        fields = [str(value) for value in (labels[row], *dense[row])]
        fields += [f"{known[feature, pick]:08x}" for feature, pick in enumerate(picks[row])]
        for field in np.flatnonzero(rng.random(len(fields)) < 0.1):
            fields[field] = ""
        lines.append("\t".join(fields))
    return lines


def write_raw_days(raw: Path, rows: tuple[int, ...], zipped: tuple[int, ...] = (), hashes: int = 400) -> None:
    """Writes day_0, day_1, ... with these numbers of rows; those in `zipped` as day_i.gz."""
    raw.mkdir(exist_ok=True)
    rng = np.random.default_rng(7)
    for day, count in enumerate(rows):
        text = "".join(f"{line}\n" for line in raw_lines(rng, count, hashes)).encode()
        if day in zipped:
            (raw / f"day_{day}.gz").write_bytes(gzip.compress(text))
        else:
            (raw / f"day_{day}").write_bytes(text)


def run_reference(raw: Path, temporary: Path, out: Path, days: int, frequency_threshold: int) -> None:
    """The 1-hot files by torchrec, as the reference's shell script calls it, on plain raw days."""
    for folder in (temporary, temporary / "contiguous", out):
        folder.mkdir()
    names = [f"day_{day}" for day in range(days)]
    rows = {}
    for day, name in enumerate(names):
        kinds = ("dense", "sparse", "labels")
        BinaryCriteoUtils.tsv_to_npys(str(raw / name), *(str(temporary / f"{name}_{kind}.npy") for kind in kinds))
        if day < days - 1:
            rows[day] = len(np.load(temporary / f"{name}_labels.npy"))
    BinaryCriteoUtils.sparse_to_contiguous(
        [str(temporary / f"{name}_sparse.npy") for name in names],
        str(temporary / "contiguous"),
        frequency_threshold,
        output_file_suffix=".npy",
    )
    BinaryCriteoUtils.shuffle(str(temporary), str(temporary / "contiguous"), str(out), rows, days=days)


def reference_multi_hot(one_hot: np.ndarray, model: ModelConfig) -> dict[str, np.ndarray]:
    """The expanded ids of a day, as the reference's script to materialise them says."""
    tables = reference_tables(model.rows, model.multi_hot_sizes)
    return {
        str(feature): table[one_hot[:, feature] % rows]
        for feature, (table, rows) in enumerate(zip(tables, model.rows, strict=True))
    }
