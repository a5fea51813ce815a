"""Initial embedding weights: independent of the sharding, uniform, and unrelated between tables and seeds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dlrm_bench.dlrm.tables import initial_weights
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights


def shard(
    rows: int, columns: int, row: int = 0, column: int = 0, *, seed: int = 0, table: int = 0, of: int = 1000
) -> torch.Tensor:
    weights = torch.full((rows, columns), torch.nan)
    fill_initial_weights(weights, seed=seed, table=table, num_embeddings=of, row_offset=row, column_offset=column)
    return weights


WHOLE = shard(1000, 24, seed=3, table=5)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_shard_is_that_part_of_the_whole(data):
    row, column = data.draw(st.integers(0, 999)), data.draw(st.integers(0, 23))
    rows, columns = data.draw(st.integers(0, 1000 - row)), data.draw(st.integers(1, 24 - column))
    part = shard(rows, columns, row, column, seed=3, table=5)
    assert torch.equal(part, WHOLE[row : row + rows, column : column + columns])


@pytest.mark.parametrize("chunk", [1, 24, 25, 100, 24 * 999])
def test_chunks_leave_no_seam(monkeypatch, chunk):
    monkeypatch.setattr(initial_weights, "_CHUNK_ELEMENTS", chunk)
    assert torch.equal(shard(1000, 24, seed=3, table=5), WHOLE)


def test_a_view_into_a_larger_tensor_is_filled_in_place():
    whole = torch.zeros(10, 24)
    fill_initial_weights(whole[2:6, 8:16], seed=3, table=5, num_embeddings=1000)
    assert torch.equal(whole[2:6, 8:16], WHOLE[:4, :8])
    assert whole.count_nonzero() == 4 * 8


def test_the_last_rows_of_the_largest_table():
    last = shard(4, 128, row=40_000_000 - 4, of=40_000_000)
    assert torch.equal(last[2:], shard(2, 128, row=40_000_000 - 2, of=40_000_000))
    assert len(last.unique()) > 500


@pytest.mark.parametrize("rows", [1, 3, 1000, 40_000_000])
def test_uniform_with_torchrecs_bound(rows):
    bound = math.sqrt(1 / rows)
    weights = shard(1000, 128, of=rows)
    assert -bound <= weights.min() < -0.999 * bound
    assert 0.999 * bound < weights.max() <= bound
    assert stats.kstest(weights.double().flatten().numpy(), stats.uniform(-bound, 2 * bound).cdf).pvalue > 0.001


def test_rows_and_columns_are_unrelated():
    weights = shard(2000, 64)
    correlations = torch.corrcoef(weights.T) - torch.eye(64)
    assert correlations.abs().max() < 6 / math.sqrt(2000)
    neighbours = torch.corrcoef(torch.stack([weights[:-1].flatten(), weights[1:].flatten()]))[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(weights.numel())


def test_tables_and_seeds_are_unrelated():
    fills = [shard(500, 16, seed=seed, table=table) for seed in (0, 1, 2, 2**40) for table in (0, 1, 2, 25)]
    correlations = torch.corrcoef(torch.stack([fill.flatten() for fill in fills])) - torch.eye(len(fills))
    assert correlations.abs().max() < 5 / math.sqrt(500 * 16)
    # No shifted copies either: hardly a value of one is in another beyond chance in 2^24.
    values = torch.cat([fill.flatten() for fill in fills])
    assert len(values.unique()) > 0.99 * len(values)


def test_a_shard_of_lower_precision_is_the_rounded_whole():
    half = torch.empty(1000, 24, dtype=torch.bfloat16)
    fill_initial_weights(half, seed=3, table=5, num_embeddings=1000)
    assert torch.equal(half, WHOLE.bfloat16())


@pytest.mark.gpu
def test_the_gpu_fills_the_same_weights():
    weights = torch.empty(1000, 24, device="cuda")
    fill_initial_weights(weights, seed=3, table=5, num_embeddings=1000)
    assert torch.equal(weights.cpu(), WHOLE)
