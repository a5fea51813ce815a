"""A capture that fails names the line of the user's model, and what to write there instead."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import JaggedTensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.capture_errors import told
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.any_models import LONGEST, PLANS, Sequence, batches, build
from tests.pipeline.five_stage.torchrec_models import drain

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing\nFor debugging, set a variable."


class OnTheGpu(Tensor):
    """A tensor of a device that cannot be read while a stream is captured."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Tensor:
        raise RuntimeError(NOT_PERMITTED)


def longest(lengths: Tensor) -> None:
    lengths.max()


def longest_number(lengths: Tensor) -> None:
    int(lengths.max())


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
        (longest_number, "`int(lengths.max())`", "to_padded_dense(desired_length=...)"),
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


class Capture:
    """Ends as a capture does that has failed."""

    def __enter__(self) -> None:
        """Begins nothing."""

    def __exit__(self, *error: object) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def in_a_handler(loss: Tensor) -> None:
    try:
        {}["absent"]
    except KeyError:
        loss.item()


@pytest.mark.parametrize("read", [number, in_a_handler])
def test_the_end_of_a_capture_does_not_hide_the_line(read):
    with pytest.raises(RuntimeError, match="previous error") as raised, Capture():
        read(torch.ones(2).as_subclass(OnTheGpu))
    first = raised.value.__context__
    assert first is not None
    trace = first.__traceback__
    while trace is not None and trace.tb_frame.f_code is not read.__code__:
        trace = trace.tb_next
    first.__traceback__ = trace
    assert trace is not None
    trace.tb_next = None
    said = told(raised.value)
    assert "`loss.item()` reads the device from the host" in said


def test_an_error_of_the_model_is_told_before_that_of_the_captures_end():
    with pytest.raises(RuntimeError, match="previous error") as raised, Capture():
        wrong(torch.ones(2, 2))
    assert "`return x @ torch.ones(3)`" in told(raised.value)


def wrong(x: Tensor) -> Tensor:
    return x @ torch.ones(3)


def test_other_errors_are_told_with_their_line():
    with pytest.raises(RuntimeError) as raised:
        wrong(torch.ones(2, 2))
    said = told(raised.value)
    assert said.startswith("RuntimeError: ")
    assert "`return x @ torch.ones(3)`" in said


def by_longest(history: JaggedTensor) -> Tensor:
    longest = int(history.lengths().max())
    return history.to_padded_dense(LONGEST) * (longest > 0)


def by_item(history: JaggedTensor) -> Tensor:
    share = history.lengths().sum().item()
    return history.to_padded_dense(LONGEST) * (share >= 0)


def by_mask(history: JaggedTensor) -> Tensor:
    mask = history.lengths() > 0
    return history.to_padded_dense(LONGEST) * len(history.lengths()[mask].clamp(max=1))


def by_condition(history: JaggedTensor) -> Tensor:
    if history.lengths().sum() > 0:
        return history.to_padded_dense(LONGEST)
    return history.to_padded_dense(LONGEST) * 0


READS: dict[Callable[[JaggedTensor], Tensor], tuple[str, str]] = {
    by_longest: ("`longest = int(history.lengths().max())`", "to_padded_dense(desired_length=...)"),
    by_item: ("`share = history.lengths().sum().item()`", "keep the number a tensor on the device"),
    by_mask: ("`return history.to_padded_dense(LONGEST) * len(history.lengths()[mask].clamp(max=1))`", "torch.where"),
    by_condition: ("`if history.lengths().sum() > 0:`", "torch.where"),
}


class Reading(Sequence):
    def __init__(self, read: Callable[[JaggedTensor], Tensor]) -> None:
        super().__init__()
        self._read = read

    def of(self, found: dict[str, JaggedTensor]) -> Tensor:
        return super().of(found) + self._read(found["history"]).sum(dim=(1, 2))


def named(ranks: Ranks) -> list[str]:
    """What the pipeline says of each model that reads the device; it trains as without a graph."""
    signal.alarm(600)
    said = []
    for read in READS:
        results: list[Any] = []
        for options in (FiveStageOptions(), FiveStageOptions(cuda_graph="dense")):
            model, optimizer = build(ranks, lambda read=read: Reading(read), PLANS["TW"])
            with FiveStagePipeline(model, optimizer, ranks.device, options) as pipeline:
                results.append(drain(pipeline, iter(batches(ranks, 8, full=True))).outputs)
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        said.append(pipeline.switched_off["cuda_graph"])
    return said


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES[:1])
def test_a_read_of_a_model_is_named_on_a_gpu(run_ranks, world_size, gpu):
    (said,) = run_ranks(world_size, named, gpu=gpu)
    for why, (line, instead) in zip(said, READS.values(), strict=True):
        assert why.startswith(f"the dense part cannot be captured: {__file__}:")
        assert f"{line} reads the device from the host, which no graph can: " in why
        assert instead in why
