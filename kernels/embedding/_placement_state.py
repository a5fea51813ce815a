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


class PlacementState(NamedTuple):
    """State of R rows and P places on the device, G of them guests'. The last element of `place`, `occupant` and
    `named` is a dummy: writes for rows and places that do not exist go there."""

    place: Tensor
    """int32 [R + 1]: the place of each row; the last element is -1, the place of padding."""
    occupant: Tensor
    """int32 [P + 1]: the row at each place on the device."""
    guest: Tensor
    """uint8 [P]: whether a guest has the place."""
    ring: Tensor
    """int32 [G]: the guests' places."""
    named: Tensor
    """uint8 [R + 1]: the number of the last batch that named each row."""
    counts: Tensor
    """uint8 [halving, n], flat at least R + 1: the number of batches that named each row; each batch halves one
    line."""
    head: Tensor
    """int64 [1]: start of the window in the ring."""
    hand: Tensor
    """int64 [1]: position of the walk over the device's places, the first place compared with the window's first
    guest."""
    batches: Tensor
    """int64 [1]: number of batches so far."""
    number: Tensor
    """uint8 [1]: the number of the last batch, NUMBERS before the first."""
    counters: Tensor
    """int64 [4]: batches, missing rows, rows moved to the device, rows used in place."""


class Moves(NamedTuple):
    """The exchanges that a batch needs: late ones, then early ones."""

    device: Tensor
    """int32 [W]: places on the device."""
    host: Tensor
    """int32 [W]: places in host memory, counted from its first place."""
    late: Tensor
    """int32 [2]: range of the late exchanges."""
    early: Tensor
    """int32 [2]: range of the early exchanges."""


@functools.cache
def walk(device_rows: int, window: int) -> tuple[int, int]:
    """Returns the number of places with which each guest of a window is compared, different ones for each guest, and
    the stride of the walk over all places: coprime to their number, near its golden section. Places begin in table
    order, and with strides each batch visits the places of all tables."""
    stride = max(1, int(device_rows * 0.6180339887498949))
    while math.gcd(stride, device_rows) > 1:
        stride += 1
    return min(COMPARED, device_rows // window), stride
