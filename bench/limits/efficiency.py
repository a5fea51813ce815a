"""Efficiency of a run in time and power: samples per second, share of the tensor cores' peak (MFU), energy per
sample."""

from collections.abc import Sequence
from statistics import median
from typing import Literal

from dlrm_bench.bench.records.schema import Efficiency, RunRecord
from dlrm_bench.dlrm.benchmark import UNMEASURED, SampleSizes
from dlrm_bench.dlrm.benchmarks import benchmark_of
from dlrm_bench.dlrm.runtime.gpu_types import gpu_type

_ABOVE_LIMIT = 1.1
"""Ratio of mean power to the enforced limit above which an energy is not that of the timed iterations: counters lag by
0.1 s."""


def precision_of_products(run: RunRecord) -> str:
    """Returns the precision whose peak a run's MFU refers to: fp8 if any of its products are, else the run's."""
    config = run["config"]
    return "fp8" if config["pipeline"].get("fp8") else str(config.get("precision", ""))


def sizes_of(run: RunRecord) -> SampleSizes:
    """Returns the sizes of the samples that a record trained on, in the form that its benchmark's `work` takes."""
    return run.get("sample_sizes") or UNMEASURED


def efficiency_of(run: RunRecord) -> Efficiency | None:
    """Returns the efficiency of a timed run on GPUs; None for any other run, and for one that ended within its warm-up.

    MFU counts the operations that the model needs (benchmark.Work.flop_per_sample), without table lookups.
    """
    config, machine, samples = run["config"], run["machine"], run["samples_per_second"]
    if not machine["gpus"] or run["host"] is not None or not samples:
        return None
    a_gpu = samples / _gpus(run)
    peak = _peak_flop(run)
    benchmark = benchmark_of(config)
    needed = None
    if peak and benchmark is not None and benchmark.work is not None:
        needed = benchmark.work.flop_per_sample(benchmark.restored(config), sizes_of(run))
    joules = _joules_per_iteration(run)
    return Efficiency(
        samples_per_second_per_gpu=a_gpu,
        mfu=a_gpu * needed / peak if peak and needed else None,
        joules_per_sample=None if joules is None else joules / config["global_batch_size"],
    )


def power_of(run: RunRecord) -> float | None:
    """Returns watts per GPU over the timed iterations: from the energy counters, else the median of the samples after
    the warm-up; None if neither is known."""
    joules, ms, gpus = _joules_per_iteration(run), _by_clock_ms(run), run["machine"]["gpus"]
    if joules is not None and ms and gpus:
        return joules / (ms / 1000) / gpus
    return _median_of_samples(run, "power_w")


def sm_clock_of(run: RunRecord) -> float | None:
    """Returns the median SM clock over the timed iterations and GPUs, in MHz; None if no sample has it."""
    return _median_of_samples(run, "sm_clock_mhz")


def _gpus(run: RunRecord) -> int:
    """Returns the number of GPUs that the ranks run on; ranks may share GPUs. Older records lack it and have one per
    rank."""
    ranks = run["config"]["world_size"]
    return min(ranks, len(run["machine"].get("gpu_uuids", [])) or ranks)


def _by_clock_ms(run: RunRecord) -> float | None:
    latency = run["latency_ms"]
    return latency.get("by_clock") if latency else None


def _joules_per_iteration(run: RunRecord) -> float | None:
    """Returns the record's energy; None if the GPUs cannot have drawn it: older records of runs with evaluations
    include those of the evaluations, and older records of ranks that share GPUs count a GPU more than once."""
    conditions, ms = run.get("conditions"), _by_clock_ms(run)
    joules = conditions.get("joules_per_iteration") if conditions else None
    limit, gpus = run["machine"]["power_limit_w"], run["machine"]["gpus"]
    ranks = conditions.get("ranks", []) if conditions else []
    if _gpus(run) < run["config"]["world_size"] and not any(rank.get("gpu") for rank in ranks):
        return None
    if joules is None or not (limit and ms and gpus):
        return joules
    return None if joules / (ms / 1000) / gpus > _ABOVE_LIMIT * limit else joules


def _median_of_samples(run: RunRecord, what: Literal["power_w", "sm_clock_mhz"]) -> float | None:
    """Returns the median over the ranks' samples after the warm-up; of older records, which keep none, that of all
    samples."""
    conditions = run.get("conditions")
    if not conditions:
        return None
    known = [
        value
        for rank in conditions.get("ranks", [])
        for iteration, value in zip(rank["iteration"], rank[what], strict=True)
        if value is not None and iteration >= run["warmup_iterations"]
    ]
    triple = conditions[what]
    return median(known) if known else triple[1] if triple else None


def efficiency_of_runs(runs: Sequence[RunRecord]) -> Efficiency | None:
    """Returns medians over runs of one configuration; None if none of them has an efficiency."""
    known = [found for run in runs if (found := efficiency_of(run)) is not None]
    if not known:
        return None
    mfu = [each["mfu"] for each in known if each["mfu"] is not None]
    joules = [each["joules_per_sample"] for each in known if each["joules_per_sample"] is not None]
    return Efficiency(
        samples_per_second_per_gpu=median(each["samples_per_second_per_gpu"] for each in known),
        mfu=median(mfu) if mfu else None,
        joules_per_sample=median(joules) if joules else None,
    )


def efficiency_in_words(run: RunRecord) -> str | None:
    """Returns the efficiency of a run in words; None if it has none."""
    found = efficiency_of(run)
    if found is None:
        return None
    parts = [f"{found['samples_per_second_per_gpu']:,.0f} samples/s per GPU"]
    if found["mfu"] is not None:
        peak = _peak_flop(run)
        assert peak is not None  # an MFU is a share of it
        parts.append(f"MFU {found['mfu']:.1%} of {peak / 1e12:.0f} TFLOP/s ({precision_of_products(run)})")
    if found["joules_per_sample"] is not None:
        parts.append(f"{1e3 * found['joules_per_sample']:.4f} mJ per sample, GPUs only")
    return "; ".join(parts)


def _peak_flop(run: RunRecord) -> float | None:
    """Returns the peak FLOP per second of a run's products by its GPU's data sheet; None if unknown."""
    gpu = gpu_type(run["machine"]["gpu"])
    return gpu.data_sheet_flop.get(precision_of_products(run)) if gpu else None
