"""What GPUs make of their time and power: samples a second, share of the tensor cores' peak (MFU), energy a sample."""

from collections.abc import Mapping, Sequence
from statistics import median

from dlrm_bench.bench.records.schema import Efficiency, RunRecord
from dlrm_bench.dlrm.benchmarks import benchmark_of

DATA_SHEET_FLOP: Mapping[str, Mapping[str, float]] = {
    "NVIDIA H200": {"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 67e12, "fp8": 1978.9e12},  # SXM, dense
}
"""FLOP a second that the maker states, by GPU and precision of the products: what an MFU is a share of."""


def precision_of_products(run: RunRecord) -> str:
    """Returns the precision that a run's MFU is a share of: fp8 where any of its products are, else the run's."""
    config = run["config"]
    return "fp8" if config["pipeline"].get("fp8") else str(config.get("precision", ""))


def efficiency_of(run: RunRecord) -> Efficiency | None:
    """The efficiency of a timed run on GPUs; None of any other, and of one that ended within its warm-up.

    MFU counts the operations that the model needs (benchmark.Work.flop_per_sample), and none of its table lookups.
    """
    config, machine, samples = run["config"], run["machine"], run["samples_per_second"]
    if not machine["gpus"] or run["host"] is not None or not samples:
        return None
    a_gpu = samples / config["world_size"]
    most = DATA_SHEET_FLOP.get(machine["gpu"] or "", {}).get(precision_of_products(run))
    benchmark = benchmark_of(config)
    needed = None
    if most and benchmark is not None and benchmark.work is not None:
        needed = benchmark.work.flop_per_sample(benchmark.restored(config))
    conditions = run.get("conditions")
    joules = conditions.get("joules_per_iteration") if conditions else None
    return Efficiency(
        samples_per_second_per_gpu=a_gpu,
        mfu=a_gpu * needed / most if most and needed else None,
        joules_per_sample=None if joules is None else joules / config["global_batch_size"],
    )


def efficiency_of_runs(runs: Sequence[RunRecord]) -> Efficiency | None:
    """Medians over runs of one configuration; None where none of them has an efficiency."""
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
    """Says what is known of a run's efficiency; None where nothing is."""
    found = efficiency_of(run)
    if found is None:
        return None
    parts = [f"{found['samples_per_second_per_gpu']:,.0f} samples/s a GPU"]
    if found["mfu"] is not None:
        precision = precision_of_products(run)
        most = DATA_SHEET_FLOP[str(run["machine"]["gpu"])][precision]
        parts.append(f"MFU {found['mfu']:.1%} of {most / 1e12:.0f} TFLOP/s ({precision})")
    if found["joules_per_sample"] is not None:
        parts.append(f"{1e3 * found['joules_per_sample']:.4f} mJ a sample, GPUs alone")
    return "; ".join(parts)
