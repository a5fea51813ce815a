"""The kernel, compiled on a GPU or interpreted, against the plain update."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torchrec.metrics.metrics_config import RecMetricEnum

from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics
from dlrm_bench.pipeline.device_metrics.layout import Layout
from dlrm_bench.pipeline.device_metrics.plain_update import Signals, plain_update
from dlrm_bench.pipeline.device_metrics.state import Scratch, State, empty_state, scratch_of
from dlrm_bench.pipeline.device_metrics.triton_update import DTYPES, Launch, addresses_of
from tests.kernels.devices import DEVICE, needs_triton
from tests.pipeline.device_metrics.made_metrics import WINDOWS, batch, config, made, tasks

pytestmark = needs_triton
GENERATOR = torch.Generator().manual_seed(0)


def layout_of(count: int, validate: bool = False, windows: dict[RecMetricEnum, int] = WINDOWS) -> Layout:
    layout = made(DeviceRecMetrics, config(tasks(count), windows, should_validate_update=validate)).layout
    assert isinstance(layout, Layout)
    return layout


def on(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


class Kernel:
    """Launches on a state of its own, as DeviceRecMetrics does on a GPU."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.state = State(*on(DEVICE, empty_state(layout)))
        self.scratch = Scratch(*on(DEVICE, scratch_of(layout)))

    def update(self, signals: list[Tensor], of: range | None = None) -> None:
        of = of or range(len(self.layout.tasks))
        strides = [signal.stride(0) if signal.numel() else 1 for signal in signals]
        forms = ([signal.numel() for signal in signals[::3]], strides, [signal.dtype for signal in signals])
        Launch(self.layout, self.state, self.scratch, of, *forms)(addresses_of(signals))


def assert_equal(ours: State, plain: State, relative: float = 1e-13) -> None:
    for name, tensor, expected in zip(State._fields, ours, plain, strict=True):
        near = (relative, 1e-13) if tensor.dtype == torch.float64 else (0.0, 0.0)
        torch.testing.assert_close(tensor.cpu(), expected, rtol=near[0], atol=near[1], equal_nan=True, msg=name)


def signals_of(sizes: Sequence[int], dtype: torch.dtype = torch.float32, weightless: float = 0.3) -> list[Tensor]:
    """Labels, predictions and weights of each task, by turns; some tasks without any weight."""
    found = []
    for size in sizes:
        (task,) = tasks(1)
        drawn = batch([task], size, GENERATOR, dtype, torch.device("cpu"))
        weight = 0 if torch.rand((), generator=GENERATOR) < weightless else 1
        found += [drawn["label0"], drawn["prediction0"], drawn["weight0"] * weight]
    return found


def both_updated(kernel: Kernel, plain: State, signals: list[Tensor]) -> None:
    kernel.update(on(DEVICE, signals))
    batches = [Signals(*signals[at : at + 3]) for at in range(0, len(signals), 3)]
    plain_update(kernel.layout, plain, scratch_of(kernel.layout), batches)


def test_a_window_may_be_full_to_the_last_sample() -> None:
    layout = layout_of(1, windows=dict.fromkeys(WINDOWS, 64))
    kernel, plain = Kernel(layout), empty_state(layout)
    for turn in range(9):
        both_updated(kernel, plain, signals_of([16]))
        assert_equal(kernel.state, plain)
        assert kernel.state.cursors[1:, 0, 0].tolist() == [min(turn + 1, 4), min(turn + 1, 4) * 16]


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_windows_move_as_in_the_plain_update(count: int, validate: bool) -> None:
    layout = layout_of(count, validate)
    kernel, plain = Kernel(layout), empty_state(layout)
    for turn in range(12):
        size = (16, 1, 40, 16, 95, 0, 150, 3)[turn % 8]
        both_updated(kernel, plain, signals_of([size] * count))
        assert_equal(kernel.state, plain)


