"""dlrm-bench data counts: random ids and those of files, no batch twice, and by name what cannot be counted."""

from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.tables.row_counts import read_counts

MODEL = preset("smoke").model
RANDOM = ("--preset", "smoke", "--data.source", "random", "--data.random-batches", "2", "--local-batch-size", "50")


def test_random_samples_are_those_of_ranks_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "counts.npz"
    assert main(["data", "counts", str(file), "--samples", "240", *RANDOM, "--seed", "3"]) == 0
    counts = read_counts(file, MODEL.tables)
    assert counts.samples == 250
    assert counts.data["seed"] == 3
    assert counts.data["random_skew"] == 1.05
    dataset = RandomDataset(DataConfig(random_batches=2), MODEL, 3)
    pools = [iter(dataset.train_batches(rank, 3, 50)) for rank in range(3)]
    batches = [next(pools[i // 2]) for i in range(5)]
    start = 0
    for table, (rows, hot) in enumerate(zip(MODEL.rows, MODEL.multi_hot_sizes, strict=True)):
        ids = np.concatenate([batch.ids.numpy()[start : start + 50 * hot] for batch in batches])
        assert np.array_equal(counts.of_table(table), np.bincount(ids, minlength=rows))
        start += 50 * hot


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--samples", "0", *RANDOM], "--samples is 0: count at least one"),
        (["--preset", "smoke-dlrmv4"], "--preset smoke-dlrmv4: DLRMv4's batches do not hold the ids of its tables"),
        (["--preset", "zoo-dlrm"], "--preset zoo-dlrm: DLRM's batches do not hold the ids"),
        (["--preset", "smoke", "--data.path", "/nowhere"], "--data.path /nowhere"),
    ],
)
def test_what_cannot_be_counted_is_named(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["data", "counts", str(tmp_path / "counts.npz"), *words])
    except SystemExit as left:
        status = int(str(left.code))
    assert status == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_file_after_preset_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "counts", "--preset", "smoke", str(tmp_path / "counts.npz")]) == 2
    assert capsys.readouterr().err.startswith("error: name the file to write before --preset: ")
