"""Writes tests/data/dlrmv4/reference/ with the reference's own code: python make_reference.py CHECKOUT

CHECKOUT is the folder recommendation/ of MLPerf's training repository (chriscai-amd/training at aed6a43, which has
mlcommons/training#889). It needs gin-config and tensorboard besides the requirements, and no GPU. `raw` is Yambda-like
events of seven users over 304 days, made here by a fixed seed, with ties in time, nulls, a user without listens, and
items without artist or album; `processed_5b` is what the reference makes of them; `samples.json` its anchors, windows,
ranks' shares and samples with histories of nine events, three of each pool.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

HERE = Path(__file__).resolve().parent / "reference"
HISTORY, SCAN, WINDOW, WORLD = 9, 30, 3_000_000, 2
EVENT_TYPES = ["listen", "like", "dislike", "unlike", "undislike"]


def raw_events() -> pl.DataFrame:
    """Rows as Yambda's multi_event.parquet has them, sorted by user and time."""
    rng = np.random.default_rng(4)
    tables = []
    for uid, count in ((2, 120), (3, 5), (5, 90), (6, 70), (9, 14), (11, 1), (12, 150)):
        time = np.sort(rng.integers(0, 26_265_600 // 5, count)) * 5
        time[1::7] = time[0::7][: len(time[1::7])]  # ties
        kind = rng.choice(5, count, p=[0.8, 0.1, 0.05, 0.03, 0.02])
        if uid == 9:
            kind[:] = 1
        ratio = np.where(rng.random(count) < 0.3, rng.integers(0, 50, count), rng.integers(50, 120, count))
        tables.append(
            pl.DataFrame(
                {
                    "uid": np.full(count, uid, np.uint32),
                    "timestamp": np.sort(time).astype(np.uint32),
                    "item_id": np.append(rng.integers(1, 60, count - 1), 59).astype(np.uint32),
                    "is_organic": rng.integers(0, 2, count).astype(np.uint8),
                    "played_ratio_pct": ratio.astype(np.uint16),
                    "track_length_seconds": rng.integers(60, 400, count).astype(np.uint32),
                    "event_type": [EVENT_TYPES[k] for k in kind],
                }
            )
        )
    events = pl.concat(tables).with_columns(pl.col("event_type").cast(pl.Enum(EVENT_TYPES)))
    listened = pl.col("event_type") == "listen"
    return events.with_columns(
        pl.when(listened).then(pl.col("played_ratio_pct")),
        pl.when(listened).then(pl.col("track_length_seconds")),
    )


def item_maps() -> dict[str, pl.DataFrame]:
    """Items 1 to 59, some of them with two artists, with none, or with no album."""
    rng = np.random.default_rng(5)
    items = np.concatenate([np.arange(1, 50), [7, 7, 30, 59]]).astype(np.uint32)
    artist = pl.DataFrame({"artist_id": rng.integers(1, 20, len(items)).astype(np.uint32), "item_id": items})
    items = np.arange(1, 48, 2).astype(np.uint32)
    album = pl.DataFrame({"album_id": rng.integers(1, 30, len(items)).astype(np.uint32), "item_id": items})
    return {"artist": artist, "album": album}


def preprocess(root: Path) -> Path:
    """Returns the folder that the reference's preprocessing filled."""
    from generative_recommenders.dlrm_v4.preprocess_public_data import DLRMYambdaProcessor

    (root / "raw" / "5b").mkdir(parents=True)
    (root / "shared_metadata").mkdir()
    shutil.copy(HERE / "raw" / "multi_event.parquet", root / "raw" / "5b")
    for name in ("artist", "album"):
        shutil.copy(HERE / "raw" / f"{name}_item_mapping.parquet", root / "shared_metadata")
    processor = DLRMYambdaProcessor(str(root), "5b")
    processor.download = lambda: None  # It would ask for a package even where nothing is left to download.
    processor.preprocess()
    return root / "processed_5b"


def open_dataset(processed: Path) -> Any:
    """Returns the reference's data set with this fixture's limits."""
    from generative_recommenders.dlrm_v4.configs import YAMBDA_5B_CROSS_SPECS, get_hstu_configs
    from generative_recommenders.dlrm_v4.datasets.yambda import DLRMv4YambdaDataset

    return DLRMv4YambdaDataset(
        get_hstu_configs("yambda-5b"),
        str(processed),
        str(processed.parent / "shared_metadata"),
        history_length=HISTORY,
        scan_window=SCAN,
        cross_specs=YAMBDA_5B_CROSS_SPECS,
        streaming_window_seconds=WINDOW,
    )


def sample(dataset: Any, anchor: int) -> dict[str, list[int]]:
    """Every feature of an anchor by name, as the model gets it."""
    features = {}
    for part in dataset._build_sample(int(dataset._positions[anchor]), 1):
        for name, feature in part.to_dict().items():
            if "dummy_watch" not in name:
                features[name] = feature.values().tolist()
    return features


def main(checkout: str) -> None:
    sys.path.insert(0, checkout)
    from generative_recommenders.dlrm_v4.train.utils import StreamingWindowSampler

    shutil.rmtree(HERE, ignore_errors=True)
    (HERE / "raw").mkdir(parents=True)
    raw_events().write_parquet(HERE / "raw" / "multi_event.parquet")
    for name, table in item_maps().items():
        table.write_parquet(HERE / "raw" / f"{name}_item_mapping.parquet")
    with tempfile.TemporaryDirectory() as folder:
        processed = preprocess(Path(folder) / "data")
        dataset = open_dataset(processed)
        windows = [dataset.window_indices(w).tolist() for w in range(dataset.num_windows())]
        shares = []
        for window in windows:
            for rank in range(WORLD):
                sampler = StreamingWindowSampler(rank, WORLD)
                sampler.set_window(np.asarray(window, dtype=np.int64))
                shares.append(list(sampler))
        samples = [sample(dataset, anchor) for anchor in range(len(dataset._positions))]
        cache = HERE / "processed_5b" / f"hstu_cache_L{HISTORY}"
        cache.mkdir(parents=True)
        for file in (processed / cache.name).iterdir():
            if "lock" not in file.name:
                shutil.copy(file, cache)
        for name in ("item_popularity.npy", "split_meta.json"):
            shutil.copy(processed / name, cache.parent)
    answers = {"history": HISTORY, "scan": SCAN, "window_seconds": WINDOW, "world_size": WORLD}
    answers |= {"windows": windows, "shares": shares, "samples": samples}
    (HERE / "samples.json").write_text(json.dumps(answers, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
