"""The HSTU model: against one sample at a time, its gradients, and that it learns."""

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from dlrm_bench.dlrm.zoo.hstu.batch import HstuBatch, batch_ids, capacities, random_batches
from dlrm_bench.dlrm.zoo.hstu.config import SMALL, TINY, HstuConfig
from dlrm_bench.dlrm.zoo.hstu.model import HstuRanker, HstuTrain, of_actions, of_users, sample_and_place


def model(config: HstuConfig = TINY, bf16: bool = False) -> HstuRanker:
    torch.manual_seed(0)
    return HstuRanker(config, device=torch.device("cpu"), bf16=bf16)


def sample(batch: HstuBatch, index: int, config: HstuConfig = TINY) -> HstuBatch:
    """One sample of a batch, as a batch."""
    parts = {key: batch.features[key] for key in batch.features.keys()}  # noqa: SIM118 a KeyedJaggedTensor is no dict
    values = [part.values()[part.offsets()[index] : part.offsets()[index + 1]] for part in parts.values()]
    features = KeyedJaggedTensor(
        list(parts), torch.cat(values), lengths=torch.tensor([len(value) for value in values], dtype=torch.int32)
    )
    offsets = next(iter(parts.values())).offsets()
    candidates = slice(index * config.candidates, (index + 1) * config.candidates)
    return HstuBatch(features, batch.actions[offsets[index] : offsets[index + 1]], batch.labels[candidates])


@pytest.mark.parametrize(
    "config", [TINY, replace(TINY, event_rows=TINY.event_rows[:1], user_rows=(), candidates=1)], ids=["all", "least"]
)
def test_samples_do_not_meet(config: HstuConfig) -> None:
    ranker = model(config)
    batch = next(random_batches(config, 4, seed=1))
    together = ranker(batch)
    alone = torch.cat([ranker(sample(batch, index, config)) for index in range(4)])
    assert together.shape == (4 * config.candidates,)
    torch.testing.assert_close(together, alone)


def test_compiled_layers_are_compiled_once_for_all_of_them_and_once_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    plain, compiled = model(), model()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    for layer in compiled.layers:
        layer.compile(backend=counter)
    compiled_after = []
    for batch in islice(random_batches(TINY, 4, seed=1), 5):
        torch.testing.assert_close(compiled(batch), plain(batch), rtol=0, atol=0)
        compiled_after.append(counter.frame_count)
    of_layer = 2  # before and after the attention
    assert compiled_after == [of_layer, *[2 * of_layer] * 4]


def test_a_candidate_does_not_see_the_others() -> None:
    ranker = model()
    batch = next(random_batches(TINY, 1, seed=2))
    before = ranker(batch)
    values = batch.features.values().clone()
    start, end = batch.features["candidate event_0"].offsets()[[0, -1]].tolist()
    first = int(batch.features.offset_per_key()[batch.features.keys().index("candidate event_0")])
    values[first + start] = (values[first + start] + 1) % 50
    assert end - start == TINY.candidates
    changed = KeyedJaggedTensor(batch.features.keys(), values, lengths=batch.features.lengths())
    after = ranker(HstuBatch(changed, batch.actions, batch.labels))
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_gradients_reach_all_weights() -> None:
    ranker = model()
    HstuTrain(ranker)(next(random_batches(TINY, 3, seed=3)))[0].backward()
    assert [name for name, weight in ranker.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_the_layer_equals_its_derivative() -> None:
    layer = model().layers[0].double()
    assert isinstance(layer, nn.Module)
    tokens = torch.randn(7, TINY.width, dtype=torch.float64, requires_grad=True)
    offsets, targets = torch.tensor([0, 4, 7]), torch.tensor([2, 1])

    def of(tokens: Tensor) -> Any:
        return layer(tokens, offsets, targets).square().sum()

    assert torch.autograd.gradcheck(of, tokens, atol=1e-5)


def test_equal_seeds_give_equal_batches_of_mean_length() -> None:
    first, again, other = (next(random_batches(TINY, 64, seed=4, rank=rank)) for rank in (0, 0, 1))
    assert torch.equal(first.features.values(), again.features.values())
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.features.lengths(), other.features.lengths())
    lengths = first.features["history event_0"].lengths()
    assert lengths.min() > 0
    assert lengths.max() <= TINY.max_history
    assert abs(lengths.float().mean() - TINY.mean_history) < 2


