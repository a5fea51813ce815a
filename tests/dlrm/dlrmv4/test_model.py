"""Initial weights and dropout depend on seeds alone."""

from dataclasses import replace

import pytest
import torch

from dlrm_bench.dlrm.dlrmv4.config import Dlrmv4Training, tables
from dlrm_bench.dlrm.dlrmv4.model import build_model, fill_tables, seed_dropout
from tests.dlrm.dlrmv4.cases import SMALL, made_training

CPU = torch.device("cpu")
CONFIG = made_training(model=SMALL, seed=7)


def weights(config: Dlrmv4Training) -> dict[str, torch.Tensor]:
    model = build_model(config, CPU, CPU)
    fill_tables(model, config.model, config.seed)
    return dict(model.state_dict())


def test_equal_seeds_give_equal_weights_and_others_other_ones() -> None:
    torch.manual_seed(1)
    first = weights(CONFIG)
    torch.manual_seed(2)
    again, other = weights(CONFIG), weights(replace(CONFIG, seed=8))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.dense.position_weight"], other["model.dense.position_weight"])
    for table in tables(SMALL):
        name = f"model.embeddings.embeddings.{table.name}.weight"
        assert not torch.equal(first[name], other[name])
        bound = table.rows**-0.5
        assert 0.8 * bound < first[name].abs().max() <= bound, table.name


def test_tables_lie_on_meta_until_they_are_sharded() -> None:
    model = build_model(CONFIG, CPU)
    assert {weight.device.type for weight in model.model.embeddings.parameters()} == {"meta"}
    assert {weight.device.type for weight in model.model.dense.parameters()} == {"cpu"}


@pytest.mark.parametrize(("dropout_seed", "alike"), [("rank", False), ("same", True)])
def test_ranks_drop_alike_only_if_told(dropout_seed: str, alike: bool) -> None:
    config = replace(CONFIG, model=replace(SMALL, dropout_seed=dropout_seed))
    masks = []
    for rank in range(2):
        seed_dropout(config, rank)
        masks.append(torch.nn.functional.dropout(torch.ones(1000)))
    assert torch.equal(*masks) == alike


def test_the_device_of_a_rank_draws_from_the_seed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on a GPU draws from the GPU's generator alone: without its seed, a resumed run has other masks."""
    devices = tuple(torch.Generator().manual_seed(0) for _ in range(2))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", devices)
    seed_dropout(CONFIG, 0, 3)
    assert [of.initial_seed() for of in devices] == [0, torch.default_generator.initial_seed()]
    assert devices[1].initial_seed() != 0
