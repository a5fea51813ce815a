"""The HSTU model: against one sample at a time, its gradients, and that it learns."""

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torchrec import KeyedJaggedTensor

from dlrm_bench.dlrm.zoo.hstu.batch import HstuBatch, batch_ids, capacities, random_batches
from dlrm_bench.dlrm.zoo.hstu.config import SMALL, TINY, HstuConfig
from dlrm_bench.dlrm.zoo.hstu.model import HstuRanker, HstuTrain
from dlrm_bench.dlrm.zoo.hstu.tokens import HstuLayout, HstuTokens, Layout


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
    actions, lengths = batch.actions[offsets[index] : offsets[index + 1]], batch.lengths[index : index + 1]
    return HstuBatch(features, actions, batch.labels[candidates], lengths)


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


def test_parts_are_compiled_once_and_once_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    plain, compiled = HstuTrain(model()), HstuTrain(model())
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    for part in compiled.compiled():
        part.compile(backend=counter)
    compiled_after = []
    for batch in islice(random_batches(TINY, 4, seed=1), 5):
        torch.testing.assert_close(compiled(batch), plain(batch), rtol=0, atol=0)
        compiled_after.append(counter.frame_count)
    assert compiled_after == [5, *[8] * 4]  # the number of candidates, which head and loss see, stays


def gradients(train: HstuTrain, batch: HstuBatch) -> list[Tensor]:
    train.zero_grad()
    train(batch)[0].backward()
    return [weight.grad.clone() for weight in train.parameters() if weight.grad is not None]


