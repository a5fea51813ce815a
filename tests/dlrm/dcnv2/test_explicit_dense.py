"""The written-out dense network against autograd and torch.optim.Adagrad, its update sharded over ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.explicit_dense import ExplicitDense
from dlrm_bench.dlrm.dcnv2.network import DenseNetwork
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.dense import fused_cross
from tests.cases import PLACES

LEARNING_RATE, EPS, SEED, STEPS = 0.01, 1e-8, 5, 4
SMALL = ModelConfig(
    num_embeddings=(10, 10, 10),
    multi_hot_sizes=(1, 1, 1),
    embedding_dim=8,
    dense_in_features=13,
    bottom_mlp=(24, 8),
    cross_layers=3,
    cross_rank=16,
    top_mlp=(40, 24, 1),
)
MODELS = {
    "as MLPerf's": SMALL,
    "one of each": replace(SMALL, dense_in_features=1, bottom_mlp=(8,), cross_layers=1, top_mlp=(1,)),
    "odd widths": replace(SMALL, dense_in_features=17, bottom_mlp=(7, 8), cross_layers=2, cross_rank=5, top_mlp=(9, 1)),
}


@dataclass(frozen=True, slots=True)
class Case:
    model: ModelConfig
    batch_size: int
    dtype: torch.dtype
    parts: int = 1
    peers: bool = False
    """Whether in peer memory."""
    fused: bool = False
    """The cross network by kernels.fused_cross on CPUs too, where its plain functions run."""

    def explicit(self, ranks: Ranks, seed: int = SEED) -> ExplicitDense:
        memory = PeerMemory(ranks) if self.peers else None
        shape = BatchShape(samples=self.batch_size, dtype=self.dtype, parts=self.parts)
        with pytest.MonkeyPatch.context() as patch:
            if self.fused and ranks.device.type == "cpu":
                patch.setattr(fused_cross, "applies", lambda *_: True)
            return ExplicitDense(self.model, seed, shape, ranks, memory)


FUSED = ((1, False), (2, True))
CASES = [Case(model, batch_size, torch.float32) for model in MODELS.values() for batch_size in (1, 6, 37)]
CASES += [Case(model, 6, torch.float32, parts) for model in MODELS.values() for parts in (2, 3)]
CASES += [Case(model, 6, torch.float32, peers=True) for model in MODELS.values()]
CASES += [
    Case(model, 6, torch.float32, parts, peers, fused=True) for model in MODELS.values() for parts, peers in FUSED
]
BF16_CASES = [
    Case(MODELS[name], 128, torch.bfloat16, peers=peers)
    for name in ("as MLPerf's", "odd widths")
    for peers in (False, True)
]


def global_batch(case: Case, world_size: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Dense features, pooled vectors and labels of all ranks, all fp32 and without loss in `dtype`."""
    generator, rows = torch.Generator().manual_seed(step), case.batch_size * world_size
    dense = torch.rand(rows, case.model.dense_in_features, generator=generator)
    pooled = torch.randn(rows, case.model.num_features * case.model.embedding_dim, generator=generator)
    labels = torch.rand(rows, generator=generator) < 0.4
    return dense.to(case.dtype).float(), pooled.to(case.dtype).float(), labels.float()


def load_working_weights(network: DenseNetwork, explicit: ExplicitDense, dtype: torch.dtype) -> None:
    """So that what bf16 rounds away of the weights does not count as an error of the products."""
    network.load_state_dict({name: value.to(dtype).float() for name, value in explicit.state_dict().items()})


def forward_backward(
    explicit: ExplicitDense, dense: Tensor, pooled: Tensor, labels: Tensor, parts: int
) -> tuple[Tensor, ...]:
    """Logits, local mean loss and the gradient by x0; weight gradients go to explicit.grad."""
    explicit.bottom_forward(dense)
    explicit.x0[:, explicit.model.embedding_dim :].copy_(pooled)
    layers = range(explicit.model.cross_layers)
    logits = []
    for part, part_labels in enumerate(labels.chunk(parts)):
        for layer in layers:
            explicit.cross_forward(layer, part)
        logits.append(explicit.top_forward(part))
        explicit.loss_backward(explicit.top_hidden_forward(part), part_labels, part)
        explicit.top_backward(part)
        for layer in reversed(layers):
            explicit.cross_backward(layer, part)
    for of_bucket in explicit.top:
        explicit.top_weight_gradients(of_bucket)
    for layer in layers:
        explicit.cross_weight_gradients(layer)
    explicit.bottom_backward()
    for layer in range(len(explicit.model.bottom_mlp)):
        explicit.bottom_weight_gradient(layer)
    return torch.cat(logits), explicit.mean_losses[int(explicit.step) - 1], explicit.dx0


def update(explicit: ExplicitDense, learning_rate: Tensor) -> None:
    """Updates all buckets, as an iteration does."""
    for bucket in explicit.buckets:
        bucket.update(learning_rate, EPS)
        bucket.all_gather()
    dist.barrier()  # which peer memory wants after all updates