def test_tasks_may_have_other_sizes_dtypes_and_strides() -> None:
    layout = layout_of(3, validate=True)
    kernel, plain = Kernel(layout), empty_state(layout)
    for sizes in ((5, 0, 60), (130, 7, 1), (0, 0, 2)):
        signals = signals_of(sizes, torch.float64)
        signals[0], signals[1] = signals[0].to(torch.int64), signals[1].to(torch.bfloat16)
        signals[6] = signals[6].to(torch.bool)
        signals[7] = torch.stack([signals[7], signals[7]], dim=1)[:, 0]
        both_updated(kernel, plain, signals)
    assert_equal(kernel.state, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read(dtype: torch.dtype) -> None:
    layout = layout_of(1)
    kernel, plain = Kernel(layout), empty_state(layout)
    values = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    both_updated(kernel, plain, [values, values, values])
    assert_equal(kernel.state, plain)


def test_blocks_that_share_a_batch_add_up_in_a_fixed_order() -> None:
    layout = layout_of(1)
    states = []
    signals = signals_of([100_001 if DEVICE.type == "cuda" else 8_193], weightless=0.0)  # interpreted sums take seconds
    for _ in range(2):
        kernel, plain = Kernel(layout), empty_state(layout)
        for _ in range(2):
            both_updated(kernel, plain, signals)
        assert_equal(kernel.state, plain, 1e-12)
        assert not kernel.scratch.arrivals.any()
        states.append(kernel.state)
    assert all(map(torch.equal, *states))
    assert states[0].lifetime.count_nonzero() > 10


def test_a_ring_of_batches_comes_round() -> None:
    """More batches than the ring holds, in a window that would hold them all."""
    layout = layout_of(1, windows={RecMetricEnum.NE: 10**6, RecMetricEnum.CTR: 10**6 + 1})
    kernel, plain = Kernel(layout), empty_state(layout)
    most = len(plain.batches)
    signals = signals_of([2])
    for state in (kernel.state, plain):  # as if nearly as many batches had come
        state.cursors[1] = most - 1
        state.cursors[2] = 2 * (most - 1)
        state.batch_sizes[: most - 1] = 2
        state.batches[: most - 1] = torch.arange(most - 1, dtype=torch.float64, device=state.batches.device)[
            :, None, None
        ]
        state.window[:] = (most - 1) * (most - 2) / 2
    for _ in range(4):
        both_updated(kernel, plain, signals)
        assert_equal(kernel.state, plain)
    assert int(kernel.state.cursors[0].max()) == 3


def test_launches_of_some_tasks_leave_the_others() -> None:
    layout = layout_of(3)
    kernel, plain = Kernel(layout), empty_state(layout)
    signals = signals_of([9, 9, 9])
    both_updated(kernel, plain, signals)
    kernel.update(on(DEVICE, signals[3:]), range(1, 3))
    empty = [tensor[:0] for tensor in signals[:3]]
    plain_update(layout, plain, scratch_of(layout), [Signals(*part) for part in (empty, signals[3:6], signals[6:])])
    assert_equal(kernel.state, plain)


def test_metrics_without_auc_and_auc_alone() -> None:
    for windows in ({RecMetricEnum.MSE: 50}, {RecMetricEnum.AUC: 50}):
        layout = layout_of(2, windows=windows)
        kernel, plain = Kernel(layout), empty_state(layout)
        for size in (30, 30, 70):
            both_updated(kernel, plain, signals_of([size, size]))
        assert_equal(kernel.state, plain)


def test_not_a_number_and_infinite_stay_what_they_are() -> None:
    layout = layout_of(1)
    kernel, plain = Kernel(layout), empty_state(layout)
    for value in (float("inf"), float("nan")):
        signals = signals_of([20])
        signals[1][3] = value
        signals[2][3] = 1.0
        both_updated(kernel, plain, signals)
        assert_equal(kernel.state, plain)
    assert kernel.state.lifetime.isnan().any()