@pytest.mark.parametrize(
    ("bf16", "dtype", "tolerance"),
    [(False, torch.float32, 1e-5), (False, torch.float64, 1e-14), (True, torch.float32, 1e-3)],
    ids=["fp32", "fp64", "bf16"],
)
def test_padding_changes_sums_by_their_rounding_at_most(bf16: bool, dtype: torch.dtype, tolerance: float) -> None:
    ranker = model(bf16=bf16).to(dtype)
    plain, padded = (next(random_batches(TINY, 4, seed=6, padded=padded)) for padded in (False, True))
    assert plain.actions.numel() < padded.actions.numel()
    found = dict(zip(padded.features.keys(), padded.features.length_per_key(), strict=True))
    assert found in batch_ids(TINY, 4)
    assert padded.features.lengths().max() <= TINY.max_history
    torch.testing.assert_close(ranker(padded), ranker(plain), rtol=tolerance, atol=tolerance)
    losses = []
    for batch in (plain, padded):
        ranker.zero_grad()
        batch.labels = batch.labels.to(dtype)
        loss, _ = HstuTrain(ranker)(batch)
        loss.backward()
        losses.append([loss, *(weight.grad.clone() for weight in ranker.parameters())])
    torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)


def test_ranks_pad_to_the_least_capacity_that_holds_all() -> None:
    sizes = capacities(TINY, 6)
    of_ranks = [islice(random_batches(TINY, 6, seed=8, rank=rank, padded=True, ranks=3), 20) for rank in range(3)]
    plain = [islice(random_batches(TINY, 6, seed=8, rank=rank), 20) for rank in range(3)]
    found = set()
    for padded, as_drawn in zip(zip(*of_ranks, strict=True), zip(*plain, strict=True), strict=True):
        (capacity,) = {batch.actions.numel() for batch in padded}
        most = max(batch.actions.numel() for batch in as_drawn)
        assert capacity == min(size for size in sizes if size >= most)
        found.add(capacity)
    assert len(found) > 2


@pytest.mark.parametrize("batch_size", [1, 2, 4, 32, 256, 2048])
def test_capacities_are_few_and_near_the_mean(batch_size: int) -> None:
    config = SMALL
    sizes, mean = capacities(config, batch_size), batch_size * config.mean_history
    assert len(sizes) <= 6
    assert sizes[0] <= 1.03 * mean
    assert mean < sizes[-1] <= batch_size * config.max_history
    least = replace(config, event_rows=config.event_rows[:1], user_rows=())
    drawn = list(islice(random_batches(least, min(batch_size, 32), 3), 20))
    waste = [min(n for n in capacities(config, min(batch_size, 32)) if n >= b.actions.numel()) for b in drawn]
    assert sum(waste) < 1.2 * sum(b.actions.numel() for b in drawn)


def test_no_place_has_most_of_the_tokens_that_belong_to_no_sample() -> None:
    _, place = sample_and_place(torch.empty(54, 1), torch.tensor([0, 2, 4]), 5)
    assert place[:4].tolist() == [0, 1, 0, 1]
    assert place.bincount().tolist() == [12, 12, 10, 10, 10]


def test_a_users_gradient_is_the_sum_over_its_tokens() -> None:
    offsets = torch.tensor([0, 4, 4, 7])
    sample, place = sample_and_place(torch.empty(9, 1), offsets, 5)
    assert sample.tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 2]
    assert place.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    users = torch.randn(3, 2, requires_grad=True)
    grad = torch.randn(9, 2)
    grad[7:] = 0  # of no sample
    found, expected = of_users(users, offsets, sample, place, 5), users[sample]
    assert torch.equal(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(of, users, grad)[0] for of in (found, expected)))


def test_an_actions_gradient_is_the_sum_over_its_events() -> None:
    weight, actions, grad = torch.randn(5, 3, requires_grad=True), torch.randint(5, (40,)), torch.randn(40, 3)
    found, expected = of_actions(weight, actions), nn.functional.embedding(actions, weight)
    assert torch.equal(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(of, weight, grad)[0] for of in (found, expected)))


def test_it_learns() -> None:
    trained = HstuTrain(model())
    optimizer = torch.optim.Adam(trained.parameters(), 3e-3)
    batches = random_batches(TINY, 64, seed=5)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss, _ = trained(next(batches))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_width": 24}, "head-width is 24"),
        ({"mean_history": 30}, "mean-history is 30"),
        ({"event_rows": ()}, "--model.event-rows"),
    ],
)
def test_sizes_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_the_small_preset_has_dlrmv4s_shapes() -> None:
    config = SMALL
    assert config.tables.count == 11
    assert config.max_length == 4087
    assert abs(sum(config.tables.rows) - 30e6) < 1e5
