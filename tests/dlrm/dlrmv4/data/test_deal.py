"""Ranks with the samples of few users: the same samples in each step, balanced, with fewer rows a rank."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dlrm_bench.dlrm.dlrmv4.batch import batch_of_packed
from dlrm_bench.dlrm.dlrmv4.config import DataConfig, Deal
from dlrm_bench.dlrm.dlrmv4.data.dataset import EventDataset, WindowBatches
from dlrm_bench.dlrm.dlrmv4.data.deal import TOLERANCE, deal_users, imbalance
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.data.packed import CANDIDATE, LENGTH
from dlrm_bench.dlrm.dlrmv4.model import build_model, fill_tables
from dlrm_bench.dlrm.dlrmv4.presets import training

SMOKE = training("smoke-dlrmv4")
DEALS: tuple[Deal, ...] = ("stride", "users")
WORLD, BATCH = 4, 64


def made_users(samples: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Users of some samples each, whose histories grow from one sample to the next, and differ between users."""
    random = np.random.default_rng(seed)
    users = np.repeat(np.arange(samples), random.integers(1, 40, samples))[:samples]
    length = random.lognormal(7.5, 0.5, samples).astype(np.int64)[users] + np.arange(samples) % 40
    return users, length.clip(0, 4086)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_sums_are_balanced_and_users_stay_together(ranks: int, seed: int) -> None:
    users, lengths = made_users(ranks * 1024, seed)
    places = deal_users(users, lengths, ranks)
    assert np.array_equal(np.sort(places.flatten()), np.arange(len(users)))
    assert (np.diff(places, axis=1) > 0).all()
    assert imbalance(lengths[places]) <= TOLERANCE
    strided = np.arange(len(users)).reshape(-1, ranks).T
    of_rank, before = (np.mean([len(np.unique(users[of])) for of in each]) for each in (places, strided))
    assert of_rank < 0.75 * before


def test_the_imbalance_is_that_of_squares_too() -> None:
    lengths = np.array([[91, 91], [1, 181]])  # 100 and 100 tokens, 10 and 190
    assert imbalance(lengths) == pytest.approx((10**2 + 190**2) / (20_000 + 36_200) * 2 - 1)


@pytest.mark.parametrize("samples", [1, 3])
def test_odd_batches(samples: int) -> None:
    """A sample a rank, one user, no histories, and one long history that nothing balances."""
    size = 2 * samples
    for users, lengths in (
        (np.arange(size), np.arange(size)),
        (np.zeros(size, dtype=np.int64), np.arange(size)),
        (np.arange(size), np.zeros(size, dtype=np.int64)),
        (np.arange(size), np.eye(1, size, dtype=np.int64)[0] * 4086),
    ):
        places = deal_users(users, lengths, 2)
        assert places.shape == (2, samples)
        assert sorted(places.flatten()) == list(range(size))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    generate(replace(smoke_config(folder), users=1500, days=5))
    return folder


def opened(folder: Path, deal: Deal) -> EventDataset:
    return EventDataset(replace(SMOKE.data, path=folder, deal=deal), SMOKE.model)


def of_ranks(folder: Path, deal: Deal) -> list[WindowBatches]:
    dataset = opened(folder, deal)
    return [dataset.train_batches(rank, WORLD, BATCH) for rank in range(WORLD)]


def test_a_step_has_the_same_samples_and_each_rank_fewer_rows(folder: Path) -> None:
    strided, dealt = (of_ranks(folder, deal) for deal in DEALS)
    assert len(strided[0]) == len(dealt[0]) > 10
    rows, events, sums = dict.fromkeys(DEALS, 0), dict.fromkeys(DEALS, 0), []
    for step in range(0, len(strided[0]), 5):
        columns = []
        for deal, ranks in zip(DEALS, (strided, dealt), strict=True):
            packed = [of[step].packed for of in ranks]
            assert all(of.layout.samples == BATCH for of in packed)
            rows[deal] += sum(len(torch.cat([of.item, of.samples[CANDIDATE]]).unique()) for of in packed)
            events[deal] += sum(of.layout.events for of in packed)
            if deal == "users":
                sums.append(imbalance(torch.stack([of.samples[LENGTH] for of in packed]).long().numpy()))
            # Of a sample, all but where its events lie in the batch of its rank.
            columns.append(torch.cat([of.samples[LENGTH:] for of in packed], dim=1).T.tolist())
        assert sorted(columns[0]) == sorted(columns[1])
    assert rows["users"] < 0.8 * rows["stride"]
    assert events["users"] < 0.75 * events["stride"]
    assert max(sums) <= TOLERANCE


def test_loss_and_gradients_are_those_of_the_same_global_batch(folder: Path) -> None:
    """Means over ranks, without dropout, where attention is divided by the same number on each rank."""
    model_config = replace(SMOKE.model, input_dropout=0.0, layer_dropout=0.0, attention_scale="maximum")
    config, cpu = replace(SMOKE, model=model_config), torch.device("cpu")
    model = build_model(config, cpu, cpu)
    fill_tables(model, config.model, 0)
    maps = opened(folder, "stride").maps
    artist, album = (torch.from_numpy(of) for of in (maps.artist, maps.album))
    found = []
    for deal in DEALS:
        model.zero_grad()
        losses = [model(batch_of_packed(of[7].packed, artist, album, model_config))[0] for of in of_ranks(folder, deal)]
        (sum(losses) / WORLD).backward()
        gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        found.append((torch.stack(losses).mean(), torch.cat(gradients)))
        assert len({loss.item() for loss in losses}) == WORLD
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-7)


def test_evaluations_have_every_sample_once(folder: Path) -> None:
    labels = []
    for deal in DEALS:
        dataset = EventDataset(replace(SMOKE.data, path=folder, deal=deal, drop_last_evaluation=False), SMOKE.model)
        of_deal = []
        for rank in range(WORLD):
            for batch in dataset.eval_batches(rank, WORLD, BATCH):
                of_deal += batch.packed.samples[LENGTH:, : batch.num_valid].T.tolist()
        assert len(of_deal) == dataset.eval_samples
        labels.append(sorted(of_deal))
    assert labels[0] == labels[1]


def test_another_deal_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--data\.deal is 'rows': choose stride or users"):
        DataConfig(deal="rows")  # type: ignore[arg-type]
