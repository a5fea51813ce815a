"""Measures the ceilings of this machine into a limits record.

dlrm-bench limits --preset launch-bound [--field value ...]; --from FILE and --above RECORD reuse a measurement.

bench/limits/ceilings.py does the measurements.
"""

import json
from datetime import UTC, datetime
from functools import partial

import torch

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.checkpoints.folders import on_rank_0
from dlrm_bench.bench.config import RunConfig, as_json
from dlrm_bench.bench.instruments.beginning import BEGINNING
from dlrm_bench.bench.limits.ceilings import measure
from dlrm_bench.bench.machine.description import describe_machine, short_name
from dlrm_bench.bench.machine.source import git_state
from dlrm_bench.bench.records.json_file import write_whole
from dlrm_bench.bench.records.limits import (
    LIMITS_JSON,
    LIMITS_SCHEMA,
    Limits,
    floor,
)
from dlrm_bench.bench.records.record import create_run_folder, discard_run_folder, new_run_id
from dlrm_bench.dlrm.benchmark import UNMEASURED, SampleSizes
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.runtime.ranks import Ranks

_ITERATIONS = 100
"""Number of training iterations whose sample sizes determine the measured work."""


def run_limits(config: RunConfig, ranks: Ranks, command: str) -> Limits:
    """Measures everything and, on rank 0, writes limits.json into a new folder of config.results_dir. Collective.

    ValueError on every rank, before anything is measured, if that folder exists or cannot be created.
    """
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    BEGINNING.now("waits for the other ranks in init_process_group")
    ranks.init_process_group()
    BEGINNING.over()
    machine, source = describe_machine(), git_state(ROOT)  # now: files may change during the measurement
    of_samples = _sample_sizes(config, ranks)
    run_id = config.run_id or new_run_id(short_name(machine), f"{config.preset}-limits", datetime.now(UTC))
    folder = on_rank_0(ranks, partial(create_run_folder, config.results_dir, run_id))
    try:
        ceilings = list(measure(config, ranks, of_samples))
        sizes = {name: getattr(config, name) for name in ("preset", "local_batch_size", "precision")}
        limits = Limits(
            schema=LIMITS_SCHEMA,
            id=folder.name,  # by rank 0's clock
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            git=source,
            machine=machine,
            config={
                "benchmark": config.benchmark,
                **sizes,
                "world_size": ranks.world_size,
                "model": as_json(config)["model"],
                "table_optimizer": config.optimizer.tables.name,
                **({"sample_sizes": dict(of_samples)} if of_samples else {}),
            },
            ceilings=ceilings,
            floor_ms=floor(ceilings),
        )
        if ranks.rank == 0:
            write_whole(folder / LIMITS_JSON, json.dumps(limits, indent=2))
    except BaseException:
        if ranks.rank == 0:  # so that --run-id can be given again
            discard_run_folder(folder)
        raise
    return limits


def _sample_sizes(config: RunConfig, ranks: Ranks) -> SampleSizes:
    """Returns the sizes of the data's first samples, equal on all ranks, if the benchmark's work depends on sizes."""
    benchmark = named(config.benchmark)
    if benchmark.sample_sizes is None:
        return UNMEASURED
    dataset = benchmark.parts().open_data(config)
    return benchmark.sample_sizes(dataset, config, ranks.world_size, range(_ITERATIONS))
