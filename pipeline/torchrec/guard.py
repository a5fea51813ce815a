"""Keeps a TorchRec model unchanged from the first iteration with a non-finite loss or gradient on any rank.

Nothing waits for the host, and nothing in TorchRec is replaced: hooks on the model and an additional optimizer zero the
gradients of such an iteration before any update, and zero gradients change nothing under Adagrad, row-wise Adagrad and
SGD; an optimizer with momentum also reads a flag. The host learns of it when it reads the losses.

The ranks agree on the flag beside the backward, on a side stream (BesideBackward); gates wait for it, and the end of
the backward does:

```
main    forward, loss     backward: dense  wait  gates of tables  updates of tables  wait   the next forward
                      |                     |                                         |
side                  look, all-reduce ---------------------------------------------------
                                                      |
update                                               wait  gate of dense gradients  dense update
```

The backward updates tables before the dense gradients are known: in an iteration with non-finite dense gradients, no
dense weight changes, but tables do. Gradients of looked-up vectors are known on one rank only: non-finite ones are
zeroed, everything else of their iteration changes, and from the next iteration on nothing changes on any rank.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torchrec import KeyedTensor
from torchrec.distributed.types import Awaitable, ShardedModule
from torchrec.optim.keyed import KeyedOptimizer

from dlrm_bench.dlrm.dense.loss_guard import LossGuard
from dlrm_bench.dlrm.dense.tallies import GRADIENTS, Tallies
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.streams import Priority
from dlrm_bench.kernels.non_finite import Watch, cleared_gradients
from dlrm_bench.pipeline.five_stage.graph_obstacles import runs_in_graphs
from dlrm_bench.pipeline.torchrec.gradient_gate import GradientGate

_DENSE = f"dense {GRADIENTS}"


class TorchRecLossGuard:
    """Watches the losses and gradients of one model."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        """model: not sharded yet; returns its loss first. Collective."""
        self.tallies = Tallies((_DENSE,), ranks.device)
        """Tallies of this rank's gradients of looked-up vectors, and of the dense gradients, which are equal on all
        ranks."""
        self._skip: list[Tensor] = []
        self._guard = LossGuard(ranks, None, self.tallies)
        self._looks = BesideBackward(self._guard.look, ranks.device)
        self._cleared = _LastResult()
        model.register_forward_hook(self._look)

    def watch_lookups(self, sharded: nn.Module) -> None:
        """Gates the tables of all sharded modules: the gradients of their outputs, from which the backward updates
        tables."""
        paths = [path for path, module in sharded.named_modules() if isinstance(module, ShardedModule)]
        for path in paths:
            if not any(path.startswith(f"{outer}.") for outer in paths):
                sharded.get_submodule(path).register_forward_hook(self._gate_tables)

    def skip(self) -> Tensor:
        """Returns a flag, fp32 [], that is 1 from the step on in which no dense weight may change, and 0 before; the
        gate writes it before that step."""
        if not self._skip:
            self._skip.append(torch.zeros((), device=self.tallies.counts.device))
        return self._skip[0]

    def gate(self, parameters: Iterable[nn.Parameter]) -> KeyedOptimizer:
        """Returns an optimizer to step before the optimizer of `parameters`; it gates their gradients."""
        watch = Watch(self._guard.watch.stopped, self.tallies.of(_DENSE)[1:])
        return GradientGate(watch, list(parameters), self._skip, self._looks.wait)

    @runs_in_graphs
    def _look(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Looks at the losses; collective in training. TorchRec's pipelines also trace the model with tensor
        proxies."""
        self._cleared.forget()  # a backward that failed has not
        loss = output[0] if isinstance(output, tuple) else None
        if model.training and isinstance(loss, Tensor):
            self._looks.begin(loss)

    def _gate_tables(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Gates a module, also the drop-in's, whose forward runs during the capture of its graphs. Does not wait for
        work in flight."""
        if isinstance(output, Awaitable):
            output.callbacks.append(self._gate_vectors)

    def _gate_vectors(self, output: Any) -> Any:
        """Gates the gradients of `output`, a KeyedTensor or a JaggedTensor for each feature; returns it."""
        for of in (output,) if isinstance(output, KeyedTensor) else output.values():
            if (vectors := of.values()).requires_grad:
                vectors.register_hook(self._gated)
        return output

    def _gated(self, gradient: Tensor) -> Tensor:
        self._looks.wait()
        # Not in place: autograd's own may have other users.
        return self._cleared.of(gradient, lambda: cleared_gradients(self._guard.watch, gradient.detach()))


class _LastResult:
    """The last result of a function of gradients, within one backward: the backward of a sum hands all its terms, such
    as the vectors of several features, the same tensor one after another."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Hashable, Tensor] | None = None

    def of(self, gradient: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Returns compute(), or its last result if that was for this very tensor, unchanged, on the same stream. Call
        it within a backward."""
        stream = torch.cuda.current_stream(gradient.device) if gradient.is_cuda else None
        state = gradient._version, stream
        if self._last is None:
            Variable._execution_engine.queue_callback(self.forget)
        if self._last is None or self._last[0] is not gradient or self._last[1] != state:
            self._last = gradient, state, compute()
        return self._last[2]

    def forget(self) -> None:
        """Lets go of the tensors."""
        self._last = None


class BesideBackward:
    """Work with a loss on a side stream, beside the backward from it; on the CPU all work runs in order.

    The work begins after everything that the forward's stream has been given: in an iteration's order, after all
    readers of the previous iteration's results. Readers call `wait`, on their own stream. At the end of the backward
    its caller's stream waits too, so that the next iteration comes after the work where nothing reads, and a CUDA graph
    that holds forward and backward leaves no stream unjoined: readers outside of it come after its replay.
    """

    def __init__(self, work: Callable[[Tensor], None], device: torch.device) -> None:
        """work: launches on the current stream; is given the loss, fp32 [1]."""
        self._work, self._device, self._side = work, device, _side_stream(device)
        self._losses: list[Tensor] = []
        """Kept allocated until a stream waits that may use their memory again; several after a failed backward."""
        self._waited: set[torch.cuda.Stream] = set()
        """Streams that wait for the last work already."""

    def begin(self, loss: Tensor) -> None:
        """Launches the work. loss: of one element; if it requires a gradient, a backward from it follows."""
        if self._side is None:
            self._work(loss.detach().float().view(1))
            return
        self._losses.append(loss.detach())
        self._waited.clear()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            self._work(loss.detach().float().view(1))
        if loss.requires_grad:
            loss.register_hook(self._at_end_of_backward)
        else:
            self._end()

    def wait(self) -> None:
        """Makes the current stream wait for the work, once."""
        if self._side is None:
            return
        current = torch.cuda.current_stream(self._device)
        if current not in self._waited:
            current.wait_stream(self._side)
            self._waited.add(current)

    def _at_end_of_backward(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._end)  # runs on the streams of the backward's caller

    def _end(self) -> None:
        self.wait()
        self._losses.clear()


@cache
def _side_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """Returns the side stream, the same for all models of a process: torch hands out 32 streams per priority in turn.
    None on the CPU. Other ranks wait for its collective, so its kernels come before those of the backward."""
    return torch.cuda.Stream(device, priority=Priority.CHAIN) if device.type == "cuda" else None
