"""Cross-cutting: the reference's own code reads made data as we do, where DLRMV4_REFERENCE names its checkout.

That is the folder recommendation/ of MLPerf's training repository, which needs gin-config besides the requirements.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_bench.dlrm.dlrmv4.data.builder import BatchBuilder
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache, find_cache
from dlrm_bench.dlrm.dlrmv4.data.generate import GenerateConfig, generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.data.item_maps import FOLDER, ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.packed import expand
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex
from dlrm_bench.dlrm.dlrmv4.samples import Samples

CHECKOUT = os.environ.get("DLRMV4_REFERENCE")
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="DLRMV4_REFERENCE names no checkout of the reference")


def open_reference(root: Path, cache: Cache) -> Any:
    """The reference's data set over our files."""
    assert CHECKOUT is not None
    if CHECKOUT not in sys.path:
        sys.path.insert(0, CHECKOUT)
    from generative_recommenders.dlrm_v4.configs import YAMBDA_5B_CROSS_SPECS, get_hstu_configs
    from generative_recommenders.dlrm_v4.datasets.yambda import DLRMv4YambdaDataset

    return DLRMv4YambdaDataset(
        get_hstu_configs("yambda-5b"),
        str(cache.folder.parent),
        str(root / FOLDER),
        history_length=cache.limits.history,
        scan_window=cache.limits.scan,
        cross_specs=YAMBDA_5B_CROSS_SPECS,
    )


def assert_sample(reference: Any, anchor: int, found: Samples, place: int, first: int) -> None:
    """All features of one sample; `first` is where its history begins."""
    from generative_recommenders.dlrm_v4.configs import YAMBDA_5B_CROSS_SPECS

    parts = reference._build_sample(int(reference._positions[anchor]), 1)
    expected = {name: feature.values().tolist() for part in parts for name, feature in part.to_dict().items()}
    own = slice(first, first + int(found.lengths[place]))
    for name, column in (
        *(("item_id", found.item), ("artist_id", found.artist), ("album_id", found.album)),
        *(("action_timestamp", found.timestamp), ("action_weight", found.action)),
    ):
        assert column[own].tolist() == expected[name], name
    for name, column in (
        *(("item_candidate_id", found.candidate_item), ("item_candidate_artist_id", found.candidate_artist)),
        *(("item_candidate_album_id", found.candidate_album), ("item_query_time", found.query_timestamp)),
        ("item_action_weight", found.labels),
    ):
        assert column[place].item() == expected[name][0], name
    names = ["uid", *(spec[0] for spec in YAMBDA_5B_CROSS_SPECS)]
    assert found.context[:, place].tolist() == [expected[name][0] for name in names]


@pytest.mark.parametrize("size", ["smoke", "full histories"])
def test_windows_and_samples_of_made_data(tmp_path, size):
    config = smoke_config(tmp_path) if size == "smoke" else GenerateConfig(out=tmp_path, users=200, items=100_000)
    generate(config)
    cache, maps = Cache.open(find_cache(tmp_path)), ItemMaps.open(tmp_path)
    index, reference = WindowIndex.open(cache), open_reference(tmp_path, cache)
    assert reference.num_windows() == len(index)
    for window in range(len(index)):
        assert np.array_equal(
            reference.window_indices(window), index.select(window, np.arange(index.anchors_of(window)))
        )
    window = len(index) * 3 // 4
    numbers = index.select(window, np.arange(min(600, index.anchors_of(window))))
    found = expand(
        BatchBuilder(cache, maps).build(numbers), torch.from_numpy(maps.artist), torch.from_numpy(maps.album)
    )
    firsts = (torch.cumsum(found.lengths, 0) - found.lengths).tolist()
    assert len(firsts) > 400
    for place, anchor in enumerate(numbers.tolist()):
        assert_sample(reference, anchor, found, place, firsts[place])