def test_compiled_parts_give_equal_gradients_by_gathers() -> None:
    torch._dynamo.reset()
    plain, compiled = HstuTrain(model()), HstuTrain(model())
    for part in compiled.compiled():
        part.compile(dynamic=True)
    batch, padded = (next(random_batches(TINY, 4, seed=1, padded=padded)) for padded in (False, True))
    with torch._inductor.config.patch(force_disable_caches=True):
        found, code = run_and_get_code(gradients, compiled, batch)
    assert code
    # An index's gradient, which adds by atomics in GPU kernels.
    assert not any("index_put" in of_graph for of_graph in code)
    torch.testing.assert_close(found, gradients(plain, batch), rtol=1e-4, atol=1e-6)
    assert all(map(torch.equal, gradients(compiled, batch), found))
    torch.testing.assert_close(gradients(compiled, padded), gradients(plain, padded), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_nothing_reads_uninitialised_memory(bf16: bool) -> None:
    train, batch = HstuTrain(model(bf16=bf16)), next(random_batches(TINY, 4, seed=6, padded=True))
    expected = gradients(train, batch)
    torch.use_deterministic_algorithms(True)  # fills it with NaN
    try:
        assert torch.empty(1).isnan()
        found = gradients(train, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(of.isfinite().all() for of in found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert all(map(torch.equal, gradients(train, batch), expected))


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
    after = ranker(replace(batch, features=changed))
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_gradients_reach_all_weights() -> None:
    ranker = model()
    HstuTrain(ranker)(next(random_batches(TINY, 3, seed=3)))[0].backward()
    assert [name for name, weight in ranker.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def layout_of(lengths: list[int], events: int) -> Layout:
    return HstuLayout(TINY)(torch.tensor(lengths), torch.empty(events))


@pytest.mark.parametrize("candidates_only", [False, True])
def test_the_layer_equals_its_derivative(candidates_only: bool) -> None:
    layer = model().layers[0].double()
    assert isinstance(layer, nn.Module)
    layout = layout_of([2, 1], events=4)  # one of padding
    tokens = torch.randn(8, TINY.width, dtype=torch.float64, requires_grad=True)

    def of(tokens: Tensor) -> Any:
        made = layer(tokens, layout, candidates_only)
        return (made if candidates_only else made[:7]).square().sum()

    assert torch.autograd.gradcheck(of, tokens, atol=1e-5)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_the_last_layer_makes_the_candidates_tokens_alone(bf16: bool) -> None:
    layers, layout = model(bf16=bf16).layers, layout_of([4, 0, 7], events=13)
    tokens = torch.randn(13 + 3 * TINY.candidates, TINY.width, requires_grad=True)
    every = tokens
    for layer in layers:
        every = layer(every, layout)
    found, expected = layers(tokens, layout), every[layout.candidate_tokens]
    assert found.shape == (3 * TINY.candidates, TINY.width)
    tolerance: dict[str, float] = {"rtol": 2e-2, "atol": 1e-2} if bf16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, expected, **tolerance)
    grad, of = torch.randn_like(found), (tokens, *layers.parameters())
    ours, theirs = (torch.autograd.grad(result, of, grad) for result in (found, expected))
    torch.testing.assert_close(ours, theirs, **tolerance)


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


class TokenInputs:
    """Random inputs of HstuTokens, fp64, for 3 samples, with 7 events of padding if padded."""

    def __init__(self, config: HstuConfig, padded: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*rows: int) -> list[Tensor]:
            drawn = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in rows]
            return [of.requires_grad_() for of in drawn]

        self.lengths, self.per = torch.tensor([4, 1, 3], dtype=torch.int32), config.candidates
        events, tables = 8 + 7 * padded, len(config.event_rows)
        self.actions = torch.randint(5, (events,), generator=generator)
        self.history, self.candidates = draw(*[events] * tables), draw(*[3 * self.per] * tables)
        self.users = draw(*[3] * len(config.user_rows))
        self.of_action, self.of_place = draw(5, config.max_length)
        self.differentiable = [*self.history, *self.candidates, *self.users, self.of_action, self.of_place]
        self.grad = torch.randn(events + 3 * self.per, 4, generator=generator, dtype=torch.float64)
        self.grad[8 + 3 * self.per :] = 0  # padding's

    def by(self, layout: Any, tokens: Any) -> Tensor:
        return tokens(
            self.history,
            self.candidates,
            self.users,
            self.actions,
            layout(self.lengths, self.actions),
            self.of_action,
            self.of_place,
        )

    def one_by_one(self) -> Tensor:
        """The tokens by their definition."""
        tokens: list[Tensor] = []

        def add(of_tables: list[Tensor], row: int, place: int, sample: int, action: int | None = None) -> None:
            token = sum(table[row] for table in of_tables) + self.of_place[place % len(self.of_place)]
            token = token + sum(user[sample] for user in self.users)
            tokens.append(token if action is None else token + self.of_action[action])

        event = start = 0
        for sample, length in enumerate(self.lengths.tolist()):
            start = len(tokens)
            for place in range(length):
                add(self.history, event, place, sample, int(self.actions[event]))
                event += 1
            for i in range(self.per):
                add(self.candidates, sample * self.per + i, length + i, sample)
        for row in range(event, len(self.actions)):  # padding
            add(self.history, row, len(tokens) - start, 2, int(self.actions[row]))
        return torch.stack(tokens)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("padded", [False, True], ids=["no padding", "padding"])
@pytest.mark.parametrize(("candidates", "user_rows"), [(1, ()), (2, (5, 5)), (2, (5,))])
def test_tokens_are_sums_of_vectors(candidates: int, user_rows: tuple[int, ...], padded: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    config = replace(TINY, user_rows=user_rows, candidates=candidates, mean_history=4, max_history=6)
    inputs, layout, tokens = TokenInputs(config, padded), HstuLayout(config), HstuTokens()
    if compiled:
        layout.compile(fullgraph=True)
        tokens.compile(fullgraph=True)
    found, expected = inputs.by(layout, tokens), inputs.one_by_one()
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    ours, theirs, again = (
        torch.autograd.grad(of, inputs.differentiable, inputs.grad)
        for of in (found, expected, inputs.by(layout, tokens))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    assert all(map(torch.equal, ours, again))
    kinds = len(config.event_rows), len(config.event_rows), len(user_rows)
    shared = [of.data_ptr() for of in ours[: sum(kinds)]]
    assert len(set(shared)) == 2 + bool(user_rows), "the tables of a kind share one gradient"


def test_the_layout_of_samples_and_padding() -> None:
    layout = HstuLayout(replace(TINY, max_history=4, mean_history=2, candidates=1))
    of = layout(torch.tensor([3, 0, 2]), torch.empty(12))
    assert of.offsets.tolist() == [0, 4, 5, 8]
    assert of.targets.tolist() == [1, 1, 1]
    assert of.sample.tolist() == [0, 0, 0, 0, 1, 2, 2, 2] + [2] * 7
    assert of.place.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert of.candidate.tolist() == [-1, -1, -1, 0, 1, -1, -1, 2] + [-1] * 7
    assert of.candidate_tokens.tolist() == [3, 4, 7]
    assert of.event_tokens.tolist() == [0, 1, 2, 5, 6, *range(8, 15)]
    assert of.event[of.event_tokens].tolist() == list(range(12))


def test_names_of_weights_in_a_state_are_stable() -> None:
    names = [name for name in model().state_dict() if not name.startswith(("layers.", "tables."))]
    head = [f"head.{part}" for part in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")]
    assert names == ["actions.weight", "places.weight", *head]


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
