"""Cross-cutting: the guard clears a gradient that several features share once."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dlrm_bench.pipeline.torchrec import guard
from tests.pipeline.torchrec.test_guard import ONE, Lookup


@pytest.mark.parametrize("bad", [False, True])
def test_a_gradient_of_several_features_is_cleared_once(bad: bool) -> None:
    """A sum's, which its terms share; another, or the same one after a change, is cleared for itself."""
    model = Lookup(pooled=False)
    of_model = guard.TorchRecLossGuard(model, ONE)
    with patch.object(guard, "ShardedModule", Lookup):
        of_model.watch_lookups(model)
    for _ in range(2):
        vectors = model().wait()
        total = vectors["a"].values() + vectors["b"].values()
        with patch.object(guard, "cleared_gradients", wraps=guard.cleared_gradients) as clears:
            (total * (torch.nan if bad else 2.0)).sum().backward()
        assert clears.call_count == 1
        assert of_model._cleared._last is None
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == 2 * [3 * [0.0 if bad else 4.0]]
    with patch.object(guard, "cleared_gradients", wraps=guard.cleared_gradients) as clears:
        vectors = model().wait()
        (vectors["a"].values() * 2 + vectors["b"].values() * 3).sum().backward()
    assert clears.call_count == 2


def test_a_gradient_that_changed_is_cleared_again() -> None:
    weight, results = torch.ones(2, requires_grad=True), []
    of, shared = guard._LastResult(), torch.ones(2)

    def hook(gradient: Tensor) -> Tensor:
        for _ in range(2):
            results.append(of.of(shared, lambda: shared * 3))
        shared.mul_(2)
        results.append(of.of(shared, lambda: shared * 3))
        return gradient

    twice = weight * 1
    twice.register_hook(hook)
    twice.sum().backward()
    assert results[0] is results[1] is not results[2]
    assert [of.tolist() for of in results[1:]] == [[3, 3], [6, 6]]
    assert of._last is None
