"""Copies of many tensors: each is its source, and those alike share a launch."""

from unittest.mock import patch

import torch

from dlrm_bench.dlrm.dense.copy_together import copy_together


def test_copies_each_and_those_alike_together() -> None:
    torch.manual_seed(0)
    sources = [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(5).bfloat16(),
        torch.randn(2, 6),
        torch.randn(6, 7).bfloat16()[:, :6],
        torch.randn(3, 3).bfloat16(),
    ]
    targets = [torch.full(source.shape, torch.nan) for source in sources]
    with patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as launch:
        copy_together(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.float())
    together = sorted([len(call.args[0]) for call in launch.call_args_list])
    assert together == [1, 1, 2, 2], "transposed, strided bf16, bf16, fp32"


def test_nothing_is_copied_of_nothing() -> None:
    copy_together([], [])
