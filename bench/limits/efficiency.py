"""What GPUs make of their time and power: samples a second, share of the tensor cores' peak (MFU), energy a sample."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, TypeVar, get_type_hints

from dlrm_bench.bench.records.schema import Efficiency, RunRecord
from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.work import flop_per_sample

DATA_SHEET_FLOP: Mapping[str, Mapping[str, float]] = {
    "NVIDIA H200": {"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 67e12},  # SXM, dense
}
"""FLOP a second that the maker states, by GPU and precision of a run: what an MFU is a share of."""
_T = TypeVar("_T")


def efficiency_of(run: RunRecord) -> Efficiency | None:
    """The efficiency of a timed run on GPUs; None of any other, and of one that ended within its warm-up.

    MFU counts the model's GEMMs alone (dlrm.work.flop_per_sample), and none of its table lookups.
    """
    config, machine, samples = run["config"], run["machine"], run["samples_per_second"]
    if not machine["gpus"] or run["host"] is not None or not samples:
        return None
    a_gpu = samples / config["world_size"]
    most = DATA_SHEET_FLOP.get(machine["gpu"] or "", {}).get(config.get("precision", ""))
    conditions = run.get("conditions")
    joules = conditions.get("joules_per_iteration") if conditions else None
    return Efficiency(
        samples_per_second_per_gpu=a_gpu,
        mfu=a_gpu * flop_per_sample(restored(ModelConfig, config["model"])) / most if most else None,
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
        precision = run["config"]["precision"]
        most = DATA_SHEET_FLOP[str(run["machine"]["gpu"])][precision]
        parts.append(f"MFU {found['mfu']:.1%} of {most / 1e12:.0f} TFLOP/s ({precision})")
    if found["joules_per_sample"] is not None:
        parts.append(f"{1e3 * found['joules_per_sample']:.4f} mJ a sample, GPUs alone")
    return "; ".join(parts)


def restored(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """A dataclass from a record's values; what it does not know is left out, lists become tuples."""
    known = get_type_hints(kind)
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
    return kind(**{name: v for name, v in given.items() if not (name == "path" and v is None)})
