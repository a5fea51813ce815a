"""How much disk preprocessing takes, told before it begins."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data.expansion import kept_ids
from dlrm_bench.dlrm.dcnv2.data.raw_tsv import DENSE_FIELDS, HASH_FIELDS, rows_per_byte
from dlrm_bench.dlrm.dcnv2.data.shuffled_rows import BUCKET_ROWS

SCRATCH_ROW_BYTES = 185
"""What lies in preprocess.partial for each row at most: parsed or scattered words, and the shuffle's steps."""
MARGIN = 0.95
"""Margin of the estimate: days are taken to have rows like their beginnings, and those of a day differ by less."""


def require_space(out: Path, raw: Sequence[Path], model: ModelConfig, formats: str, workers: int) -> None:
    """ValueError if the disk of `out` cannot take what preprocessing writes, beside what it wrote there before."""
    rows = [path.stat().st_size * rows_per_byte(path) for path in raw]
    needed = disk_bytes(rows, model, formats, workers)
    present = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) if out.is_dir() else 0
    place = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if MARGIN * (needed - present) > free:
        smaller = "" if formats == "one_hot" else ", or --formats one_hot, which are a sixth as large"
        raise ValueError(
            f"{out} has {free / 1e9:.1f} GB free, and about {(needed - present) / 1e9:.1f} GB will be needed for "
            f"{sum(rows) / 1e6:.1f} million samples: make room, choose another OUT{smaller}"
        )


def disk_bytes(rows: Sequence[float], model: ModelConfig, formats: str, workers: int = 1) -> float:
    """The most bytes on disk at a time, for days of so many rows.

    Scattered rows go away as days are written, bucket by bucket, so that the most is there either before the first day
    is written or with the last ones, whose ids then lie there twice, beside their scattered rows.
    """
    hot = model.ids_per_sample
    ids = {"one_hot": HASH_FIELDS, "multi_hot": hot, "both": HASH_FIELDS + hot}[formats]
    files = 4 * (DENSE_FIELDS + 1 + ids) * sum(rows)
    last = SCRATCH_ROW_BYTES * min(workers * max(rows) + BUCKET_ROWS, sum(rows)) + 4 * HASH_FIELDS * workers * max(rows)
    tables = 4 * sum(kept_ids(model.rows, model.multi_hot_sizes)) if formats != "one_hot" else 0
    return max(SCRATCH_ROW_BYTES * sum(rows), files + last) + tables
