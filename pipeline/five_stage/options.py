"""Options of the five-stage pipeline."""

import os
from dataclasses import dataclass
from typing import Literal

_ALLOWED = {
    "avoid_record_streams": (False, True),
    "pinned_d2h": (False, True),
    "cuda_graph": ("none", "dense", "iteration", "iteration-or-dense"),
    "launch_threads": (1, 2),
    "peer_memory": (False, True),
    "uneven_end": ("error", "stop", "ignore"),
}
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ENOUGH = 32


@dataclass(kw_only=True, frozen=True)  # without slots: a class could not inherit from two such bases with slots
class HostSwitches:
    """One switch for each host cost that the pipeline removes, all of them off."""

    avoid_record_streams: bool = False
    """Keep tensors that cross streams alive by references instead of record_stream; see FiveStagePipeline.

    torch has omitted NCCL's own calls by default since 2.9, and one call of TorchRec's cannot be removed, on the result
    of the pooled all-to-all (comm_ops.py, Request._wait_impl).
    """
    pinned_d2h: bool = False
    """Copy the input dist's splits to the host through pinned memory, and wait where they are needed, not where the
    copy is issued; see SplitsExchange."""
    cuda_graph: Literal["none", "dense", "iteration", "iteration-or-dense"] = "none"
    """dense: replay stage 3 (forward, backward and all-reduce of the dense network) as a CUDA graph, which freezes what
    Python decides in the model; see DenseGraph. So is stage 5, where it is Adam's, AdamW's, SGD's, Adagrad's or
    `capturable`; see DenseUpdate. iteration: replay all five stages, collectives included, as one graph; what keeps a
    model from that is an error; see IterationGraph. iteration-or-dense: `dense` instead of that error. GPU only."""
    launch_threads: Literal[1, 2] = 1
    """2: launch stage 1, and stage 5 beside stage 4, from a second thread with a separate communicator.

    The second thread hides waits, above all the host's reads of splits in TorchRec's own input dist. It cannot hide
    Python itself, because of the GIL: with a trimmed input dist, and stage 5 replayed as a graph, hardly any waits are
    left, and handing work over takes longer than doing it: 2.05 ms per iteration instead of 1.74 with one thread
    (results/03-4xh200-512-a-gpu-full-ladder-faster-host).

    optimizer.step() must then have no collectives, and must not touch data that the embedding backward uses, except for
    the fused tables' learning rate. A sharder with its own input dist must give it a separate communicator.
    """

    peer_memory: bool = False
    """Exchange ids, pooled vectors and gradients within graphs of whole iterations, on one machine, by kernels that
    write into the memory of the other GPUs, in place of NCCL's collectives and the copies around them; see Peers. Of
    two ranks the results are the same bits. What cannot go that way stays NCCL's, and `describe()` says why."""

    @property
    def graphs_iterations(self) -> bool:
        """Whether whole iterations are to be replayed."""
        return self.cuda_graph.startswith("iteration")


@dataclass(kw_only=True, slots=True, frozen=True)
class FiveStageOptions(HostSwitches):
    """The optimisations. Except for the CUDA graph, none changes anything that any model could observe.

    ValueError if a field has a value that is not allowed.
    """

    avoid_record_streams: bool = True
    pinned_d2h: bool = True
    uneven_end: Literal["error", "stop", "ignore"] = "error"
    """Treatment of ranks with more batches than another rank: see BatchEnd. error: all ranks raise ValueError after the
    last common batch. stop: all ranks end there. ignore: nothing is exchanged, and ranks with more batches hang."""

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            # Compares types too, because True is not a number of threads.
            if not any(type(value) is type(one) and value == one for one in allowed):
                values = " or ".join(map(repr, allowed))
                raise ValueError(f"FiveStageOptions.{name} must be {values}, not {value!r}")
        if self.graphs_iterations and self.launch_threads == 2:
            raise ValueError(
                f"FiveStageOptions(cuda_graph={self.cuda_graph!r}) replays whole iterations: set launch_threads=1"
            )
        if self.peer_memory and not self.graphs_iterations:
            raise ValueError(
                f"FiveStageOptions(peer_memory=True) is for graphs of whole iterations, not for cuda_graph="
                f"{self.cuda_graph!r}: set cuda_graph='iteration', or leave peer_memory out"
            )


def few_queues(options: FiveStageOptions, device_type: str) -> str | None:
    """Returns why the kernels of two launching threads may wait for one another on the GPU; None if they cannot."""
    if options.launch_threads == 1 or device_type != "cuda":
        return None
    connections = os.environ.get(_CONNECTIONS)
    if connections is not None and connections.strip().isdecimal() and int(connections) >= _ENOUGH:
        return None
    return (
        f"launch_threads=2 has collectives of several communicators in flight, but {_CONNECTIONS} is "
        f"{connections or 'not set'}: set {_CONNECTIONS}={_ENOUGH} in the environment before CUDA starts, or one of "
        "them may queue behind another that waits for it, which is a deadlock"
    )
