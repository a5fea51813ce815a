"""What `--print-plan` shows: which rank of the static EBC would hold what, and how evenly the work would spread."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.embedding.plan import Shard, imbalance, iteration_us, plan_for, rank_loads
from dlrm_bench.dlrm.embedding.table_memory import HEADROOM
from dlrm_bench.dlrm.embedding.torchrec_plan import make_torchrec_plan
from dlrm_bench.pipeline.static.options import StaticOptions

_H200_BYTES = 141_000_000_000


def print_plan(config: RunConfig, world_size: int) -> None:
    """Prints the plan of `world_size` ranks as a table; ValueError where there is none."""
    if world_size < 1:
        raise ValueError(f"--print-plan {world_size}: a plan is for at least one rank")
    model, global_batch_size = config.model, config.local_batch_size * world_size
    options = config.pipeline if isinstance(config.pipeline, StaticOptions) else StaticOptions()
    if options.plan == "torchrec":
        plan = make_torchrec_plan(config, world_size, world_size, "cuda", _H200_BYTES)
    else:
        plan = plan_for(config, world_size, int(_H200_BYTES * HEADROOM), replicate=not options.peer_memory)
    loads = rank_loads(plan, model, config.optimizer, global_batch_size, config.pooled_bytes)
    table = Table(
        title=f"{config.preset} with --pipeline static on {world_size} rank(s), global batch {global_batch_size}",
        caption="us: predicted work of an iteration on an H200; tables: lookup, sort, update; all: and the all-to-alls",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("rank", justify="right")
    table.add_column("tables [columns]")
    for name in ("columns", "tables, us", "all, us", "tables, GB", "state, GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, load in enumerate(loads):
        table.add_row(
            str(rank),
            _names(plan.of_rank(rank), model),
            str(load.columns),
            f"{load.tables_us:.0f}",
            f"{load.embedding_us:.0f}",
            f"{load.table_bytes / 1e9:.3g}",
            f"{load.state_bytes / 1e9:.3g}",
        )
    if plan.replicated:
        table.add_row("all", " ".join(model.feature_names[table] for table in plan.replicated), "0", "", "", "", "")
    console = Console(width=120, markup=False, highlight=False)
    console.print(table)
    console.print(
        f"largest / mean of the ranks: tables {imbalance([load.tables_us for load in loads]):.3f}, "
        f"all {imbalance([load.embedding_us for load in loads]):.3f}"
    )
    iteration = iteration_us(plan.shards, model, world_size, global_batch_size, config.pooled_bytes)
    console.print(f"slowest tables and largest all-to-alls, which all ranks wait for: {iteration:.0f} us")


def _names(shards: Sequence[Shard], model: ModelConfig) -> str:
    """Tables by feature; of a split one, which columns."""
    return " ".join(
        model.feature_names[shard.table]
        + ("" if shard.columns == model.embedding_dim else f"[{shard.column}:{shard.column + shard.columns}]")
        for shard in shards
    )
