"""The built-in ladders of the TorchRec models: stock TorchRec, and the drop-in with one more switch on each rung."""

from collections.abc import Mapping
from dataclasses import replace

from dlrm_bench.dlrm.benchmark import Rung

_STOCK = Rung("stock", (), "TrainPipelineSparseDist on TorchRec's own modules.")
_STEPS = (
    ("five-stage", ("--pipeline", "five-stage"), "Nothing yet: the five stages under their own schedule."),
    (
        "avoid-record-streams",
        ("--avoid-record-streams",),
        "TorchRec's record_stream calls, by events that keep its buffers alive.",
    ),
    (
        "pinned-d2h",
        ("--pinned-d2h",),
        "Stream syncs at device-to-host reads: they land in pinned memory and are waited for where they are needed.",
    ),
    (
        "dense-graph",
        ("--cuda-graph", "dense"),
        "Nearly all launches of the dense network, its backward, the gradient all-reduce and the dense update.",
    ),
    (
        "trim-input-dist",
        ("--trim-input-dist",),
        "The exchange of splits and lengths, every tolist and list tensor, where sizes are declared.",
    ),
    (
        "graph-dists",
        ("--graph-dists",),
        "Nearly all launches of the all-to-alls and of the kernels around them: graphs replay them.",
    ),
    (
        "launch-threads",
        ("--launch-threads", "2"),
        "The launches of the next batch's input dist from the first thread: a second one makes them.",
    ),
)
_WHOLE = Rung(
    "iteration-graph",
    (),
    "All other launches: one graph holds the iteration, with the input dist of the next batch and both updates.",
)
_PEERS = Rung(
    "iteration-graph-peer",
    (),
    "NCCL's collectives in the graph, except for the loss guard's, and the copies around them: kernels write into the "
    "memory of the other GPUs.",
)
_MAIN = ("stock", "pinned-d2h", "dense-graph", "trim-input-dist", "graph-dists")


def ladders(for_graphs: tuple[str, ...] = (), whole: str | None = None) -> Mapping[str, tuple[Rung, ...]]:
    """Returns the ladders by name, first rung first.

    for_graphs: flags that a model's data need from the first rung with graphs on. whole: the choice of --cuda-graph at
    the end of `main` and `ends`, if a graph can, or may, hold the model's iteration. full: all switches, one more per
    rung; main: those with the largest effect; ends: stock and the best of `main`; exchange: such a graph with
    collectives and with peer memory; drop-in: ends, and peer memory; same: one rung twice (A/A).
    """
    rungs, flags = [_STOCK], tuple[str, ...]()
    for name, more, note in _STEPS:
        flags += more + (for_graphs if name == "dense-graph" else ())
        rungs.append(Rung(name, flags, note))
    full = tuple(rungs)
    main = tuple(rung for rung in full if rung.name in _MAIN)
    ends: tuple[Rung, ...] = (main[0], main[-1])
    of_graphs: dict[str, tuple[Rung, ...]] = {}
    if whole is not None:
        rung = replace(_WHOLE, flags=(*main[-1].flags, "--cuda-graph", whole))
        main, ends = (*main, rung), (*ends, rung)
        peers = replace(_PEERS, flags=(*rung.flags, "--peer-memory"))
        of_graphs = {"exchange": (rung, peers), "drop-in": (*ends, peers)}
    same = (Rung("same-a", main[-1].flags), Rung("same-b", main[-1].flags, "Nothing: the same thing again."))
    return {"full": full, "main": main, "ends": ends, **of_graphs, "same": same, "stock": (_STOCK,)}
