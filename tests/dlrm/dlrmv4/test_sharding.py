"""The whole model under TorchRec, each table split by rows."""

from typing import Any

import pytest
import torch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedTensor

from dlrm_bench.dlrm.dlrmv4.batch import batch_of
from dlrm_bench.dlrm.dlrmv4.config import Dlrmv4Training, Exchange, tables
from dlrm_bench.dlrm.dlrmv4.model import seed_dropout
from dlrm_bench.dlrm.dlrmv4.presets import training
from dlrm_bench.dlrm.dlrmv4.sharding import build_sharded, check_tables_fit
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.dlrm.dlrmv4.cases import by_item, make_samples
from tests.dlrm.dlrmv4.test_optimizers import LENGTHS, TRAINING, batches, train_plainly


def rows_and_losses(
    ranks: Ranks, config: Dlrmv4Training, exchange: Exchange = "fp32"
) -> tuple[dict[str, tuple[int, ...]], list[float]]:
    sharded, optimizer = build_sharded(config, ranks, exchange)
    rows = {}
    for name, table in sharded.state_dict().items():
        if isinstance(table, ShardedTensor):
            rows[name.split(".")[-2]] = tuple(sorted(of.shard_sizes[0] for of in table.metadata().shards_metadata))
    seed_dropout(config, ranks.rank)
    pipeline = TrainPipelineSparseDist(sharded, optimizer, ranks.device)  # type: ignore[arg-type]
    stream = iter(batches(ranks.rank, config.model))
    return rows, [float(pipeline.progress(stream)[0]) for _ in range(5)]


def test_every_table_is_split_by_rows_and_trained(run_ranks: Any) -> None:
    losses = train_plainly(TRAINING, 2)[1]
    for rank, (rows, of_rank) in enumerate(run_ranks(2, rows_and_losses, TRAINING)):
        assert rows == {table.name: (table.rows // 2, -(-table.rows // 2)) for table in tables(TRAINING.model)}
        torch.testing.assert_close(torch.tensor(of_rank), torch.tensor(losses[rank][:5]), rtol=1e-5, atol=1e-7)


def losses_of_both(ranks: Ranks, config: Dlrmv4Training) -> list[list[float]]:
    losses = []
    for distinct in (False, True):
        sharded, optimizer = build_sharded(config, ranks)
        seed_dropout(config, ranks.rank)
        pipeline = TrainPipelineSparseDist(sharded, optimizer, ranks.device)  # type: ignore[arg-type]
        samples = [by_item(make_samples(config.model, LENGTHS[ranks.rank], seed)) for seed in range(10)]
        stream = iter([batch_of(of, config.model, distinct) for of in samples])
        losses.append([float(pipeline.progress(stream)[0]) for _ in samples])
    return losses


def test_distinct_events_train_as_all_events(run_ranks: Any) -> None:
    for every, once in run_ranks(2, losses_of_both, TRAINING):
        torch.testing.assert_close(torch.tensor(once), torch.tensor(every), rtol=1e-5, atol=1e-7)


def test_an_exchange_in_fewer_bits_changes_losses_slightly(run_ranks: Any) -> None:
    losses = torch.tensor(train_plainly(TRAINING, 2)[1])[:, :5]
    results = run_ranks(2, rows_and_losses, TRAINING, "fp16")
    apart = (torch.tensor([of_rank for _, of_rank in results]) / losses - 1).abs()
    assert 1e-5 < apart.max() < 0.02


def test_tables_that_do_not_fit_are_refused() -> None:
    """The benchmark needs 75 GB on each of eight ranks; its eighth as much on one."""
    check_tables_fit(training("mlperf-dlrmv4"), 8, 76 * 10**9)
    check_tables_fit(training("dlrmv4-one-gpu"), 1, 76 * 10**9)
    with pytest.raises(ValueError, match=r"150\.3 GB and a rank has 141\.0 GB; use more GPUs, --preset dlrmv4-one-gpu"):
        check_tables_fit(training("mlperf-dlrmv4"), 4, 141 * 10**9)
