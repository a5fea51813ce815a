"""A packed batch, made by hand, and what it expands to."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from dlrm_bench.dlrm.dlrmv4.data.packed import (
    CANDIDATE,
    CONTEXT_ROWS,
    LABEL,
    LENGTH,
    QUERY,
    Packed,
    PackedLayout,
    by_items,
    expand,
)


def by_hand() -> Packed:
    """Two samples of one user and one of another, which has no history."""
    packed = Packed.empty(PackedLayout(3, 6), tokens=6, candidates=9, longest=4, pin=False)
    packed.item.numpy()[:] = [1, 2, 3, 4, 5, 6]
    packed.timestamp.numpy()[:] = [10, 20, 30, 40, 50, 60]
    packed.action.numpy()[:] = [1, 4, 1, 2, 1, 4]
    table = packed.samples.numpy()
    table[:] = np.arange(18)[:, None] * 10 + np.arange(3)
    table[:3] = [[0, 4, 6], [3, 3, 6], [1, 5, 6]]  # second sample: the pools forgot events 0, 1 and 2
    table[3] = [4, 6, 6]
    table[LENGTH] = [4, 3, 0]
    table[LABEL] = [1, 0, 1]
    packed.tokens, packed.candidates = 7, 4 + 3
    return packed


def test_expands_by_pool_and_order_of_time():
    artist, album = torch.arange(7, dtype=torch.int32) * 100, torch.arange(7, dtype=torch.int32) * 1_000
    samples = expand(by_hand(), artist, album)
    assert samples.lengths.tolist() == [4, 3, 0]
    assert samples.item.tolist() == [1, 2, 3, 4, 4, 5, 6]
    assert samples.artist.tolist() == [100, 200, 300, 400, 400, 500, 600]
    assert samples.album.tolist() == [1000, 2000, 3000, 4000, 4000, 5000, 6000]
    assert samples.timestamp.tolist() == [10, 20, 30, 40, 40, 50, 60]
    assert samples.action.tolist() == [1, 4, 1, 2, 2, 1, 4]
    assert samples.query_timestamp.tolist() == [QUERY * 10 + i for i in range(3)]
    assert samples.candidate_album.tolist() == [(CANDIDATE + 2) * 10 + i for i in range(3)]
    assert samples.context.tolist() == [[(CONTEXT_ROWS + r) * 10 + i for i in range(3)] for r in range(8)]
    assert samples.labels.tolist() == [1.0, 0.0, 1.0]


def test_a_pool_in_between_is_left_out():
    packed = by_hand()
    packed.samples.numpy()[:3] = [[2, 4, 6], [0, 3, 6], [1, 5, 6]]
    packed.tokens, packed.candidates = 3 + 3, 4 + 3
    packed.action.numpy()[:] = [2, 1, 1, 4, 2, 4]
    packed.samples.numpy()[:3, 1] = [6, 4, 3]
    zero = torch.zeros(7, dtype=torch.int32)
    samples = expand(packed, zero, zero)
    assert samples.item.tolist() == [1, 3, 4, 4, 5, 6]


def test_distinct_items_are_named_once():
    packed = by_hand()
    packed.item.numpy()[:] = [5, 2, 5, 4, 2, 5]
    found = by_items(packed, pin=False)
    assert found.item.tolist() == [2, 4, 5]
    assert found.place is not None
    assert found.item[found.place].tolist() == packed.item.tolist()
    for name in ("samples", "timestamp", "action"):
        assert torch.equal(getattr(found, name), getattr(packed, name)), name
    assert (found.tokens, found.candidates, found.longest) == (packed.tokens, packed.candidates, packed.longest)
    assert packed.place is None


def test_expanding_needs_no_compiler():
    """A process that only trains imports neither numba nor what reads files."""
    program = "import sys; import dlrm_bench.dlrm.dlrmv4.data.packed; assert not {'numba', 'polars'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.gpu
def test_expands_on_a_gpu_as_on_the_host_without_waiting():
    artist, album = torch.arange(7, dtype=torch.int32), torch.arange(7, dtype=torch.int32)
    packed, device = by_hand(), torch.device("cuda")
    on_device, maps = packed.to(device), (artist.to(device), album.to(device))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = expand(on_device, *maps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = expand(packed, artist, album)
    for name in expected.__dataclass_fields__:
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
