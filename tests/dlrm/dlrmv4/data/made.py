"""Random caches, small enough for the plain definitions."""

from pathlib import Path

import numpy as np
import torch

from dlrm_bench.dlrm.dlrmv4.data.cache import Cache
from dlrm_bench.dlrm.dlrmv4.data.cache_writer import CacheWriter, Events
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits
from dlrm_bench.dlrm.dlrmv4.samples import Samples

ITEMS = 500


def random_cache(folder: Path, limits: Limits, users: int, events: int, seed: int = 0) -> Cache:
    """Users of 1 to `events` events, some of one pool alone, some with none."""
    rng = np.random.default_rng(seed)
    with CacheWriter(folder / limits.cache_name, limits) as writer:
        for uid in np.sort(rng.choice(10 * users, users, replace=False)):
            count = int(rng.integers(1, events + 1))
            mix = rng.dirichlet([0.5] * 6)
            kind = rng.choice(6, count, p=mix)
            writer.append(
                Events(
                    uid=np.full(count, uid, dtype=np.int64),
                    item=rng.integers(0, ITEMS, count),
                    timestamp=np.sort(rng.integers(0, 20_000, count)) * 5,
                    event_type=np.maximum(kind - 1, 0),
                    is_organic=rng.integers(0, 2, count).astype(np.int8),
                    played_ratio=np.where(kind == 0, rng.integers(0, 50, count), 80).astype(np.float32),
                )
            )
    return Cache.open(folder / limits.cache_name)


def random_maps(seed: int = 0) -> ItemMaps:
    rng = np.random.default_rng(seed)
    return ItemMaps(*(rng.integers(0, 90, ITEMS).astype(np.int32) for _ in range(2)))


def assert_equal(found: Samples, expected: Samples) -> None:
    """Every field, to the bit and in type."""
    for name in Samples.__dataclass_fields__:
        mine, other = getattr(found, name), getattr(expected, name)
        assert mine.dtype == other.dtype, name
        assert torch.equal(mine, other), name
