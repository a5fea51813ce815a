"""FBGEMM's sort of the ids, moved in captured graphs to before the gradients.

FBGEMM updates tables in one call: it sorts the ids of the batch, and then sums the gradients of each row and applies
them. In a captured graph that is a chain of nodes after the gradients, though the sort reads ids alone:

```
lookup - exchange - dense forward, backward - exchange - sort - update          as captured
lookup - exchange - dense forward, backward - exchange - update                 changed
                 `- sort ------------------------------'
```

The sort's memory must not be that of work beside which it then runs. So each lookup has a stream, on which autograd
also runs its update. Torch's allocator gives a stream memory that was free before the capture, or that an earlier
tensor of that stream has freed: here a lookup's, which nothing reads after the exchange, when the sort begins.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from . import graph_nodes
from .batch_fields import forwards_replaced
from .streams import LOOKUPS, StageStreams

_OF_IDS = re.compile(
    "^memset$|FillFunctor|linearize_index|DeviceRadixSort|DeviceCompactInit|DeviceReduceByKey|DeviceScan|find_long_segments"
)
"""Work of FBGEMM's table update that does not read gradients. Anything else may."""
_COPY = re.compile("direct_copy")
"""The copy that FBGEMM makes of gradients that are not contiguous. Its memory is in use until the update's end, so that
the sort's is other memory."""


class EarlySorts:
    """The sorts of some of FBGEMM's kernels, for one graph after another: `looked_up` and `updated` are called in a
    capture, `change` after it."""

    def __init__(self, kernels: Sequence[Any], streams: StageStreams) -> None:
        """kernels: FBGEMM's lookups; beyond the first of them, there are no streams for more."""
        self._streams = streams
        self._kernels = dict(zip(kernels, LOOKUPS, strict=False))
        self._used: list[str] = []
        self._begins: list[int] = []
        self._lookups: dict[str, list[int]] = {}
        self._updates: dict[str, list[int]] = {}
        self.count = 0
        """Number of kernels whose sort precedes the gradients in the graph that was captured last."""

    @contextmanager
    def on_streams(self) -> Iterator[None]:
        """Makes the kernels launch their lookups, and in the backward their updates, each on a separate stream."""
        self._used = []
        with forwards_replaced({kernel: self._on(name, kernel.forward) for kernel, name in self._kernels.items()}):
            yield

    def _on(self, name: str, forward: Any) -> Any:
        def on_stream(*args: Any, **kwargs: Any) -> Any:
            with self._streams.on(name, after=self._streams.mark()):
                output = forward(*args, **kwargs)
            self._streams.wait(self._streams.mark(name))
            self._used.append(name)
            return output

        return on_stream

    def looked_up(self) -> None:
        """Notes that nothing will read the lookups' memory after the work launched so far on the current stream, but
        for outputs that are kept until `updated`."""
        if self._streams.cuda:
            self._begins = graph_nodes.ends(self._streams.current().cuda_stream)
            self._lookups = self._ends()

    def updated(self) -> None:
        """Makes the current stream wait for the tables' updates."""
        for name in self._used:
            self._streams.wait(self._streams.mark(name))
        if self._streams.cuda:
            self._updates = self._ends()

    def change(self, graph: torch.cuda.CUDAGraph) -> None:
        """Moves the sorts of a graph that was captured last, with keep_graph, and is not instantiated. A kernel whose
        nodes are not as expected keeps its sort after the gradients."""
        raw: int = graph.raw_cuda_graph()
        self.count = sum(self._move(raw, self._lookups[name], self._updates.get(name, [])) for name in self._lookups)

    def _ends(self) -> dict[str, list[int]]:
        """Returns the last nodes of each lookup's stream."""
        streams = {name: self._streams.stream(name) for name in self._used}
        return {name: graph_nodes.ends(of.cuda_stream) for name, of in streams.items() if of is not None}

    def _move(self, graph: int, looked_up: Sequence[int], updated: Sequence[int]) -> bool:
        if len(looked_up) != 1 or len(updated) != 1:
            return False
        chain, awaited = _chain(updated[0])
        works = [graph_nodes.work_of(node) for node in chain]
        copies = next((i for i, work in enumerate(works) if not _COPY.search(work)), 0)
        reads = next((i for i, work in enumerate(works) if i >= copies and not _OF_IDS.search(work)), copies)
        begins = {*self._begins, *looked_up}
        gradients = set(awaited) - begins if copies == 0 else {chain[copies - 1]}
        sorts = any("DeviceRadixSort" in work for work in works[copies:reads])
        if not (sorts and self._begins and gradients and set(looked_up) < set(awaited)):
            return False
        sort = chain[copies]
        graph_nodes.depend(graph, chain[reads], gradients)
        graph_nodes.depend(graph, sort, begins - set(graph_nodes.before(sort)))
        graph_nodes.depend_no_longer(graph, sort, gradients)
        return True


def _chain(last: int) -> tuple[list[int], list[int]]:
    """Returns the nodes that run one after another up to `last`, from the first that waits for several others, and what
    that one waits for."""
    chain = [last]
    while len(awaited := graph_nodes.before(chain[-1])) == 1:
        chain.append(awaited[0])
    return chain[::-1], awaited
