"""Disk space and time of preprocessing, estimated before it begins."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from dlrm_bench.dlrm.data.contiguous import FIRST_ID
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data.expansion import kept_ids
from dlrm_bench.dlrm.dcnv2.data.raw_tsv import DENSE_FIELDS, HASH_FIELDS, rows_per_byte
from dlrm_bench.dlrm.dcnv2.data.shuffled_rows import BUCKET_ROWS

SCRATCH_ROW_BYTES = 185
"""Maximum number of bytes per row in preprocess.partial: parsed or scattered words, and the shuffle's steps."""
MARGIN = 0.95
"""Margin of the estimate, which extrapolates each day's rows from its beginning; the actual difference is smaller."""


ROW_SECONDS = 12e-6
"""Time per row in all steps, one worker: 150,000 rows, both formats, took 1.7 s on a core of an Intel Xeon server."""
KEPT_ID_SECONDS, SKIPPED_ID_SECONDS = 30e-9, 5e-9
"""Time to draw and write one id of the expansion tables, and to draw one that is not kept (same core)."""


def require_space(out: Path, raw: Sequence[Path], model: ModelConfig, formats: str, workers: int) -> str:
    """Returns a sentence on the disk space and time that preprocessing needs, excluding files that it has already
    written.

    ValueError if the disk of `out` has too little space.
    """
    rows = [path.stat().st_size * rows_per_byte(path) for path in raw]
    needed = disk_bytes(rows, model, formats, workers)
    present = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) if out.is_dir() else 0
    place = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if MARGIN * (needed - present) > free:
        smaller = "" if formats == "one_hot" else ", or --formats one_hot, whose files are a sixth as large"
        raise ValueError(
            f"{out} has {free / 1e9:.1f} GB free, but about {(needed - present) / 1e9:.1f} GB are needed for "
            f"{sum(rows) / 1e6:.1f} million samples: make room, choose another OUT{smaller}"
        )
    return (
        f"about {sum(rows):,.0f} samples take up to {max(needed - present, 0) / 1e9:.2g} GB of disk and some "
        f"{_in_words(seconds(rows, model, formats, workers))} in all"
    )


def seconds(rows: Sequence[float], model: ModelConfig, formats: str, workers: int = 1) -> float:
    """Returns a rough time, in seconds, to preprocess days with these numbers of rows, with all workers busy."""
    of_rows = ROW_SECONDS * sum(rows) / workers
    if formats == "one_hot":
        return of_rows
    kept = sum(kept_ids(_rows_kept(rows, model), model.multi_hot_sizes))
    skipped = sum(kept_ids(model.rows, model.multi_hot_sizes)) - kept
    return of_rows + KEPT_ID_SECONDS * kept + SKIPPED_ID_SECONDS * skipped


def _in_words(time_s: float) -> str:
    for unit, length_s in (("hours", 3600), ("minutes", 60)):
        if time_s >= 1.5 * length_s:
            return f"{time_s / length_s:.0f} {unit}"
    return f"{max(time_s, 1):.0f} s"


def _rows_kept(rows: Sequence[float], model: ModelConfig) -> list[int]:
    """Returns the number of rows of each expansion table that ids can reach: a sample has one id per feature, numbered
    from FIRST_ID."""
    return [min(table_rows, int(sum(rows)) + FIRST_ID) for table_rows in model.rows]


def disk_bytes(rows: Sequence[float], model: ModelConfig, formats: str, workers: int = 1) -> float:
    """Returns the peak disk usage in bytes, for days with these numbers of rows.

    Scattered rows are removed bucket by bucket as days are written. So usage peaks either before the first day is
    written, or while the last days are: their ids are then on disk twice, in addition to their scattered rows.
    """
    hot = model.ids_per_sample
    ids = {"one_hot": HASH_FIELDS, "multi_hot": hot, "both": HASH_FIELDS + hot}[formats]
    files = 4 * (DENSE_FIELDS + 1 + ids) * sum(rows)
    last = SCRATCH_ROW_BYTES * min(workers * max(rows) + BUCKET_ROWS, sum(rows)) + 4 * HASH_FIELDS * workers * max(rows)
    tables = 4 * sum(kept_ids(_rows_kept(rows, model), model.multi_hot_sizes)) if formats != "one_hot" else 0
    return max(SCRATCH_ROW_BYTES * sum(rows), files + last) + tables
