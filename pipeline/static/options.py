"""Options of the static pipeline."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.optimizers import Adagrad
from dlrm_bench.dlrm.tables.dynamic.memory import MOST_PLACES
from dlrm_bench.dlrm.tables.plan.constraints import FLAG, Constraints, parse_constraints
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory


@dataclass(kw_only=True, slots=True, frozen=True)
class StaticOptions:
    """Our own embedding-bag collection: batch, multi-hot sizes and plan are constants, so every shape is fixed."""

    name: ClassVar[str] = "static"

    cuda_graph: Literal["none", "iteration", "try"] = "none"
    """iteration: replay all five stages as one CUDA graph, and end with an error where they cannot be captured. try:
    the same, but continue eagerly where they cannot. GPU only."""
    overlap: bool = False
    """Run input dist, bottom MLP, weight gradients, all-reduce and dense update on side streams."""
    presort_ids: bool = False
    """Sort ids one batch ahead, beside the table update, instead of in the embedding backward, and update tables from
    sorted ids with a kernel of ours."""
    peer_memory: bool = False
    """Let kernels write ids, pooled vectors, their gradients and updated dense weights directly into the memory of the
    other GPUs, in place of collectives and the copies around them; needs presort_ids. Over nodes: for exchanges within
    a node, before and after collectives between GPUs of equal local rank."""
    fp8: bool = False
    """Multiply in eight bits in the cross network and the top MLP's first layer, forward and backward. Needs
    --precision bf16, and on a GPU Hopper's instructions. Faster with some 2,000 samples a GPU or more, slower with
    few."""
    table_memory: str | None = None
    """Device memory for the sharded tables and their optimizer state: a share of each rank's rows, such as 0.5, or
    gigabytes a rank, such as 60GB. The other rows are in host memory; those that the next batch names come to the
    device beside the training, and rows that are named less often leave it. Needs presort_ids. None: all of them."""
    dynamic_rows: int | None = None
    """Have memory for so many rows of all tables on each rank, in place of all rows: a row is made when a batch first
    names it, with the weights and state that it would have had. For tables whose rows are looked up one by one. Without
    --evict-rows the results are those of full tables to the bit, and a run ends where there are more rows than
    places."""
    evict_rows: bool = False
    """Take places away from rows that were not named for long, where --dynamic-rows leaves none for new ones. A row
    that is named again begins anew."""
    table_counts: Path | None = None
    """File of counts of the rows (dlrm-bench data counts): with table_memory, those expected to be named most often are
    on the device at first. None: tables of many ids a sample and few rows first, and the first rows of the others."""
    check_ids: bool = False
    """Check on the device, before each iteration, that all ids are within their tables: for debugging, as the host
    waits for it."""
    constraints: tuple[str, ...] = ()
    """Your own sharding of single tables, as TABLES=SHARDING: `0,9=column-wise:64 20-22=table-wise`. SHARDING is
    table-wise, column-wise, column-wise:COLUMNS, row-wise or data-parallel. The planner obeys or says why it cannot."""

    def __post_init__(self) -> None:
        require(
            not self.peer_memory or self.presort_ids,
            "--peer-memory needs --presort-ids: FBGEMM's update takes no gradients from peer memory",
        )
        require(
            self.tiers is None or self.presort_ids,
            "--table-memory needs --presort-ids: FBGEMM's update takes no rows in host memory",
        )
        require(
            self.dynamic_rows is None or 0 < self.dynamic_rows <= MOST_PLACES,
            f"--dynamic-rows is {self.dynamic_rows}: a rank has from 1 to {MOST_PLACES} places",
        )
        require(
            not self.evict_rows or self.dynamic_rows is not None,
            "--evict-rows takes places of --dynamic-rows away: give their number",
        )
        require(
            self.table_counts is None or self.tiers is not None,
            f"--table-counts {self.table_counts} is for --table-memory: add that, or leave it out",
        )

    @property
    def tiers(self) -> TableMemory | None:
        """The parsed --table-memory; ValueError names the flag where it cannot be parsed."""
        if self.table_memory is None:
            return None
        return replace(TableMemory.parse(self.table_memory), counts=self.table_counts)

    @property
    def needs_gpu(self) -> str | None:
        """The flag that needs a GPU, with what to choose without one; None if there is no such flag."""
        if self.cuda_graph != "none":
            return f"--cuda-graph {self.cuda_graph} needs a GPU: on this machine choose --cuda-graph none"
        return None

    def replicates(self, nodes: int) -> bool:
        """Whether small tables may be replicated: not where pooled vectors reach all ranks through peer memory, as
        their summed gradients would be an iteration's only collective."""
        return nodes > 1 or not self.peer_memory

    def splits_rows(self, nodes: int) -> bool:
        """Whether the plan may split tables by rows: the update from sorted ids skips other ranks' rows, and only
        collectives add parts of pooled vectors up; rows in tiers of memory are in no parts."""
        return self.presort_ids and self.table_memory is None and (nodes > 1 or not self.peer_memory)

    def constraints_on(self, tables: Tables) -> Constraints:
        """Returns the user's constraints; ValueError names a word that is none, or that this pipeline cannot obey."""
        constraints = parse_constraints(self.constraints, tables)
        for table, constraint in constraints.items():
            require(
                constraint.device_share is None,
                f"{FLAG} {tables.names[table]}={constraint}: the static pipeline places rows by how often they are "
                "named over all tables: leave hbm out",
            )
        return constraints

    @property
    def dense(self) -> StaticDenseOptions:
        """The options of the benchmark's stage 3. FBGEMM's fused backward would update the tables once for each part of
        a batch: parts need ids that are sorted ahead."""
        return StaticDenseOptions(eight_bits=self.fp8, peer_memory=self.peer_memory, may_go_in_parts=self.presort_ids)

    def check(self, config: TrainingConfig) -> None:
        """Raises ValueError, naming the flag, where the embedding stages cannot train `config`; for stage 3 see
        Benchmark.check_static."""
        dim, optimizer = config.model.tables.columns, config.optimizer.tables
        self.constraints_on(config.model.tables)
        require(
            self.dynamic_rows is None or not config.model.tables.pooled,
            "--dynamic-rows is for tables whose rows are looked up one by one, as models of sequences have: leave it "
            "out",
        )
        require(
            not self.presort_ids or isinstance(optimizer, Adagrad),
            f"--presort-ids updates tables by exact Adagrad only: leave it out with --optimizer.embedding "
            f"{optimizer.name}",
        )
        require(
            not self.presort_ids or dim in (16, 32, 64, 128),
            f"--presort-ids updates rows of 16, 32, 64 or 128 columns: leave it out with --model.embedding-dim {dim}",
        )
        require(
            self.table_memory is None or config.model.tables.pooled,
            "--table-memory is for tables whose rows are pooled: leave it out for a model of sequences",
        )
        fbgemm = config.model.tables.pooled and not self.presort_ids
        require(
            not fbgemm or self.cuda_graph == "none" or config.optimizer.rate(1) is None,
            f"--cuda-graph {self.cuda_graph} captures FBGEMM's update with its learning rate, which here changes with "
            "the iterations: add --presort-ids, or choose --cuda-graph none",
        )