def check(ranks: Ranks, case: Case) -> None:
    torch.set_float32_matmul_precision("highest")
    device, dim = ranks.device, case.model.embedding_dim
    explicit = case.explicit(ranks)
    network = DenseNetwork(case.model)
    network.init_weights(SEED)
    initial = explicit.state_dict()
    assert initial.keys() == network.state_dict().keys()
    for name, value in network.state_dict().items():
        assert torch.equal(initial[name].cpu(), value), name
    network.to(device)
    optimizer = torch.optim.Adagrad(network.parameters(), lr=LEARNING_RATE, eps=EPS)
    learning_rate = torch.tensor([LEARNING_RATE], device=device)
    fp32 = case.dtype == torch.float32
    atol = 1e-6 if device.type == "cpu" else 5e-6  # of sums that cuBLAS adds up in another order than autograd's
    local = slice(ranks.rank * case.batch_size, (ranks.rank + 1) * case.batch_size)

    def assert_close(got: Tensor, expected: Tensor, what: str) -> None:
        """fp32: each element; bf16: as a whole, for a sum near zero may lose all its digits."""
        got, expected = got.detach().float(), expected.detach()
        if fp32:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol, msg=lambda text: f"{what}: {text}")
        else:
            assert (got - expected).norm() <= 0.25 * expected.norm() + 5e-3, what

    for step in range(STEPS):
        if not fp32:
            load_working_weights(network, explicit, case.dtype)
        dense, pooled, labels = (part.to(device) for part in global_batch(case, ranks.world_size, step))
        mine = dense[local], pooled[local], labels[local]
        with torch.no_grad():
            logits, loss, grad = forward_backward(explicit, *mine, case.parts)
        # The local samples' part of the global mean loss.
        inputs = mine[0], mine[1].clone().requires_grad_()
        expected = network(*inputs)
        expected_loss = functional.binary_cross_entropy_with_logits(expected, mine[2])
        optimizer.zero_grad()
        (expected_loss / ranks.world_size).backward()
        assert_close(logits, expected, "logits")
        assert_close(loss, expected_loss, "loss")
        assert inputs[1].grad is not None
        assert_close(grad[:, dim:], inputs[1].grad, "pooled")
        for name, parameter in network.named_parameters():
            got = explicit.grad[name]
            if name == "bottom_mlp.0.weight":
                assert not got[:, case.model.dense_in_features :].any(), "gradient of padding"
                got = got[:, : case.model.dense_in_features]
            assert parameter.grad is not None
            assert_close(got, parameter.grad, name)
        # The update works on the sum over all ranks' samples.
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(network(dense, pooled), labels).backward()
        optimizer.step()
        update(explicit, learning_rate)
        check_update(explicit, network, optimizer, case)


def check_state_dict(ranks: Ranks, case: Case) -> None:
    """Another network takes this one's state to the bit, and both continue alike."""
    first, second = (case.explicit(ranks, seed) for seed in (SEED, 99))
    local = slice(ranks.rank * case.batch_size, (ranks.rank + 1) * case.batch_size)

    def step(explicit: ExplicitDense) -> None:
        dense, pooled, labels = (part.to(ranks.device)[local] for part in global_batch(case, ranks.world_size, 0))
        with torch.no_grad():
            forward_backward(explicit, dense, pooled, labels, case.parts)
        update(explicit, torch.tensor([LEARNING_RATE], device=ranks.device))

    def assert_equal() -> None:
        for which in ("master", "state"):
            states = first.state_dict(which), second.state_dict(which)
            assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())

    step(first)
    second.load_state_dict({name: value.cpu() for name, value in first.state_dict("master").items()})
    second.load_state_dict(first.state_dict("state"), "state")
    assert all(torch.equal(value, second.working[name]) for name, value in first.working.items())
    assert_equal()
    step(first)
    step(second)
    assert_equal()


def check_update(explicit: ExplicitDense, network: DenseNetwork, optimizer: torch.optim.Optimizer, case: Case) -> None:
    weights, states = explicit.state_dict("master"), explicit.state_dict("state")
    padded = explicit.working["bottom_mlp.0.weight"]
    assert padded.shape[1] % 16 == 0
    assert not padded[:, case.model.dense_in_features :].any(), "padding columns stay zero"
    for name, parameter in network.named_parameters():
        working = explicit.working[name][:, : parameter.shape[1]] if parameter.dim() > 1 else explicit.working[name]
        assert torch.equal(working, weights[name].to(case.dtype)), "the working copy is the rounded master"
        assert weights[name].dtype == states[name].dtype == torch.float32
        assert weights[name].shape == states[name].shape == parameter.shape
        expected = optimizer.state[parameter]["sum"]
        if case.dtype == torch.float32:
            torch.testing.assert_close(states[name], expected, rtol=1e-4, atol=1e-9)
            # A tiny gradient's rounding error moves its weight by a part of the learning rate.
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=LEARNING_RATE / 100)
        else:
            assert (states[name] - expected).norm() <= 0.4 * expected.norm() + 1e-3, name


def check_all(ranks: Ranks, cases: list[Case]) -> int:
    for case in cases:
        try:
            check(ranks, case)
            check_state_dict(ranks, case)
        except Exception as error:
            error.add_note(f"rank {ranks.rank} of {case}")
            raise
    return len(cases)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_equals_autograd_and_adagrad(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    cases = [*CASES, *BF16_CASES]
    assert run_ranks(world_size, check_all, cases, gpu=gpu) == [len(cases)] * world_size
