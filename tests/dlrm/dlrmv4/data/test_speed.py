"""The measurement of building counts what it says."""

import pytest

from dlrm_bench.dlrm.dlrmv4.data.generate import GenerateConfig, generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.data.speed import SpeedConfig, main, speed


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    generate(smoke_config(out))
    return out


def test_counts_batches_until_the_data_end(root):
    found = speed(SpeedConfig(directory=root, local_batch_size=64, world_size=8, seconds=60))
    assert found.batches > 100
    assert 30 < found.events <= 63
    assert found.mean_mb <= found.max_mb < 1
    assert found.samples_per_s > 0 < found.cpu_us


def test_two_threads_build_5000_samples_of_full_histories_in_a_second(tmp_path):
    """A fiftieth to a hundredth of what two cores build, so that a busy machine is fast enough too."""
    generate(GenerateConfig(out=tmp_path, users=200, items=20_000, artists=3_000, albums=7_000, days=10))
    found = speed(SpeedConfig(directory=tmp_path, local_batch_size=256, reader_threads=2, seconds=2))
    assert found.events > 2_000
    assert found.samples_per_s > 5_000


def test_stops_when_the_time_is_over(root, capsys):
    assert main([str(root), "--seconds", "1e-9", "--local-batch-size", "64"]) == 0
    assert capsys.readouterr().out.startswith("1 batches of 64, 2 threads")


def test_too_few_samples_are_named(root):
    with pytest.raises(ValueError, match=r"has 0 batches of 8 x 100000 .*: lower --local-batch-size"):
        speed(SpeedConfig(directory=root, local_batch_size=100_000))
    with pytest.raises(ValueError, match="--seconds"):
        SpeedConfig(directory=root, seconds=0)


@pytest.mark.parametrize("window", [-1, 19])
def test_a_first_window_that_is_not_trained_on_is_named(root, window):
    """The last of 20 windows evaluates."""
    with pytest.raises(ValueError, match=rf"--first-window is {window}, and .* has 19 windows to train on.*: choose"):
        speed(SpeedConfig(directory=root, local_batch_size=8, first_window=window))
