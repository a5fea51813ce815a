"""The case made by the reference's own code (tests/data/dlrmv4/make_reference.py)."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.dlrm.dlrmv4.data.cache import COLUMNS, Cache
from dlrm_bench.dlrm.dlrmv4.data.cache_writer import CacheWriter, Events
from dlrm_bench.dlrm.dlrmv4.data.item_maps import FOLDER, ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits

REFERENCE = Path(__file__).resolve().parents[3] / "data" / "dlrmv4" / "reference"
REFERENCE_CACHE = REFERENCE / "processed_5b" / "hstu_cache_L9"


@pytest.fixture(scope="session")
def answers() -> dict[str, Any]:
    """The reference's limits, windows, shares and samples."""
    return json.loads((REFERENCE / "samples.json").read_text())


@pytest.fixture(scope="session")
def limits(answers: Mapping[str, Any]) -> Limits:
    history, scan, window = (answers[name] for name in ("history", "scan", "window_seconds"))
    return Limits(history=history, min_history=history, scan=scan, window_seconds=window)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory, limits: Limits) -> Path:
    """A folder of data with the reference's events, written by CacheWriter with the case's limits."""
    folder = tmp_path_factory.mktemp("data")
    (folder / FOLDER).mkdir()
    for name in ("artist", "album"):
        shutil.copy(REFERENCE / "raw" / f"{name}_item_mapping.parquet", folder / FOLDER)
    with CacheWriter(folder / "processed_5b" / limits.cache_name, limits) as writer:
        writer.append(reference_events())
    return folder


def reference_events() -> Events:
    columns = {name: np.load(REFERENCE_CACHE / f"{name}.npy") for name in COLUMNS}
    return Events(
        uid=columns["flat_uid"],
        item=columns["flat_item_ids"],
        timestamp=columns["flat_timestamps"],
        event_type=columns["flat_event_types"],
        is_organic=columns["flat_is_organic"],
        played_ratio=columns["flat_played_ratio"],
    )


@pytest.fixture(scope="session")
def cache(root: Path, limits: Limits) -> Cache:
    return Cache.open(root / "processed_5b" / limits.cache_name)


@pytest.fixture(scope="session")
def maps(root: Path) -> ItemMaps:
    return ItemMaps.open(root)
