"""Exchanges of an iteration's graph through peer memory: who writes what when, and what makes it safe.

In an exchange every rank writes into the buffers of the ranks that need its values (push.py); the ranks meet; then each
reads its own buffer, and no other. An exchange is the how-manieth of a launch, of a graph or of its rehearsal, and has
two buffers on each rank: launches of turn 0 use one of them, and those of turn 1 the other. Rank A writes to B:

```
            launch k, turn 0                       launch k + 1, turn 1          launch k + 2, turn 0
rank A      writes B's 0 [meet]                    writes B's 1 [meet]           writes B's 0 [meet]
rank B      ............ [meet] reads its 0 ...    ............ [meet] reads ..  ............ [meet] reads its 0
```

- **Between A's write and B's read** lies the meeting of that exchange's lane in launch k, which comes after the write
  on A's stream and before the read on B's.
- **Between B's read and A's next write** to that buffer, in launch k + 2, lies every meeting of launch k + 1: B comes
  to it after its launch k, reads included, because the launches of a rank run one after another on the caller's
  stream, which their side streams have joined; A leaves it before its launch k + 2 begins. Each launch has a meeting,
  because all have the same exchanges. Launches take turns strictly, whatever forms their batches have; what runs
  eagerly in between, or captures again, touches no buffer.
- **Nobody reads a buffer outside of its launch**: ids are copied into a slot, and outputs of the model that lie in a
  buffer are copied when the launch is over, on the stream of the next one.

A meeting publishes everything that its lane has written, so that an exchange whose lane has met since its own write
needs none. Lanes have signals of their own, as they run beside one another.

tests/pipeline/five_stage/peers/test_order.py finds no race by vector clocks, and one without the meetings of any lane,
and with one buffer in place of two.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import reasons
from ..batch_fields import forwards_replaced
from ..groups import of_all_ranks
from ..iteration_slots import TURNS
from ..sharded_modules import Sharded
from ..trimmed.static_dist import AllToAll, RankGroup
from .memory import Lane, PeerMemory
from .output_dist import output_dists
from .push import SUMMED, WIDEST, Block, Layout, PushTable, RankBuffers, push, sum_of_ranks

_ALIGNMENT = 128
_MOST_AT_ONCE = {3: 2**19, 4: 2**19, 5: 2**18, 6: 2**18, 7: 2**18, 8: 2**18}
"""Bytes of gradients, by the number of ranks, below which each rank sends all of them to all others: as in vLLM's own
all-reduce. On two ranks that is never more than NCCL sends; on more than eight, never."""


@contextmanager
def _started_by(rank_group: RankGroup, start: Callable[[Tensor, list[int], list[int]], AllToAll]) -> Iterator[None]:
    rank_group.start = start
    try:
        yield
    finally:
        rank_group.start = None


class Pushed:
    """Values on their way to this rank."""

    def __init__(self, buffer: Tensor, meet: Callable[[], None]) -> None:
        """meet: has the lane meet, if it has not since."""
        self.buffer, self._meet = buffer, meet
        """Flat, in the dtype of what was sent. After `wait` it stays as it is until the launch after the next one."""

    def wait(self) -> Tensor:
        """Makes the current stream wait for them; returns the buffer."""
        self._meet()
        return self.buffer


class _Exchange:
    """The buffers of one exchange, on all ranks, and the ways into them."""

    def __init__(self, memory: PeerMemory, layout: Layout, form: Hashable, dtype: torch.dtype) -> None:
        """layout: of a source of this form. Collective."""
        self._dtype, self._device, nbytes = dtype, memory.device, layout.size * dtype.itemsize
        turn = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        tensors = memory.allocate(TURNS * turn)
        starts = [i * turn for i in range(TURNS)]
        self._buffers = [RankBuffers([of[at : at + nbytes] for of in tensors], memory.rank) for at in starts]
        self._layouts = {form: layout}
        self._tables: dict[Hashable, PushTable] = {}

    def knows(self, source: Tensor, form: Hashable) -> bool:
        """Whether a source of this form has been sent before."""
        return (form, _alignment(source)) in self._tables

    def push(
        self, source: Tensor, form: Hashable, lay_out: Callable[[], Layout], turn: int, beside: bool, divisor: int
    ) -> Tensor:
        """Sends it; returns this rank's buffer. form: what the layout depends on, on this rank. beside, divisor: see
        `push`."""
        key = form, _alignment(source)
        if key not in self._tables:
            if form not in self._layouts:
                self._layouts[form] = lay_out()
            blocks = self._layouts[form].blocks
            self._tables[key] = PushTable(blocks, self._dtype.itemsize, _alignment(source), self._device)
        push(source, self._tables[key], self._buffers[turn], beside, divisor)
        return self._buffers[turn].own.view(self._dtype)


def _in_capture(source: Tensor) -> bool:
    return source.is_cuda and torch.cuda.is_current_stream_capturing()


def _alignment(source: Tensor) -> int:
    return gcd(WIDEST, source.data_ptr())


class Peers:
    """Exchanges of the sharded modules, and of the dense gradients, within `at`."""

    def __init__(
        self, modules: Sequence[Sharded], device: torch.device, group: dist.ProcessGroup, sends: Callable[[], bool]
    ) -> None:
        """modules: the called ones. group: of all ranks, for which `why_no_peers` found nothing. sends: whether the
        model may send pooled vectors to other ranks itself. Collective."""
        self._modules, self._sends = list(modules), sends
        self._memory = PeerMemory(group, device)
        self.rank, self.ranks = group.rank(), group.size()
        self._made: dict[Hashable, _Exchange] = {}
        self._through: dict[str, None] = {}
        self._by_nccl: dict[str, str] = {}
        self._turn = self._calls = 0
        self._written, self._met = Counter[Lane](), Counter[Lane]()
        self.copies = False
        """Whether pooled vectors are copied out of peer memory, where the model may send them itself: NCCL hangs in a
        graph that sends 1 MB from peer memory to memory of another kind, of which it registers the former only
        (2.28.9)."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's buffers."""
        return self._memory.nbytes

    def describe(self) -> dict[str, Any]:
        """Returns what goes through peer memory, and what does not, with the reason."""
        return {"through": list(self._through), "by_nccl": dict(self._by_nccl)}

    @contextmanager
    def at(self, turn: int) -> Iterator[None]:
        """Makes the exchanges within the block, which is one launch of this turn, go through peer memory. On all ranks
        alike."""
        self._turn, self._calls, self.copies = turn, 0, self._sends()
        self._written.clear()
        self._met.clear()
        forwards: dict[nn.Module, Any] = {}
        with ExitStack() as stack:
            for one in self._modules:
                stack.enter_context(_started_by(one.collection.rank_group, partial(self._ids, one.name)))
                of_module, why_not = output_dists(self, one)
                forwards |= of_module
                self._by_nccl |= why_not
            stack.enter_context(forwards_replaced(forwards))
            yield
        assert self._met == self._written, "what was sent was waited for"

    def push(
        self,
        name: str,
        lane: Lane,
        source: Tensor,
        shared: Hashable,
        lay_out: Callable[[], Layout],
        form: Hashable = None,
        beside: bool = False,
        divisor: int = 1,
    ) -> Pushed:
        """Sends parts of `source` to all ranks, in the order of calls that all ranks share. name: for `describe`.
        shared: all that the buffers' size depends on, besides the dtype; it changes on all ranks or on none, because
        allocations are collective. form: what else the layout depends on, on this rank. beside: leave multiprocessors
        to other work. divisor: of the elements. RuntimeError within a capture if the same has not been sent before it:
        nothing can be allocated there."""
        key = self._calls, name, shared, source.dtype
        self._calls += 1
        exchange = self._made.get(key)
        if _in_capture(source):
            if exchange is None or not exchange.knows(source, form):
                raise RuntimeError(f"{name}: peer memory has to be allocated before a capture")
        elif exchange is None:
            exchange = self._made[key] = _Exchange(self._memory, lay_out(), form, source.dtype)
            self._through[name] = None
        buffer = exchange.push(source, form, lay_out, self._turn, beside, divisor)
        self._written[lane] += 1
        return Pushed(buffer, partial(self._meet, lane, self._written[lane]))

    def mean(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Replaces flat gradients by their means over the ranks; returns those that are left to NCCL."""
        taken, left = list[Tensor](), list[Tensor]()
        for flat in flats:
            most = _MOST_AT_ONCE.get(self.ranks, 0)
            why = None
            if flat.dtype not in SUMMED:
                why = reasons.PEERS_DTYPE(dtype=flat.dtype)
            elif self.ranks > 2 and flat.nbytes >= most:
                why = reasons.PEERS_LARGE(bytes=flat.nbytes, most=most, ranks=self.ranks)
            if why is not None:
                self._by_nccl[f"dense gradients, {flat.dtype}"] = why
            (taken if why is None else left).append(flat)
        sent = [
            self.push("dense gradients", "gradients", flat, len(flat), partial(self._to_others, len(flat)), beside=True)
            for flat in taken
        ]
        for flat, pushed in zip(taken, sent, strict=True):
            sum_of_ranks(pushed.wait().view(self.ranks, -1), flat, 1 / self.ranks, own=self.rank)
        return left

    def _to_others(self, count: int) -> Layout:
        """Returns the layout in which each rank receives all elements of all other ranks, [rank, count]."""
        block = Block(0, 0, self.rank * count, 0, 1, count)
        blocks = [block._replace(rows=0) if rank == self.rank else block for rank in range(self.ranks)]
        return Layout(list(enumerate(blocks)), self.ranks * count)

    def _ids(self, name: str, sent: Tensor, send_splits: list[int], receive_splits: list[int]) -> AllToAll:
        """Starts an all-to-all of rows; see AllToAll.start."""
        row = sent.shape[1:].numel()
        splits = tuple(send_splits), tuple(receive_splits), row
        pushed = self.push(f"ids of {name}", "ids", sent, splits, partial(self._of_splits, *splits))
        received = pushed.buffer[: row * sum(receive_splits)].view(-1, *sent.shape[1:])
        return AllToAll(sent, received, pushed)

    def _of_splits(self, send_splits: Sequence[int], receive_splits: Sequence[int], row: int) -> Layout:
        """Returns the layout of an all-to-all of rows, each of `row` elements. Collective."""
        everyone = of_all_ranks(list(receive_splits), self._memory.group)
        assert [of[self.rank] for of in everyone] == list(send_splits), "ranks expect what they are sent"
        starts = accumulate(send_splits, initial=0)
        blocks = [
            Block(row * start, 0, row * sum(of[: self.rank]), 0, 1, row * rows)
            for start, rows, of in zip(starts, send_splits, everyone, strict=False)
        ]
        return Layout(list(enumerate(blocks)), row * max(map(sum, everyone)))

    def _meet(self, lane: Lane, number: int) -> None:
        if self._met[lane] < number:
            self._memory.meet(lane)
            self._met[lane] = self._written[lane]

    def close(self) -> None:
        """Lets go of the buffers. The device must be done with them."""
        self._made.clear()
        self._memory.close()
