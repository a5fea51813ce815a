"""State of a placement of rows in two tiers of memory, on the device, and the moves that plan_moves.py makes of it."""

import functools
import math
from typing import NamedTuple

from torch import Tensor

NUMBERS = 255
"""Batches have numbers from 1 to this one, a byte's largest, in turn; 0 is no batch's."""
COMPARED = 8
"""Places with which a guest whose turn has come is compared, at most."""


class PlacementState(NamedTuple):
    """State of R rows and P places on the device, G of them guests'. The last element of `place`, `occupant` and
    `named` is nobody's: rows and places that do not exist are written to it."""

    place: Tensor
    """int32 [R + 1]: where each row is; at last -1, the place of padding."""
    occupant: Tensor
    """int32 [P + 1]: the row at each place on the device."""
    guest: Tensor
    """uint8 [P]: whether the place is a guest's."""
    ring: Tensor
    """int32 [G]: the guests' places."""
    named: Tensor
    """uint8 [R + 1]: the number of the last batch that named each row."""
    counts: Tensor
    """uint8 [halving, n], flat at least R + 1: how many batches named each row; one line is halved with each batch."""
    head: Tensor
    """int64 [1]: where in the ring the window begins."""
    hand: Tensor
    """int64 [1]: how far the walk over the device's places is, the first of those with which the window's first guest
    is compared."""
    batches: Tensor
    """int64 [1]: number of batches so far."""
    number: Tensor
    """uint8 [1]: the last batch's, NUMBERS before the first."""
    counters: Tensor
    """int64 [4]: batches, missing rows, rows that came to the device, rows used where they were."""


class Moves(NamedTuple):
    """The exchanges that a batch asks for: late ones, then early ones."""

    device: Tensor
    """int32 [W]: places on the device."""
    host: Tensor
    """int32 [W]: places in host memory, counted from its first."""
    late: Tensor
    """int32 [2]: from which exchange on, up to which."""
    early: Tensor
    """int32 [2]: the same."""


@functools.cache
def walk(device_rows: int, window: int) -> tuple[int, int]:
    """Returns the number of places with which each guest of a window is compared, no place with two guests, and the
    stride of the walk over all places: coprime to their number, near its golden section. Places begin in the order of
    the tables, and in strides each batch comes to those of all tables."""
    stride = max(1, int(device_rows * 0.6180339887498949))
    while math.gcd(stride, device_rows) > 1:
        stride += 1
    return min(COMPARED, device_rows // window), stride
