"""Small data sets, written by numpy alone where the code under test reads them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.dcnv2.config import ModelConfig

ROWS = (50, 3, 1, 1000)
HOTS = (3, 1, 2, 4)


def tiny_model(rows: tuple[int, ...] = ROWS, hots: tuple[int, ...] = HOTS) -> ModelConfig:
    return ModelConfig(
        num_embeddings=rows,
        multi_hot_sizes=hots,
        embedding_dim=4,
        dense_in_features=2,
        bottom_mlp=(4,),
        cross_layers=1,
        cross_rank=2,
        top_mlp=(1,),
    )


def reference_tables(rows: tuple[int, ...], hots: tuple[int, ...]) -> list[np.ndarray]:
    """The MLPerf reference's tables, drawn as it draws them."""
    rng = np.random.RandomState(0)
    return [
        np.concatenate((np.arange(r)[:, None], rng.randint(0, r, size=(r, hot - 1))), axis=-1).astype(np.int32)
        for r, hot in zip(rows, hots, strict=True)
    ]


def write_day(path: Path, day: int, samples: int, model: ModelConfig, first: int = 0) -> dict[str, np.ndarray]:
    """Writes both formats of one day. dense[:, 0] numbers the samples from `first`, to tell them apart."""
    rng = np.random.default_rng(day)
    numbers = np.arange(first, first + samples)
    one_hot = np.stack([rng.integers(0, rows, samples) for rows in model.rows], axis=1).astype(np.int32)
    tables = reference_tables(model.rows, model.multi_hot_sizes)
    arrays = {str(f): table[one_hot[:, f]] for f, table in enumerate(tables)}
    dense = np.stack([numbers, numbers % 7], axis=1).astype(np.float32)
    labels = (numbers % 3 == 0).astype(np.int32)[:, None]
    np.save(path / f"day_{day}_dense.npy", dense)
    np.save(path / f"day_{day}_labels.npy", labels)
    np.save(path / f"day_{day}_sparse.npy", one_hot)
    np.savez(path / f"day_{day}_sparse_multi_hot.npz", **arrays)
    return {"dense": dense, "labels": labels, "one_hot": one_hot, **arrays}


@pytest.fixture
def model() -> ModelConfig:
    return tiny_model()


@pytest.fixture
def day_writer() -> Callable[..., dict[str, np.ndarray]]:
    return write_day


@pytest.fixture
def draw_reference() -> Callable[..., list[np.ndarray]]:
    return reference_tables
