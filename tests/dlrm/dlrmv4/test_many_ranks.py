"""DLRMv4's figures for many ranks: the reference's convergence, its evaluations, lengths, and rows."""

import json
from importlib.resources import files

import numpy as np
import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.dlrm.dlrmv4 import work
from dlrm_bench.dlrm.dlrmv4.many_ranks import ASSUMED, many_ranks
from dlrm_bench.dlrm.dlrmv4.presets import training
from dlrm_bench.dlrm.dlrmv4.ruleset import REFERENCE_CONVERGENCE

MLPERF = training("mlperf-dlrmv4")
EARLY = {work.TOKENS: 2082.0, work.TOKENS_SQUARED: 2302.0**2}


def test_convergence_is_the_checkers() -> None:
    """Means without the fastest and the slowest run, as rcp_checker.py computes them."""
    path = files("mlperf_logging") / "rcp_checker/training_6.1.0/rcps_dlrmv4.json"
    points = json.loads(path.read_text(encoding="utf-8")).values()
    means = {point["BS"]: np.mean(sorted(point["Epochs to converge"])[1:-1]) for point in points}
    assert {batch: round(float(mean)) for batch, mean in means.items()} == REFERENCE_CONVERGENCE


def test_samples_and_evaluations_to_the_target() -> None:
    """Between two points samples are interpolated; evaluations are those from the first that the rules ask for."""
    found = {ranks: many_ranks(MLPERF, EARLY, 1, ranks).to_target for ranks in (4, 8, 12, 16, 32, 64)}
    assert found.pop(4) is found.pop(64) is None
    samples = {ranks: of.samples / 1e6 for ranks, of in found.items() if of is not None}
    assert samples == pytest.approx({8: 69.07, 12: (69.07 + 87.55) / 2, 16: 87.55, 32: 112.90}, abs=0.01)
    of_eight = found[8]
    assert of_eight is not None
    assert of_eight.skipped == 24
    assert of_eight.evaluations == pytest.approx(1 + (69_067_662 - 57_344_000) / 2_293_760)


def test_operations_of_a_run_and_of_an_evaluation() -> None:
    """The mean of 90.4 and 129.2 GFLOP, and the forward pass of the latter."""
    of_eight = many_ranks(MLPERF, EARLY, 1, 8)
    assert of_eight.of_run * 90.4 == pytest.approx((90.4 + 129.2) / 2, rel=2e-3)
    assert of_eight.of_evaluation * 90.4 == pytest.approx(67.0 / 3 + 62.1 * 2 / 7, rel=5e-3)


def test_rows_grow_with_the_ranks_they_were_not_measured_on() -> None:
    same = many_ranks(MLPERF, EARLY, 8, 8)
    assert (same.rows, same.imbalance) == (1.0, 0.02)
    assert many_ranks(MLPERF, EARLY, 1, 1).imbalance == 0
    assert many_ranks(MLPERF, EARLY, 2, 8).rows == pytest.approx(4**0.73)


def test_rows_that_amd_counted_are_as_many_more_as_it_says() -> None:
    sizes = read_record(ROOT / "results/66-1xh200-dlrmv4-1024-samples/00-cuda-graph").run["sample_sizes"]
    assert sizes is not None
    follow = many_ranks(MLPERF, sizes, 1, 4).rows * 1024 * sizes[work.ROWS]
    assert f"{50_000 / follow:.1f} times what follows" in ASSUMED


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="give a record of --preset mlperf-dlrmv4"):
        many_ranks(training("smoke-dlrmv4"), EARLY, 1, 8)
