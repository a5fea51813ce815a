"""The built-in ladders of DLRM-DCNv2: each rung's flags of launch/dlrm.py, and the cost that it removes from the
previous rung."""

from dlrm_bench.dlrm.benchmark import Rung

_FP32, _TF32, _BF16 = (("--precision", precision) for precision in ("fp32", "tf32", "bf16"))
_STOCK = "TrainPipelineSparseDist as the MLPerf reference runs it."
# Row-wise sharding makes the input dist depend on the ids; without row-wise sharding, all of it can be trimmed.
_NO_ROWS = ("--no-row-wise",)
_TUNED = Rung(
    "stock-tuned",
    ("--inplace-copy", "--quantized-comms", "bf16", "--dense-all-reduce", "bf16", *_NO_ROWS, *_BF16),
    "What TorchRec's public options can: bf16 autocast, all-to-alls and all-reduce, in-place copies, no rows split.",
)
_COMPILED = Rung(
    "stock-compiled",
    (*_TUNED.flags, "--compile-dense"),
    "The dense network's element-wise kernels and most of its launches' cost, by torch.compile.",
)
_FIVE_STAGE = ("--pipeline", "five-stage", *_NO_ROWS)
_SWITCHES = (
    Rung(
        "avoid-record-streams",
        ("--avoid-record-streams",),
        "TorchRec's record_stream calls, by events that keep its buffers alive; NCCL's are gone by torch's default.",
    ),
    Rung(
        "pinned-d2h",
        ("--pinned-d2h",),
        "Stream syncs at device-to-host reads: they land in pinned memory and are waited for where they are needed.",
    ),
    Rung(
        "dense-graph",
        ("--cuda-graph", "dense"),
        "Nearly all launches of the dense network, its backward and the gradient all-reduce: one graph replays them.",
    ),
    Rung(
        "launch-threads",
        ("--launch-threads", "2"),
        "The launches of the next batch's input dist from the first thread: a second one makes them.",
    ),
    Rung(
        "trim-input-dist",
        ("--trim-input-dist",),
        "The exchange of splits and lengths, every tolist and list tensor: splits are constant at fixed sizes.",
    ),
)
_STATIC = ("--pipeline", "static")
_GRAPH = (*_STATIC, "--cuda-graph", "iteration")
_OVERLAP = (*_GRAPH, "--overlap")


def _five_stage(*switches: str) -> tuple[Rung, ...]:
    """Returns the five-stage pipeline without switches, and with one more on each rung, in this order; all in TF32."""
    by_name = {switch.name: switch for switch in _SWITCHES}
    note = "Nothing yet: the five stages under their own schedule, all switches off."
    rungs = [Rung("five-stage", (*_FIVE_STAGE, *_TF32), note)]
    flags: tuple[str, ...] = _FIVE_STAGE
    for switch in (by_name[name] for name in switches):
        flags = (*flags, *switch.flags)
        rungs.append(Rung(switch.name, (*flags, *_TF32), switch.note))
    return tuple(rungs)


_ONE_THREAD = (*_FIVE_STAGE, *(flag for s in _SWITCHES if s.name != "launch-threads" for flag in s.flags))
_IN_ORDER = (
    *_five_stage("avoid-record-streams", "pinned-d2h", "dense-graph", "launch-threads", "trim-input-dist"),
    Rung(
        "one-launch-thread",
        (*_ONE_THREAD, *_TF32),
        "The second launching thread: once nothing waits, two threads only want the same interpreter lock.",
    ),
    Rung(
        "graph-dists",
        (*_ONE_THREAD, "--graph-dists", *_TF32),
        "Nearly all launches of the three all-to-alls and of the kernels around them: three graphs replay them.",
    ),
)
_WHOLE = Rung(
    "iteration-graph",
    (*_IN_ORDER[-1].flags, "--cuda-graph", "iteration"),
    "All launches but one: a graph holds the iteration, with the next batch's input dist and both updates.",
)
_WHOLE_BY_PEERS = Rung(
    "iteration-graph-peer",
    (*_WHOLE.flags, "--peer-memory"),
    "Collectives and the copies around them: kernels write into the memory of the other GPUs.",
)
_FULL = (
    Rung("stock", _TF32, _STOCK),
    _TUNED,
    *_IN_ORDER,
    Rung(
        "static-tf32",
        (*_STATIC, *_TF32),
        "TorchRec's modules: fixed shapes straight on FBGEMM, launched kernel by kernel.",
    ),
    Rung("cuda-graph-tf32", (*_GRAPH, *_TF32), "All launches but one: the whole iteration is one CUDA graph."),
    Rung(
        "overlap-tf32",
        (*_OVERLAP, *_TF32),
        "Work from the critical path: input dist, weight gradients and dense update run beside the rest.",
    ),
    Rung("overlap-bf16", (*_OVERLAP, *_BF16), "Half the bytes on the wire and most of the products' time, by bf16."),
    Rung(
        "presort-bf16",
        (*_OVERLAP, "--presort-ids", *_BF16),
        "The sort of ids from the critical path: it runs a batch ahead, beside the table update.",
    ),
    Rung(
        "peer-memory-bf16",
        (*_OVERLAP, "--presort-ids", "--peer-memory", *_BF16),
        "Most collectives and the copies around them: kernels write where the other GPUs read.",
    ),
)


