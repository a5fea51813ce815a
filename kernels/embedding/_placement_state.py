"""State, on the device, of a placement of rows in two memory tiers, and the moves that plan_moves.py derives from
it."""

import functools
import math
from typing import NamedTuple

from torch import Tensor

NUMBERS = 255
"""Batches are numbered from 1 to this value, a byte's maximum, in turn; 0 is no batch."""
COMPARED = 8
"""Maximum number of places with which a guest whose turn has come is compared."""


class PoolState(NamedTuple):
    """A pool: rows that exchange places with one another only; p of the places on the device, G of them guests'."""

    first: int
    """The first of its places on the device."""
    places: int
    """p, at least 2."""
    ring: Tensor
    """int32 [G]: the guests' places."""
    head: Tensor
    """int64 [1]: start of the window in the ring."""
    hand: Tensor
    """int64 [1]: position of the walk over the pool's places on the device, the first one compared with the window's
    first guest."""


class PlacementState(NamedTuple):
    """State of R rows and P places on the device. The last element of `place`, `occupant` and `named` is a dummy:
    writes for rows and places that do not exist go there."""

    place: Tensor
    """int32 [R + 1]: the place of each row; the last element is -1, the place of padding."""
    occupant: Tensor
    """int32 [P + 1]: the row at each place on the device."""
    guest: Tensor
    """uint8 [P]: whether a guest has the place."""
    named: Tensor
    """uint8 [R + 1]: the number of the last batch that named each row of a pool."""
    counts: Tensor
    """uint8 [halving, n], flat at least R + 1: the number of batches that named each row of a pool; each batch halves
    one line."""
    batches: Tensor
    """int64 [1]: number of batches so far."""
    number: Tensor
    """uint8 [1]: the number of the last batch, NUMBERS before the first."""
    counters: Tensor
    """int64 [4]: batches, missing rows, rows moved to the device, rows used in place."""
    pools: tuple[PoolState, ...]
    """One pool or more. Rows outside all pools keep their places."""


class Moves(NamedTuple):
    """The exchanges that a batch needs in a pool: late ones, then early ones."""

    device: Tensor
    """int32 [W]: places on the device."""
    host: Tensor
    """int32 [W]: places in host memory, counted from its first place."""
    late: Tensor
    """int32 [2]: range of the late exchanges."""
    early: Tensor
    """int32 [2]: range of the early exchanges."""


@functools.cache
def walk(places: int, window: int) -> tuple[int, int]:
    """Returns the number of places with which each guest of a window is compared, different ones for each guest, and
    the stride of the walk over a pool's places: coprime to their number, near its golden section. Places begin in table
    order, and with strides each batch visits the places of all tables."""
    stride = max(1, int(places * 0.6180339887498949))
    while math.gcd(stride, places) > 1:
        stride += 1
    return min(COMPARED, places // window), stride
