"""Options of the static pipeline."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.optimizers import Adagrad, RowWiseAdagrad, TableOptimizer
from dlrm_bench.dlrm.tables.dynamic.memory import MOST_PLACES, RowPlaces
from dlrm_bench.dlrm.tables.plan.constraints import FLAG, Constraints, parse_constraints
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory


@dataclass(kw_only=True, slots=True, frozen=True)
class StaticOptions:
    """Our own embedding-bag collection: batch size, multi-hot sizes and plan are constants, so every shape is fixed."""

    name: ClassVar[str] = "static"

    cuda_graph: Literal["none", "iteration", "try"] = "none"
    """iteration: replay all five stages as one CUDA graph, and stop with an error if they cannot be captured. try: the
    same, but continue eagerly if they cannot. GPU only."""
    overlap: bool = False
    """Run input dist, bottom MLP, weight gradients, all-reduce and dense update on side streams."""
    presort_ids: bool = False
    """Sort ids one batch ahead, beside the table update, instead of in the embedding backward, and update tables from
    sorted ids with our own kernel."""
    peer_memory: bool = False
    """Let kernels write ids, pooled vectors, their gradients and updated dense weights directly into the memory of the
    other GPUs, in place of collectives and the copies around them; needs presort_ids. Over nodes: for exchanges within
    a node, before and after collectives between GPUs of equal local rank."""
    fp8: bool = False
    """Use 8-bit products. Models with pooled tables: in the cross network and the top MLP's first layer, forward and
    backward; faster from about 2,000 samples per GPU on, slower with few samples. Models of sequences: in the forward
    pass of their layers over all tokens, with `--model.kernels fused`. Needs `--precision bf16` and, on a GPU, Hopper's
    instructions."""
    table_memory: str | None = None
    """Device memory for the sharded tables and their optimizer state: a share of each rank's rows, such as 0.5, or
    gigabytes per rank, such as 60GB. Host memory holds the other rows; rows that the next batch names are copied to the
    device during training, and rows that are named less often leave it. Needs presort_ids. None: all rows."""
    dynamic_rows: int | None = None
    """Allocate memory for this number of rows of all tables on each rank, instead of all rows: a row is made when a
    batch first names it, with the initial weights and state of a full table. Each pooled table is then whole on one
    rank. Without --evict-rows the results are bit-identical to those of full tables, and a run ends if a rank needs
    more rows than that."""
    evict_rows: bool = False
    """Replace rows that have not been named for a long time if --dynamic-rows has no places left for new ones; with a
    batch at most a 64th of all places, or 4,096 if that is more. A row that is named again restarts from its initial
    weights."""
    table_counts: Path | None = None
    """File of row counts (dlrm-bench data counts): with table_memory, the device initially holds the rows expected to
    be named most often. None: first the tables with many ids per sample and few rows, then the other tables' first
    rows."""
    check_ids: bool = False
    """Check on the device, before each iteration, that all ids are within their tables; with table_memory, which uses
    them an iteration ahead, first in the host's batch. For debugging: the host waits for the result."""
    constraints: tuple[str, ...] = ()
    """Your own sharding of single tables, as TABLES=SHARDING: `0,9=column-wise:64 20-22=table-wise,hbm:0.2`. SHARDING
    is table-wise, column-wise, column-wise:COLUMNS, row-wise or data-parallel. With table_memory, hbm:SHARE keeps
    exactly this share of the table's rows on the device, those that are named most often; they are part of
    table_memory. 1: the whole table; 0: none of it. The planner follows it or reports why it cannot."""

    def __post_init__(self) -> None:
        require(
            not self.peer_memory or self.presort_ids,
            "--peer-memory needs --presort-ids: FBGEMM's update cannot take gradients from peer memory",
        )
        require(
            self.table_memory is None or self.presort_ids,
            "--table-memory needs --presort-ids: FBGEMM's update does not support rows in host memory",
        )
        require(
            self.dynamic_rows is None or 0 < self.dynamic_rows <= MOST_PLACES,
            f"--dynamic-rows is {self.dynamic_rows}: choose 1 to {MOST_PLACES} places per rank",
        )
        require(
            not self.evict_rows or self.dynamic_rows is not None,
            "--evict-rows reuses places of --dynamic-rows: set --dynamic-rows, or leave --evict-rows out",
        )
        require(
            self.dynamic_rows is None or self.table_memory is None,
            "--dynamic-rows holds only named rows, --table-memory holds all rows, in two tiers: choose one",
        )
        require(
            self.table_counts is None or self.table_memory is not None,
            f"--table-counts {self.table_counts} is for --table-memory: add that, or leave it out",
        )

    def tiers(self, tables: Tables) -> TableMemory | None:
        """Returns the parsed --table-memory, with the shares of single tables; ValueError names the flag if it cannot
        be parsed."""
        if self.table_memory is None:
            return None
        shares = {
            table: constraint.device_share
            for table, constraint in self.constraints_on(tables).items()
            if constraint.device_share is not None
        }
        return replace(TableMemory.parse(self.table_memory), counts=self.table_counts, shares=shares)

    @property
    def row_places(self) -> RowPlaces | None:
        """The places of --dynamic-rows and --evict-rows; None if all rows are in memory."""
        return None if self.dynamic_rows is None else RowPlaces(self.dynamic_rows, self.evict_rows)

    @property
    def needs_gpu(self) -> str | None:
        """The flag that needs a GPU, with what to choose without one; None if there is no such flag."""
        if self.cuda_graph != "none":
            return f"--cuda-graph {self.cuda_graph} needs a GPU: on this machine choose --cuda-graph none"
        return None

    def replicates(self, nodes: int) -> bool:
        """Whether small tables may be replicated: not if pooled vectors reach all ranks through peer memory, because
        their summed gradients would be an iteration's only collective; nor with dynamic rows, each of which has one
        owner whatever the number of ranks."""
        return self.dynamic_rows is None and (nodes > 1 or not self.peer_memory)

    def splits_rows(self, nodes: int) -> bool:
        """Whether the plan may split tables by rows: the update from sorted ids skips other ranks' rows, and only
        collectives sum partial pooled vectors; tables whose rows have places cannot be split."""
        placed = self.table_memory is not None or self.dynamic_rows is not None
        return self.presort_ids and not placed and (nodes > 1 or not self.peer_memory)

    @property
    def splits_columns(self) -> bool:
        """Whether the plan may split tables by columns: a dynamic row is saved whole."""
        return self.dynamic_rows is None

    def constraints_on(self, tables: Tables) -> Constraints:
        """Returns the user's constraints; ValueError names a malformed word, or one that this pipeline cannot obey."""
        constraints = parse_constraints(self.constraints, tables)
        for table, constraint in constraints.items():
            require(
                constraint.device_share is None or self.table_memory is not None,
                f"{FLAG} {tables.names[table]}={constraint}: hbm is for tables in two tiers of memory: add "
                "--table-memory (1: all rows of the other tables are on the device), or leave hbm out",
            )
            require(
                self.dynamic_rows is None or constraint.kind in (None, "table-wise"),
                f"{FLAG} {tables.names[table]}={constraint}: with --dynamic-rows each table is whole on one rank: "
                "choose table-wise",
            )
        return constraints

    @property
    def dense(self) -> StaticDenseOptions:
        """The options of the benchmark's stage 3. FBGEMM's fused backward would update the tables once for each part of
        a batch, so parts need presorted ids."""
        return StaticDenseOptions(eight_bits=self.fp8, peer_memory=self.peer_memory, may_go_in_parts=self.presort_ids)

    def check(self, config: TrainingConfig) -> None:
        """Raises ValueError, naming the flag, if the embedding stages cannot train `config`; for stage 3 see
        Benchmark.check_static."""
        dim, optimizer = config.model.tables.columns, config.optimizer.tables
        self.tiers(config.model.tables)
        self.constraints_on(config.model.tables)
        self._check_raw_ids(config.model.tables)
        self._check_dynamic_rows(config.model.tables, optimizer)
        require(
            not self.presort_ids or config.model.tables.pooled,
            "--presort-ids, --peer-memory and --table-memory are for pooled tables: leave them out for a model of "
            "sequences",
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
        fbgemm = config.model.tables.pooled and not self.presort_ids
        require(
            not fbgemm or self.cuda_graph == "none" or config.optimizer.rate(1) is None,
            f"--cuda-graph {self.cuda_graph} captures FBGEMM's update with its learning rate, but this rate changes "
            "with the iterations: add --presort-ids, or choose --cuda-graph none",
        )

    def _check_raw_ids(self, tables: Tables) -> None:
        require(
            not tables.raw_ids or self.dynamic_rows is not None,
            "--model.raw-ids gives no number of rows: add --dynamic-rows N, the rows that a rank has memory for",
        )
        require(
            not tables.raw_ids or not self.check_ids,
            "--check-ids compares ids with sizes of tables, and with --model.raw-ids there are none: leave it out",
        )

    def _check_dynamic_rows(self, tables: Tables, optimizer: TableOptimizer) -> None:
        """Raises ValueError if pooled tables cannot use --dynamic-rows. FBGEMM's row-wise Adagrad on CPUs rounds
        differently if tables share memory; on GPUs that is not known."""
        if self.dynamic_rows is None or not tables.pooled:
            return
        require(
            tables.columns & (tables.columns - 1) == 0,
            f"--dynamic-rows needs a power of two of columns: leave it out with --model.embedding-dim {tables.columns}",
        )
        require(
            not isinstance(optimizer, RowWiseAdagrad),
            f"--dynamic-rows: pooled tables with --optimizer.embedding {optimizer.name} would round differently than "
            "full tables: choose adagrad or sgd, or leave it out",
        )
        require(
            self.dynamic_rows >= tables.count,
            f"--dynamic-rows is {self.dynamic_rows}: a rank may own any of {tables.count} tables, and warms up with a "
            "row of each: give at least that many places",
        )
        require(
            tables.raw_ids or sum(tables.rows) < 1 << 31,
            f"--dynamic-rows: the tables have {sum(tables.rows)} rows in all, more than 31-bit row numbers allow: "
            "choose tables with fewer rows",
        )
