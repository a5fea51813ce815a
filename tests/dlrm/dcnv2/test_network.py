"""The dense network against TorchRec's DLRM_DCN: forward, every gradient, initial distributions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM_DCN

from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.network import DenseNetwork
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.dcnv2.state_keys import torchrec_names


def torchrec_model(config: ModelConfig, device: str = "cpu") -> DLRM_DCN:
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=config.embedding_dim, num_embeddings=rows, feature_names=[name])
        for name, rows in zip(config.feature_names, config.rows, strict=True)
    ]
    return DLRM_DCN(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device(device)),
        dense_in_features=config.dense_in_features,
        dense_arch_layer_sizes=list(config.bottom_mlp),
        over_arch_layer_sizes=list(config.top_mlp),
        dcn_num_layers=config.cross_layers,
        dcn_low_rank_dim=config.cross_rank,
        dense_device=torch.device(device),
    )


def twins(config: ModelConfig) -> tuple[DenseNetwork, DLRM_DCN]:
    """Returns both models in double precision with equal weights, biases of the cross layers drawn too."""
    ours, theirs = DenseNetwork(config), torchrec_model(config)
    ours.init_weights(0)
    for layer in ours.cross:
        torch.nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(1))
    names = torchrec_names(config)
    result = theirs.load_state_dict({names[name]: value for name, value in ours.state_dict().items()}, strict=False)
    assert not result.unexpected_keys
    assert all("embedding_bags" in key for key in result.missing_keys)
    return ours.double(), theirs.double()


def assert_equal(ours: Tensor | None, theirs: Tensor | None) -> None:
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)


def check_against_torchrec(config: ModelConfig, batch: int) -> None:
    ours, theirs = twins(config)
    generator = torch.Generator().manual_seed(2)
    dense = torch.randn(batch, config.dense_in_features, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randint(rows, (batch,), generator=generator) for rows in config.rows])
    bags = theirs.sparse_arch.embedding_bag_collection.embedding_bags
    looked_up = [bags[name].weight[block] for name, block in zip(config.feature_names, ids, strict=True)]
    pooled = torch.stack(looked_up, dim=1).detach()  # [batch, features, dim], as TorchRec has it

    inputs = [[value.clone().requires_grad_() for value in (dense, pooled)] for _ in range(2)]
    logits = ours(inputs[0][0], inputs[0][1].flatten(1))
    expected = theirs.over_arch(theirs.inter_arch(theirs.dense_arch(inputs[1][0]), inputs[1][1])).squeeze(1)
    assert_equal(logits, expected)
    weights = torch.randn(batch, generator=generator, dtype=torch.float64)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    for input_ours, input_theirs in zip(*inputs, strict=True):
        assert_equal(input_ours.grad, input_theirs.grad)
    parameters, names = dict(theirs.named_parameters()), torchrec_names(config)
    for name, parameter in ours.named_parameters():
        assert_equal(parameter.grad, parameters[names[name]].grad)

    # The whole of DLRM_DCN puts these parts together just so; its lookup rounds to fp32.
    lengths = torch.ones(ids.numel(), dtype=torch.int64)
    kjt = KeyedJaggedTensor(keys=list(config.feature_names), values=ids.flatten(), lengths=lengths)
    torch.testing.assert_close(theirs(dense, kjt).squeeze(1), expected, rtol=1e-4, atol=1e-4)


@st.composite
def odd_models(draw):
    width = st.integers(1, 9)
    features, dim = draw(st.integers(1, 4)), draw(st.sampled_from([4, 12]))
    return ModelConfig(
        num_embeddings=tuple(draw(st.lists(st.integers(1, 7), min_size=features, max_size=features))),
        multi_hot_sizes=(1,) * features,
        embedding_dim=dim,
        dense_in_features=draw(width),
        bottom_mlp=(*draw(st.lists(width, max_size=2)), dim),
        cross_layers=draw(st.integers(1, 3)),
        cross_rank=draw(width),
        # TorchRec's OverArch needs at least one hidden layer.
        top_mlp=(*draw(st.lists(width, min_size=1, max_size=3)), 1),
    )


@given(odd_models(), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_equals_torchrec_on_odd_shapes(config, batch):
    check_against_torchrec(config, batch)


def test_equals_torchrec_on_the_smoke_model():
    check_against_torchrec(preset("smoke").model, 33)


def test_mlperf_weights():
    with torch.device("meta"):
        network = DenseNetwork(MLPERF_MODEL)
    assert sum(parameter.numel() for parameter in network.parameters()) == 16_044_545
    assert set(torchrec_names(MLPERF_MODEL)) == set(network.state_dict())


def ks_distance(a: Tensor, b: Tensor) -> float:
    """Largest distance of two samples' distribution functions, times the square root of their common size."""
    a, b = a.flatten().sort().values.contiguous(), b.flatten().sort().values.contiguous()
    both = torch.cat([a, b])
    steps = (torch.searchsorted(x, both, right=True) / len(x) for x in (a, b))
    return float(torch.sub(*steps).abs().max()) * math.sqrt(len(a) * len(b) / (len(a) + len(b)))


def test_initial_distributions_are_torchrecs_own():
    """Layers wide enough for statistics, and of unequal width and height to tell fan-in from fan-out."""
    config = ModelConfig(
        num_embeddings=(3, 3),
        multi_hot_sizes=(1, 1),
        embedding_dim=64,
        dense_in_features=200,
        bottom_mlp=(300, 64),
        cross_rank=50,
        cross_layers=2,
        top_mlp=(400, 100, 1),
    )
    ours = DenseNetwork(config)
    ours.init_weights(0)
    torch.manual_seed(1)
    theirs = torchrec_model(config).state_dict()
    for name, weights in ours.state_dict().items():
        fresh = theirs[torchrec_names(config)[name]].reshape(weights.shape)
        if name.startswith("cross") and name.endswith("bias"):
            assert not weights.any()
            assert not fresh.any()
        elif weights.numel() >= 60:
            assert ks_distance(weights, fresh) < 2.2, name  # passed by chance once in some 8000 comparisons
            if weights.numel() >= 5000:
                assert weights.std().item() == pytest.approx(fresh.std().item(), rel=0.03), name
                assert abs(weights.mean().item()) < 4 * weights.std().item() / math.sqrt(weights.numel()), name
            if name.startswith(("bottom", "top")):
                fan_in = ours.get_submodule(name.rsplit(".", 1)[0]).in_features
                assert 0.9 / math.sqrt(fan_in) < weights.abs().max() <= 1 / math.sqrt(fan_in), name


def test_equal_seeds_give_equal_weights():
    def weights(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed + 100)  # the global generator plays no part
        network = DenseNetwork(preset("smoke").model)
        network.init_weights(seed)
        return network.state_dict()

    first, again, other = weights(5), weights(5), weights(6)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, other[name]) == (name.startswith("cross") and name.endswith("bias"))


def test_no_two_layers_share_weights():
    network = DenseNetwork(MLPERF_MODEL)
    network.init_weights(0)
    leading = [p.detach().flatten()[:50] for p in network.parameters() if p.any() and p.numel() >= 50]
    assert len(leading) >= 14
    correlations = torch.corrcoef(torch.stack(leading)) - torch.eye(len(leading))
    assert correlations.abs().max() < 0.6