def _twice(name: str, *flags: str) -> tuple[Rung, Rung]:
    return Rung(f"{name}-a", flags), Rung(f"{name}-b", flags, "Nothing: the same thing again.")


def _cached(share: str) -> tuple[Rung, ...]:
    """Returns rungs with this share of each table's rows on the GPU, by FUSED_UVM_CACHING; planned as for stock."""
    cached = (*_TF32, "--constraints", f"0-25=hbm:{share}")
    switches = (flag for s in _SWITCHES if s.name not in ("launch-threads", "trim-input-dist") for flag in s.flags)
    return (
        Rung(
            f"stock-prefetch-{share}",
            (*cached, "--schedule", "prefetch-sparse-dist"),
            "Reads of missing rows within the lookup, by TorchRec's PrefetchTrainPipelineSparseDist.",
        ),
        Rung(
            f"five-stage-prefetch-{share}",
            ("--pipeline", "five-stage", *switches, *cached),
            "The host's work around a prefetch that begins before the dense part is launched, not after its forward.",
        ),
    )


_READING = (*_FULL[-1].flags, "--data.source")

LADDERS: dict[str, tuple[Rung, ...]] = {
    "stock": (
        Rung("stock-fp32", _FP32, _STOCK),
        Rung("stock-tf32", _TF32, "Most of the matrix products' time, by TF32."),
        Rung("stock-bf16", _BF16, "More of it, by bf16 autocast."),
    ),
    "baselines": (Rung("stock", _TF32, _STOCK), _TUNED, _COMPILED, _FULL[-1]),
    "five-stage": (Rung("stock", _TF32, _STOCK), _TUNED, *_IN_ORDER),
    "five-stage-trim-first": (
        Rung("stock", _TF32, _STOCK),
        *_five_stage("trim-input-dist", "dense-graph", "pinned-d2h", "launch-threads", "avoid-record-streams"),
    ),
    "drop-in": (Rung("stock", _TF32, _STOCK), _IN_ORDER[-1], _WHOLE, _WHOLE_BY_PEERS),
    "full": _FULL,
    "ends": (_FULL[0], _FULL[-1]),
    "fp8": (
        _FULL[0],
        _FULL[-1],
        Rung(
            "fp8", (*_FULL[-1].flags, "--fp8"), "Nearly half of the largest products' time, by factors of eight bits."
        ),
    ),
    "tiers": (
        Rung(
            "stock-uvm-caching",
            (*_TF32, "--constraints", "0-25=hbm:0.5"),
            "Half of each table's rows on the GPU by TorchRec's FUSED_UVM_CACHING, the others in host memory.",
        ),
        Rung(
            "stock-uvm-prefetch",
            (*_TF32, "--constraints", "0-25=hbm:0.5", "--schedule", "prefetch-sparse-dist"),
            "Reads of missing rows within the iteration, by TorchRec's PrefetchTrainPipelineSparseDist.",
        ),
        Rung(
            "half-in-host-memory",
            (*_FULL[-1].flags, "--table-memory", "0.5"),
            "TorchRec's modules, and its optimizer state in host memory: rows come with it, beside the batch before.",
        ),
        Rung("all-on-the-gpu", _FULL[-1].flags, "Host memory: all rows are on the GPU."),
    ),
    "cached-tables": (*_cached("0.5"), *_cached("0.2")),
    "dynamic-rows": (
        _FULL[-1],
        Rung(
            "dynamic-rows",
            (*_FULL[-1].flags, "--dynamic-rows", "30000000"),
            "Splits of columns, and rows that no batch names: a row is made when it is first named.",
        ),
        Rung(
            "raw-ids",
            (*_FULL[-1].flags, "--dynamic-rows", "30000000", "--model.raw-ids"),
            "Sizes of tables: ids are any int64, twice as many bytes.",
        ),
    ),
    "reading": (
        Rung("random", (*_READING, "random"), "The fastest rung on batches that lie in memory."),
        Rung("files", (*_READING, "multi_hot"), "Nothing: the same on batches from the day files of --data.path."),
    ),
    "same": _twice("same"),
    "same-pipelines": (
        *_twice("stock", *_TF32),
        *_twice("five-stage", *_FIVE_STAGE, "--trim-input-dist", "--cuda-graph", "dense", *_TF32),
        *_twice("static", *_FULL[-1].flags),
    ),
    "cpu": (
        Rung("stock-fp32", _FP32, _STOCK),
        Rung(
            "five-stage-fp32",
            (
                *_FIVE_STAGE,
                "--pinned-d2h",
                "--avoid-record-streams",
                "--trim-input-dist",
                "--launch-threads",
                "2",
                *_FP32,
            ),
            "The constant part of TorchRec's input dist, and its launches from the first thread.",
        ),
        Rung("static-fp32", (*_STATIC, *_FP32), "TorchRec's modules: fixed shapes straight on FBGEMM."),
    ),
}
"""Ladders by name, first rung first. Each rung changes one thing from the previous rung if the order allows; in `same`,
nothing (A/A). `same-pipelines` has three such pairs, so that rounds of all three see the same machine."""
