"""MFU and energy by hand, and what has none."""

import copy
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.limits.efficiency import (
    efficiency_in_words,
    efficiency_of,
    efficiency_of_runs,
    power_of,
    sm_clock_of,
)
from dlrm_bench.bench.machine.description import GpuState
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.records.schema import RunRecord
from tests.bench.made_records import H200, configured, profile, recorded_runs, telemetry, write

RUN = recorded_runs()[0]


def made(folder: Path, **changes) -> RunRecord:
    config = configured(precision="bf16", local_batch_size=6912)
    return read_record(write(folder, RUN * 0 + 2.5, world_size=8, **{"config": config} | changes)).run


def test_by_hand(tmp_path: Path) -> None:
    """6912 samples in 2.5 ms are 2.76 M a second; each takes 96 MFLOP of 989.4 T, and 3.456 of 55296 J."""
    energy = {**telemetry(), "joules_per_iteration": 3.456}
    run = made(tmp_path / "a", telemetry=energy)
    found = efficiency_of(run)
    assert found is not None
    assert found == run["efficiency"]
    assert found["samples_per_second_per_gpu"] == pytest.approx(6912 / 2.5e-3)
    assert found["mfu"] == pytest.approx(6912 / 2.5e-3 * 95.9e6 / 989.4e12, rel=0.01)
    assert found["joules_per_sample"] == pytest.approx(3.456 / 55296)
    assert (
        efficiency_in_words(run)
        == "2,764,800 samples/s per GPU; MFU 26.9% of 989 TFLOP/s (bf16); 0.0625 mJ per sample, GPUs only"
    )


def test_power_is_the_energy_over_the_elapsed_time(tmp_path: Path) -> None:
    """3.456 J in 2.5 ms on eight GPUs; without counters, the median of the samples after the warm-up."""
    run = made(tmp_path / "a", telemetry={**telemetry(), "joules_per_iteration": 3.456})
    assert power_of(run) == pytest.approx(3.456 / 2.5e-3 / 8)
    samples = {"temperature_c": [None] * 4, "clocks_event_reasons": [None] * 4, "energy_j": [None] * 4}
    rank = {"iteration": [0, 9, 10, 50], "power_w": [100, None, 600, 700], "sm_clock_mhz": [1980, 1980, 1500, 1600]}
    sampled = made(tmp_path / "b", telemetry={**telemetry(), "ranks": [{**samples, **rank}]})
    assert (power_of(sampled), sm_clock_of(sampled)) == (650, 1550)
    older = made(tmp_path / "c")
    assert (power_of(older), sm_clock_of(older)) == (500, 1980)
    assert power_of(made(tmp_path / "d", telemetry=None)) is None


def test_an_energy_that_gpus_cannot_have_drawn_is_none_of_its_iterations(tmp_path: Path) -> None:
    """3,445 W a GPU: an older record's, which counts what evaluations took."""
    run = made(tmp_path / "a", telemetry={**telemetry(), "joules_per_iteration": 3445 * 8 * 2.5e-3})
    found = efficiency_of(run)
    assert found is not None
    assert found["joules_per_sample"] is None
    assert power_of(run) == 500


def test_ranks_that_share_gpus_have_the_energy_and_the_samples_of_fewer_gpus(tmp_path: Path) -> None:
    """Eight ranks on four GPUs: an older record counts each GPU twice, a later one says which GPU a rank has."""
    machine = {**H200, "gpus": 4, "gpu_uuids": H200["gpu_uuids"][:4]}
    energy = {**telemetry(), "joules_per_iteration": 3.456}
    older = made(tmp_path / "a", machine=machine, telemetry=energy)
    found = efficiency_of(older)
    assert found is not None
    assert found["samples_per_second_per_gpu"] == pytest.approx(2 * 6912 / 2.5e-3)
    assert found["joules_per_sample"] is None
    assert power_of(older) == 500
    series: dict[str, Any] = {name: [] for name in ("iteration", *GpuState._fields)}
    ranks = [{**series, "gpu": machine["gpu_uuids"][i % 4]} for i in range(8)]
    later = made(tmp_path / "b", machine=machine, telemetry={**energy, "ranks": ranks})
    assert power_of(later) == pytest.approx(3.456 / 2.5e-3 / 4)


def test_runs_of_which_some_know_less(tmp_path: Path) -> None:
    known = made(tmp_path / "a", telemetry={**telemetry(), "joules_per_iteration": 3.456})
    without = made(tmp_path / "b", machine={**H200, "gpu": "NVIDIA B200"})
    found = efficiency_of_runs([known, without])
    assert found is not None
    assert found["joules_per_sample"] == pytest.approx(3.456 / 55296)
    alone = efficiency_of_runs([without])
    assert alone is not None
    assert (alone["mfu"], alone["joules_per_sample"]) == (None, None)
    assert efficiency_in_words(without) == "2,764,800 samples/s per GPU"


def test_neither_profiled_runs_nor_cpus_have_one(tmp_path: Path) -> None:
    profiled = made(tmp_path / "a", profile=profile())
    on_cpu = made(tmp_path / "b", machine={**H200, "gpus": 0, "gpu": None})
    assert profiled["efficiency"] is on_cpu["efficiency"] is efficiency_of_runs([profiled, on_cpu]) is None
    assert efficiency_in_words(on_cpu) is None


def test_products_in_eight_bits_are_a_share_of_the_peak_of_eight_bits(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    in_eight_bits: Any = copy.deepcopy(run)
    in_eight_bits["config"]["pipeline"]["fp8"] = True
    mfu, of_fp8 = ((efficiency_of(each) or {})["mfu"] for each in (run, in_eight_bits))
    assert mfu is not None
    assert of_fp8 == pytest.approx(mfu / 2, rel=1e-3)
    assert "of 1979 TFLOP/s (fp8)" in str(efficiency_in_words(in_eight_bits))
