"""The AUC against scikit-learn's, on one rank and over several."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_bench.dlrm.data.metrics import distributed_auc, exact_auc
from dlrm_bench.dlrm.runtime.ranks import Ranks


def roc_auc_score(labels: Any, scores: Any) -> float:
    """scikit-learn's, which the ranks of these tests, who import this file too, need not import for a second."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))


@st.composite
def samples(draw):
    """Scores with few distinct values, many or all tied, and labels of both classes."""
    labels = [0, 1, *draw(st.lists(st.integers(0, 1), max_size=60))]
    value = st.sampled_from([-1.5, -0.0, 0.0, 0.25, 3.0]) | st.floats(-1024, 1024, width=32, allow_subnormal=False)
    scores = draw(st.lists(value, min_size=len(labels), max_size=len(labels)))
    return scores, draw(st.permutations(labels))


@given(samples())
@settings(max_examples=300, deadline=None)
def test_equals_sklearn_ties_included(drawn):
    scores, labels = drawn
    auc = exact_auc(torch.tensor(scores, dtype=torch.float32), torch.tensor(labels))
    assert auc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12, rel=0)


@pytest.mark.parametrize("label_type", [torch.int32, torch.uint8, torch.float32, torch.bool])
def test_many_samples_and_all_label_types(label_type):
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(200_001, generator=generator) < 0.25
    scores = ((torch.randn(200_001, generator=generator) + labels) * 50).round() / 50  # some thousand ties
    expected = roc_auc_score(labels.numpy(), scores.numpy())
    assert exact_auc(scores, labels.to(label_type)) == pytest.approx(expected, abs=1e-12, rel=0)


def test_known_values():
    labels = torch.tensor([0, 0, 1, 1])
    assert exact_auc(torch.tensor([1.0, 2.0, 3.0, 4.0]), labels) == 1
    assert exact_auc(torch.tensor([4.0, 3.0, 2.0, 1.0]), labels) == 0
    assert exact_auc(torch.zeros(4), labels) == 0.5
    assert exact_auc(torch.tensor([-torch.inf, 0.0, 0.0, torch.inf]), labels) == 0.875


def test_errors():
    with pytest.raises(ValueError, match="NaN"):
        exact_auc(torch.tensor([0.1, torch.nan]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="2 positive and 0 negative"):
        exact_auc(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="0 positive and 0 negative"):
        exact_auc(torch.zeros(0), torch.zeros(0))


def share(counts: list[int], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank `rank`'s predictions: counts[rank] of them, rounded so that ties reach across ranks."""
    generator = torch.Generator().manual_seed(sum(counts) + rank)
    labels = torch.rand(counts[rank], generator=generator).round()
    return (torch.randn(counts[rank], generator=generator) * 8).round() / 8 + labels / 2, labels


def distributed(ranks: Ranks, cases: list[list[int]]) -> list[object]:
    """The AUC of each case, and the errors of three that have none."""
    found: list[object] = [distributed_auc(*share(counts, ranks.rank)) for counts in cases]
    nan_on_rank_0 = torch.tensor([torch.nan if ranks.rank == 0 else 0.5, 0.1])
    bad = [(nan_on_rank_0, torch.tensor([0, 1])), (torch.rand(3), torch.ones(3)), (torch.zeros(0), torch.zeros(0))]
    for scores, labels in bad:
        try:
            distributed_auc(scores, labels)
            found.append("no error")
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("world_size", "cases"), [(1, [[500]]), (2, [[300, 200], [0, 40], [37, 0]]), (3, [[1, 500, 63], [0, 90, 0]])]
)
def test_distributed_equals_sklearn_on_all_samples(run_ranks, world_size, cases):
    per_rank = run_ranks(world_size, distributed, cases)
    for found in per_rank:
        assert found == per_rank[0]
    for counts, auc in zip(cases, per_rank[0], strict=False):
        scores, labels = (
            torch.cat(parts) for parts in zip(*(share(counts, r) for r in range(world_size)), strict=True)
        )
        assert auc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12, rel=0)
    nan, one_class, empty = per_rank[0][len(cases) :]
    assert "NaN" in nan
    assert f"{3 * world_size} positive and 0 negative" in one_class
    assert "0 positive and 0 negative" in empty


@pytest.mark.gpu
def test_equals_sklearn_on_the_gpu():
    scores, labels = share([100_000], 0)
    assert exact_auc(scores.cuda(), labels.cuda()) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12, rel=0)
