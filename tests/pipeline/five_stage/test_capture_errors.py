"""A capture that fails names the line of the user's model, and what to write there instead."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.pipeline.five_stage.capture_errors import told

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing\nFor debugging, set a variable."


class OnTheGpu(Tensor):
    """A tensor of a device that cannot be read while a stream is captured."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> None:
        raise RuntimeError(NOT_PERMITTED)


def longest(lengths: Tensor) -> None:
    lengths.max()


def number(loss: Tensor) -> None:
    loss.item()


def masked(x: Tensor) -> None:
    x.nonzero()


def moved(x: Tensor) -> None:
    x.cpu()


@pytest.mark.parametrize(
    ("read", "line", "instead"),
    [
        (longest, "`lengths.max()`", "to_padded_dense(desired_length=...)"),
        (number, "`loss.item()`", "keep the number a tensor on the device"),
        (masked, "`x.nonzero()`", "torch.where"),
        (moved, "`x.cpu()`", "what progress() returns"),
    ],
)
def test_a_read_is_named_with_what_to_use_instead(read, line, instead):
    with pytest.raises(RuntimeError) as raised:
        read(torch.ones(2).as_subclass(OnTheGpu))
    trace = raised.value.__traceback__
    while trace is not None and trace.tb_frame.f_code is not read.__code__:
        trace = trace.tb_next
    assert trace is not None
    trace.tb_next = None  # on a GPU the error comes out of torch's own code
    said = told(raised.value.with_traceback(trace))
    assert said.startswith(f"{__file__}:")
    assert line in said
    assert "reads the device from the host, which no graph can: " in said
    assert instead in said


def wrong(x: Tensor) -> Tensor:
    return x @ torch.ones(3)


def test_other_errors_are_told_with_their_line():
    with pytest.raises(RuntimeError) as raised:
        wrong(torch.ones(2, 2))
    said = told(raised.value)
    assert said.startswith("RuntimeError: ")
    assert "`return x @ torch.ones(3)`" in said
