"""Copies of several tensors are those that are made one by one, with fewer launches."""

from collections import Counter, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm_bench.pipeline.five_stage.batch_fields import leaves, map_fields
from dlrm_bench.pipeline.five_stage.copies import TOGETHER, CopyTogether, copies_of

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
OTHERS = (torch.complex64, torch.uint16)
"""Types that torch does not copy together on every device."""
Named = namedtuple("Named", "loss logits")


@dataclass
class Fields:
    of_type: dict[str, Tensor]
    step: int
    name: str | None = None


class Own(Tensor):
    pass


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operator._overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


def numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype).to(device)


def plain(device: torch.device) -> Any:
    """Of two types, without gaps."""
    logits = torch.randn(64, device=device)
    return Named(torch.randn((), device=device), logits), [logits, torch.arange(3, device=device)], 1, "a"


def any_kind(device: torch.device) -> Any:
    wide = torch.randn(6, 4, device=device)
    views = [wide[:, 1], wide.t(), wide[::2], wide[:1, ::2], wide[0].expand(3, 4), wide[1:2], wide[1]]
    odd = torch.randn(8, device=device).as_strided((1, 3), (7, 1))
    images = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    empty = [torch.empty(0, device=device), torch.empty(3, 0, dtype=torch.int64, device=device)]
    conjugate = torch.randn(4, dtype=torch.complex64, device=device).conj()
    of_type = {str(dtype): numbers((5,), dtype, device) for dtype in (*TOGETHER, *OTHERS)}
    scalars = {f"{dtype} scalar": numbers((), dtype, device) for dtype in (*TOGETHER, *OTHERS)}
    own = torch.randn(2, device=device).as_subclass(Own)
    others = (odd, images, empty, conjugate, conjugate.imag, conjugate[:1].imag, own, wide, torch.ones(2), None)
    return views, Fields(of_type | scalars, 3), others, torch.eye(3, device=device).to_sparse()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [plain, any_kind])
def test_equals_clones(make, device):
    output = make(device)
    expected = map_fields(output, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
    copies = copies_of(output)
    assert type(copies) is type(output)
    for of, copy, clone in zip(leaves(output), leaves(copies), leaves(expected), strict=True):
        assert type(copy) is type(clone)
        if isinstance(of, Tensor):
            assert copy is not of
            assert copy.dtype == clone.dtype
            assert clone.layout is not torch.strided or copy.stride() == clone.stride()
            assert copy.device == clone.device
            torch.testing.assert_close(copy.cpu(), clone.cpu(), rtol=0, atol=0)
            assert not any((copy.is_conj(), copy.is_neg(), copy.requires_grad))
        else:
            assert copy is of


@pytest.mark.parametrize("device", DEVICES)
def test_every_copy_has_memory_of_its_own(device):
    output = any_kind(device)[:3]
    both = [of for found in (output, copies_of(output)) for of in leaves(found) if isinstance(of, Tensor)]
    copies = [of for of in both[len(both) // 2 :] if of.numel()]
    memory = [of.untyped_storage().data_ptr() for of in copies]
    assert len({*memory}) == len(memory)
    assert not {*memory} & {of.untyped_storage().data_ptr() for of in both[: len(both) // 2]}
    assert all(of.untyped_storage().nbytes() == of.nbytes for of in copies)


def test_one_launch_for_each_type():
    with Launches() as launches:
        copies_of(plain(torch.device("cpu")))
    assert launches.counts["_foreach_copy_"] == 2
    assert launches.counts["clone"] == launches.counts["copy_"] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_copies_into_memory_that_stays(device):
    """Of all types, whether or not either side has gaps, or autograd follows it."""
    types = (*TOGETHER, *OTHERS)
    tensors = [numbers(shape, dtype, device) for shape in ((0,), (), (3,), (4, 6)) for dtype in types]
    tensors = [of for wide in tensors for of in ((wide, wide.t(), wide[:, 1]) if wide.dim() == 2 else (wide,))]
    floats = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42], device=device)
    tensors += [floats, floats.double(), torch.tensor([-1, 1 << 62, -(1 << 62) - 1], device=device)]
    into = [torch.zeros_like(of) for of in tensors] + [torch.zeros(6, 4, device=device).t()]
    tensors += [torch.randn(4, 6, device=device)]
    copy = CopyTogether(into)
    for _ in range(2):
        copy([of.detach().requires_grad_() if of.is_floating_point() else of for of in tensors])
        for to, of in zip(into, tensors, strict=True):
            assert not to.requires_grad
            assert same_bits(to, of)
        for to in into:
            to.zero_()


def same_bits(one: Tensor, other: Tensor) -> bool:
    of_both = [of.cpu().contiguous().view(-1).view(torch.uint8) for of in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*of_both)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bool])
def test_converts_other_types(dtype):
    """As lengths may be of another type in every batch."""
    into = [torch.zeros(3, dtype=dtype), torch.zeros(1, dtype=dtype)]
    copy = CopyTogether(into)
    for of in TOGETHER:
        copy([torch.tensor([0, 1, 5]).to(of), torch.tensor([3]).to(of)])
        for to, expected in zip(into, ([0, 1, 5], [3]), strict=True):
            assert torch.equal(to, torch.tensor(expected).to(of).to(dtype))


def test_one_launch_for_all_of_words():
    tensors = [torch.ones(3, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.int32, torch.float64)]
    copy = CopyTogether([torch.zeros_like(of) for of in tensors])
    with Launches() as launches:
        copy(tensors)
    assert launches.counts["_foreach_copy_"] == 1
    assert not {*launches.counts} & {"copy_", "clone", "_to_copy"}
