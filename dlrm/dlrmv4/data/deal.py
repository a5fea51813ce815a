"""Dealing of a global batch's samples to the ranks: by stride as the reference does, or by user.

A rank that has the neighbouring samples of few users names fewer rows and receives fewer events than a rank that has
some samples of every user. Histories differ in length, though: the cost of a rank's products grows with its number of
tokens, and the cost of its attention with their squares. So users are sorted by length, and blocks of that order are
dealt to the ranks in alternating direction, as many blocks as balance both sums. All ranks get blocks of equal size, so
that the mean over ranks of their losses stays the mean over the global batch.

A step has the same samples with either dealing, and so windows and steps keep the order that training_policies (pull
request 594) requires, without a shuffle. We found no rule on which rank gets which sample; a submitter should disclose
this choice. Two things change, as with another number of ranks: dropout masks, and, where --model.attention-scale is
`longest`, the divisor of attention, which depends on a rank's samples.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.dlrmv4.config import OWN_TOKENS, Deal
from dlrm_bench.dlrm.dlrmv4.data.builder import BatchBuilder
from dlrm_bench.dlrm.dlrmv4.data.order import Order
from dlrm_bench.dlrm.dlrmv4.data.packed import Packed

TOLERANCE = 0.03
"""Largest excess of a rank's sum of tokens, or of their squares, over the mean of all ranks."""


@dataclass(frozen=True, slots=True)
class RankSamples:
    """The samples of one rank in each step of an order; any number of threads may build them at once."""

    builder: BatchBuilder
    order: Order
    rank: int
    deal: Deal = "stride"

    def build(self, step: int) -> Packed:
        """Returns the rank's samples of a step; see BatchBuilder.build."""
        return self.builder.build(self.anchors(step))

    def anchors(self, step: int) -> NDArray[np.int64]:
        """Returns the rank's anchors of a step, [local_batch], ascending."""
        order = self.order
        if self.deal == "stride" or order.world_size == 1:
            return order.batch(step, self.rank)
        anchors = order.global_batch(step)
        users, lengths = self.builder.users_and_lengths(anchors)
        return anchors[deal_users(users, lengths, order.world_size)[self.rank]]


def deal_users(
    users: NDArray[np.int64], lengths: NDArray[np.int64], ranks: int, tolerance: float = TOLERANCE
) -> NDArray[np.int64]:
    """Returns the places of each rank's samples in a global batch, [ranks, samples of a rank], ascending.

    users, lengths: user, and number of events in the history, of each sample, [samples]; samples of a user are
    adjacent. If no block size brings the sums within the tolerance, single samples are dealt in order of length.
    """
    of_rank, left = divmod(len(users), ranks)
    assert left == 0, "as many samples for each rank"
    row, blocks = _by_length(users, lengths), 1
    while True:
        places = _in_blocks(row, ranks, min(blocks, of_rank))
        if blocks >= of_rank or imbalance(lengths[places]) <= tolerance:
            return np.sort(places, axis=1)
        blocks *= 2


def imbalance(lengths: NDArray[np.int64]) -> float:
    """Returns the largest excess of a rank's sum over the mean of all ranks' sums, the larger of that of tokens and of
    their squares. lengths: events of the histories of each rank's samples, [ranks, samples of a rank]."""
    tokens = lengths.astype(np.float64) + OWN_TOKENS
    sums = np.stack([tokens.sum(axis=1), (tokens**2).sum(axis=1)])
    return float((sums.max(axis=1) / sums.mean(axis=1)).max() - 1)


def _by_length(users: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns all places, those of a user together, users in order of their mean length."""
    first = np.flatnonzero(np.diff(users, prepend=users[0] - 1))
    counts = np.diff(first, append=len(users))
    mean = np.add.reduceat(lengths, first) / counts
    return np.argsort(np.repeat(mean.argsort(kind="stable").argsort(), counts), kind="stable")


def _in_blocks(row: NDArray[np.int64], ranks: int, blocks: int) -> NDArray[np.int64]:
    """Returns the places of each rank: of each row of `ranks` blocks it gets one, in alternating direction, `blocks` in
    all."""
    ends = np.arange(blocks + 1) * (len(row) // ranks) // blocks * ranks
    parts = [row[begin:end].reshape(ranks, -1) for begin, end in pairwise(ends)]
    return np.concatenate([part[:: 1 - 2 * (number % 2)] for number, part in enumerate(parts)], axis=1)
