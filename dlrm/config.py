"""What one run is: frozen dataclasses, one field for each command-line flag.

A field's docstring is its help text. Errors name the flag to change. Complete configurations live in presets.py.
"""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16"]
DataSource = Literal["random", "multi_hot", "one_hot"]
EBCName = Literal["torchrec", "static"]
PipelineName = Literal["base", "sparse-dist", "fused-sparse-dist", "five-stage"]
CudaGraph = Literal["none", "dense", "iteration"]
QuantizedComms = Literal["none", "bf16", "fp16"]
TableOptimizer = Literal["adagrad", "rowwise_adagrad", "sgd"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig:
    """DLRM-DCNv2: one embedding table per categorical feature, a bottom MLP, a low-rank cross network, a top MLP."""

    num_embeddings: tuple[int, ...]
    """Rows of each embedding table, before table_scale."""
    multi_hot_sizes: tuple[int, ...]
    """Ids per sample of each categorical feature (fixed, MLPerf's multi-hot sizes)."""
    table_scale: float = 1.0
    """Factor on every table's rows (at least one row stays); below 1 it fits the tables on smaller GPUs."""
    embedding_dim: int = 128
    """Columns of every embedding table."""
    dense_in_features: int = 13
    """Dense features per sample."""
    bottom_mlp: tuple[int, ...] = (512, 256, 128)
    """Layer widths of the bottom MLP; the last one must equal embedding_dim."""
    cross_layers: int = 3
    """Layers of the cross network."""
    cross_rank: int = 512
    """Rank of each cross layer's two factors."""
    top_mlp: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    """Layer widths of the top MLP; the last one must be 1, the logit."""

    def __post_init__(self) -> None:
        _require(len(self.num_embeddings) > 0, "--model.num-embeddings: at least one table is needed")
        _require(
            len(self.num_embeddings) == len(self.multi_hot_sizes),
            f"--model.num-embeddings has {len(self.num_embeddings)} tables and --model.multi-hot-sizes "
            f"{len(self.multi_hot_sizes)}: give one size for each table",
        )
        for flag in ("num_embeddings", "multi_hot_sizes", "bottom_mlp", "top_mlp"):
            values = getattr(self, flag)
            _require(
                len(values) > 0 and min(values) > 0, f"--model.{flag.replace('_', '-')}: every number must be positive"
            )
        for flag in ("embedding_dim", "dense_in_features", "cross_layers", "cross_rank"):
            _require(getattr(self, flag) > 0, f"--model.{flag.replace('_', '-')} must be positive")
        _require(
            self.embedding_dim % 4 == 0,
            f"--model.embedding-dim is {self.embedding_dim}: FBGEMM's kernels need a multiple of 4",
        )
        _require(0 < self.table_scale <= 1, f"--model.table-scale is {self.table_scale}: choose 0 < scale <= 1")
        _require(
            max(self.rows) < 2**31,
            f"--model.num-embeddings has a table of {max(self.rows)} rows: ids are 32 bits wide, so keep it below 2^31",
        )
        _require(
            self.bottom_mlp[-1] == self.embedding_dim,
            f"--model.bottom-mlp ends in {self.bottom_mlp[-1]}: its last width must be "
            f"--model.embedding-dim ({self.embedding_dim})",
        )
        _require(self.top_mlp[-1] == 1, f"--model.top-mlp ends in {self.top_mlp[-1]}: its last width must be 1")

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each table as built, after table_scale."""
        return tuple(max(1, math.ceil(rows * self.table_scale)) for rows in self.num_embeddings)

    @property
    def num_features(self) -> int:
        """Number of categorical features, which is the number of tables."""
        return len(self.num_embeddings)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """KJT keys in table order, named as the MLPerf reference names them."""
        return tuple(f"cat_{feature}" for feature in range(self.num_features))

    @property
    def ids_per_sample(self) -> int:
        """Ids of one sample over all features (214 in the MLPerf model)."""
        return sum(self.multi_hot_sizes)

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables in fp32, without optimizer state."""
        return sum(self.rows) * self.embedding_dim * 4


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig:
    """Where samples come from."""

    source: DataSource = "random"
    """random: in-memory batches for latency runs. multi_hot: MLPerf day files. one_hot: day files of one id per
    feature, expanded by MLPerf's seeded tables."""
    path: Path | None = None
    """Directory of the day files; needed unless source is random."""
    train_days: int = 23
    """Days 0 to train_days - 1 train; the first half of day train_days evaluates (MLPerf: 23)."""
    prefetch_batches: int = 16
    """Batches that the reader thread keeps ready in pinned memory, ahead of the GPU."""
    random_batches: int = 32
    """Distinct batches of source random; they are drawn before the run and used in turn."""
    random_skew: float = 1.05
    """Zipf exponent of a feature's first id under source random; the other ids are uniform over the table."""
    variable_lengths: bool = False
    """Bags of none to multi_hot_sizes ids, which then are capacities, of equal probability (source random, ebc
    static)."""

    def __post_init__(self) -> None:
        if self.source != "random":
            _require(
                self.path is not None,
                f"--data.path is missing: --data.source {self.source} reads day files from a directory",
            )
        for flag in ("train_days", "prefetch_batches", "random_batches"):
            _require(getattr(self, flag) > 0, f"--data.{flag.replace('_', '-')} must be positive")
        _require(
            not self.variable_lengths or self.source == "random",
            f"--data.variable-lengths: the day files of --data.source {self.source} have full bags; choose random",
        )
        _require(0 <= self.random_skew < math.inf, "--data.random-skew must be finite and not negative")


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerConfig:
    """Element-wise Adagrad on dense weights and, for MLPerf, on tables; MLPerf fixes all but the learning rate."""

    embedding: TableOptimizer = "adagrad"
    """Optimizer of the tables. adagrad: element-wise, MLPerf's. rowwise_adagrad: one state for each row, from the mean
    of its squared gradients. sgd: no state."""
    learning_rate: float = 0.004
    """Constant learning rate of tables and dense weights."""
    eps: float = 1e-8
    """Adagrad's epsilon."""

    def __post_init__(self) -> None:
        _require(0 < self.learning_rate < math.inf, "--optimizer.learning-rate must be finite and positive")
        _require(0 < self.eps < math.inf, "--optimizer.eps must be finite and positive")

    def state_columns(self, columns: int) -> int:
        """fp32 elements of optimizer state that a table row of `columns` columns has."""
        return {"adagrad": columns, "rowwise_adagrad": 1, "sgd": 0}[self.embedding]


@dataclass(kw_only=True, slots=True, frozen=True)
class MLPerfConfig:
    """What the MLPerf log says about the submission."""

    org: str = "unaffiliated"
    """Submitting organisation."""
    division: Literal["closed", "open"] = "open"
    """MLPerf division; closed fixes the model, the data and the target."""
    status: Literal["onprem", "cloud", "research", "preview"] = "onprem"
    """Availability category."""
    platform: str | None = None
    """Name of the system; by default made from the machine's GPUs."""
    clear_cache: bool = False
    """Drop the page cache of every node before initialising, as submissions must (needs root)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunConfig:
    """One run of the benchmark."""

    preset: str
    """The named configuration that this one started from."""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mlperf: MLPerfConfig = field(default_factory=MLPerfConfig)
    ebc: EBCName = "torchrec"
    """torchrec: TorchRec's sharded modules. static: fixed shapes straight on FBGEMM's table-batched embeddings."""
    pipeline: PipelineName | None = None
    """The schedule. base, sparse-dist, fused-sparse-dist: TorchRec's own train pipelines, unmodified (the last needs a
    GPU). five-stage: ours, the only one of ebc static and its default; that of ebc torchrec is sparse-dist."""
    cuda_graph: CudaGraph = "none"
    """dense: forward, backward and all-reduce of the dense network in one CUDA graph (ebc torchrec, pipeline
    five-stage). iteration: all five stages in one (ebc static). GPU."""
    cuda_graph_fallback: bool = False
    """Go on eagerly where the iteration cannot be captured, instead of ending with an error."""
    plan: Literal["balanced", "torchrec"] = "balanced"
    """Which planner places the tables of ebc static: our own, or TorchRec's, limited to table-wise, column-wise and
    data-parallel sharding."""
    row_wise: bool = True
    """Let TorchRec's planner split tables by rows, which makes the input dist depend on the ids: the host has to read
    the sizes of its exchange (ebc torchrec)."""
    avoid_record_streams: bool = False
    """Keep the buffers that streams share alive by events instead of record_stream (ebc torchrec, pipeline
    five-stage)."""
    pinned_d2h: bool = False
    """Read device values through pinned memory, waiting where a value is needed and not where its copy is issued (ebc
    torchrec, pipeline five-stage)."""
    launch_threads: Literal[1, 2] = 1
    """2: another host thread launches the next batch's input dist, and the dense update (ebc torchrec, pipeline
    five-stage)."""
    trim_input_dist: bool = False
    """Leave out of the input dist what fixed multi-hot sizes make constant: exchanges of splits and lengths, and their
    reads by the host; and, where tables are sharded table-wise alone, out of the output dist its copies and second
    autograd function (ebc torchrec, pipeline five-stage)."""
    graph_dists: bool = False
    """With trim_input_dist: replay each all-to-all of ids and pooled vectors, with what is around it, as a CUDA graph
    (ebc torchrec, pipeline five-stage)."""
    inplace_copy: bool = False
    """TorchRec's enable_inplace_copy_batch: batches are copied into GPU memory that the main stream allocated (ebc
    torchrec, but for pipeline five-stage)."""
    quantized_comms: QuantizedComms = "none"
    """Number format of pooled vectors and their gradients in TorchRec's collectives; gradients are bf16 in both. On the
    CPU TorchRec takes fp16 for bf16 (ebc torchrec)."""
    overlap: bool = False
    """Run input dist, bottom MLP, weight gradients, all-reduce and dense update beside the rest (ebc static)."""
    presort_ids: bool = False
    """Sort ids in the input dist, a batch ahead, instead of in the embedding backward (ebc static)."""
    peer_memory: bool = False
    """With presort_ids, on one node: kernels write ids, pooled vectors, their gradients and updated dense weights
    straight into the other GPUs' memory, in the place of collectives and the copies around them (ebc static)."""
    local_batch_size: int
    """Samples per rank and iteration; the global batch is this times the world size."""
    precision: Precision = "tf32"
    """Matrix products of the dense network: fp32, tf32, or bf16 by autocast. Weights stay fp32. CPU: fp32 or bf16."""
    iterations: int | None = None
    """Training iterations, warm-up included; by default one epoch (source random needs a number)."""
    warmup_iterations: int = 50
    """First iterations that the latency summary leaves out; the raw times keep them."""
    target_auc: float | None = None
    """Stop with success at the first evaluation that reaches this AUC; without one nothing is evaluated."""
    evaluations_per_epoch: int = 20
    """An evaluation follows every floor(train samples / (this * global batch)) iterations."""
    loss_interval: int = 100
    """Iterations between two checks of the loss; a non-finite one stops every rank."""
    seed: int = 0
    """Seed of weights and random batches."""
    results_dir: Path = Path("results")
    """Directory of records; the run makes one folder in it and never writes into an existing one."""
    run_id: str | None = None
    """Name of this run's folder; by default date, machine and preset."""

    def __post_init__(self) -> None:
        self._check_switches()
        _require(
            not self.cuda_graph_fallback or self.cuda_graph != "none",
            "--cuda-graph-fallback says what follows a failed capture: choose --cuda-graph iteration",
        )
        _require(
            not self.data.variable_lengths or self.ebc == "static",
            "--data.variable-lengths applies to --ebc static only",
        )
        _require(
            not self.presort_ids or self.optimizer.embedding == "adagrad",
            f"--presort-ids updates tables by exact Adagrad alone: leave it out with --optimizer.embedding "
            f"{self.optimizer.embedding}",
        )
        _require(
            not self.peer_memory or self.presort_ids,
            "--peer-memory needs --presort-ids: FBGEMM's update takes no gradients from peer memory",
        )
        dim = self.model.embedding_dim
        _require(
            not self.presort_ids or dim in (16, 32, 64, 128),
            f"--presort-ids updates rows of 16, 32, 64 or 128 columns: leave it out with --model.embedding-dim {dim}",
        )
        _require(
            self.ebc != "static" or (self.model.num_features + 1) * dim % 8 == 0,
            f"--ebc static needs (features + 1) * --model.embedding-dim to be a multiple of 8, and "
            f"({self.model.num_features} + 1) * {dim} is not: choose a multiple of 8",
        )
        _require(self.local_batch_size > 0, f"--local-batch-size is {self.local_batch_size}: it must be positive")
        _require(
            self.iterations is not None or self.data.source != "random",
            "--iterations is missing: random batches have no end",
        )
        _require(self.iterations is None or self.iterations > 0, "--iterations must be positive")
        _require(self.warmup_iterations >= 0, "--warmup-iterations must not be negative")
        _require(
            self.iterations is None or self.warmup_iterations < self.iterations,
            f"--warmup-iterations ({self.warmup_iterations}) leaves nothing to time: keep it below "
            f"--iterations ({self.iterations})",
        )
        _require(
            self.target_auc is None or 0.5 < self.target_auc < 1,
            f"--target-auc is {self.target_auc}: an AUC target lies between 0.5 and 1",
        )
        _require(
            self.target_auc is None or self.data.source != "random",
            "--target-auc: random labels cannot be learned; choose --data.source multi_hot or one_hot",
        )
        _require(self.evaluations_per_epoch > 0, "--evaluations-per-epoch must be positive")
        _require(self.loss_interval > 0, "--loss-interval must be positive")
        _require(0 <= self.seed < 2**63, f"--seed is {self.seed}: choose 0 <= seed < 2^63")
        _require(
            self.run_id is None or (self.run_id not in ("", ".", "..") and "/" not in self.run_id),
            f"--run-id is {self.run_id!r}: it names a folder, without slashes",
        )

    def _check_switches(self) -> None:
        """Every switch of a schedule is off where another one runs."""
        _require(
            self.trim_input_dist or not self.graph_dists,
            "--graph-dists needs --trim-input-dist: only what has fixed sizes can be replayed",
        )
        theirs, ours = self.ebc == "torchrec", self.pipeline == "five-stage"
        _require(
            theirs or self.pipeline in (None, "five-stage"),
            f"--pipeline {self.pipeline} needs --ebc torchrec: leave it out, as --ebc static is always five-stage",
        )
        off = {switch.name: switch.default for switch in fields(self)}
        for switches, applies, needed in (
            (("overlap", "presort_ids", "peer_memory", "plan", "cuda_graph_fallback"), not theirs, "--ebc static"),
            (("row_wise", "quantized_comms"), theirs, "--ebc torchrec"),
            (("inplace_copy",), theirs and not ours, "--ebc torchrec and another --pipeline than five-stage"),
            (
                ("avoid_record_streams", "pinned_d2h", "launch_threads", "trim_input_dist", "graph_dists"),
                theirs and ours,
                "--pipeline five-stage and --ebc torchrec",
            ),
        ):
            for switch in switches:
                value, flag = getattr(self, switch), switch.replace("_", "-")
                _require(
                    applies or value == off[switch],
                    f"--{'no-' if value is False else ''}{flag} needs {needed}: set that or leave it out",
                )
        _require(
            self.cuda_graph != "dense" or (theirs and ours),
            "--cuda-graph dense needs --pipeline five-stage and --ebc torchrec; --ebc static has iteration",
        )
        _require(
            self.cuda_graph != "iteration" or not theirs,
            "--cuda-graph iteration needs --ebc static; --ebc torchrec with --pipeline five-stage has dense",
        )

    @property
    def pipeline_name(self) -> PipelineName:
        """The schedule by name: `pipeline`, or what is the default of `ebc`."""
        return self.pipeline or ("five-stage" if self.ebc == "static" else "sparse-dist")

    @property
    def pooled_bytes(self) -> int:
        """Bytes of one element of a pooled vector in the static EBC's all-to-alls."""
        return 2 if self.precision == "bf16" else 4
