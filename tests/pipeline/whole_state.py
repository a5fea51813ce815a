"""The whole state of a pipeline, whatever its sharding, on rank 0: to compare pipelines, and to start one from another.

Gathering and loading are collective, one block of a tensor after the other. The whole tensors are CPU memory of rank 0
alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.pipeline.interface import Pipeline
from dlrm_bench.pipeline.state import StateBlocks, TensorBlock, TensorBlocks, full_shape

# Elements of one broadcast.
_CHUNK_ELEMENTS = 1 << 22


@dataclass(slots=True)
class ModelState:
    """Full tensors on the CPU of rank 0; empty on the other ranks."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """fp32; `DLRM_DCN.load_state_dict` takes it as it is."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """fp32, Adagrad's sum of squared gradients of each weight, under the weight's key and of its shape; for tables
    under rowwise Adagrad [rows, 1], under SGD nothing."""


def whole_state(pipeline: Pipeline) -> ModelState:
    """Returns weights and optimizer state after the last step, as CPU copies on rank 0, nothing on the others.
    Collective."""
    blocks = pipeline.state_blocks()
    device = _device(blocks)
    return ModelState(*(_gather(of_kind, device) for of_kind in blocks))


def load_whole_state(pipeline: Pipeline, state: ModelState) -> None:
    """Continues from rank 0's `state`, of any pipeline; batches in flight stay. Collective.

    ValueError on every rank, before anything is written, if a tensor is missing, not expected or of another shape.
    """
    blocks = pipeline.state_blocks()
    _check(state, blocks)
    device = _device(blocks)
    for full, of_kind in zip((state.weights, state.optimizer), blocks, strict=True):
        _scatter(full, of_kind, device)
    pipeline.take_blocks(blocks)


def _device(blocks: StateBlocks) -> torch.device:
    return next(block.local.device for of in blocks.weights.values() for block in of if block.local is not None)


def _gather(blocks_by_key: TensorBlocks, device: torch.device) -> dict[str, Tensor]:
    full = {}
    for key, blocks in blocks_by_key.items():
        tensor = torch.empty(full_shape(blocks)) if dist.get_rank() == 0 else None
        for block in blocks:
            for rows in _chunks(block):
                source = None
                if block.owner == dist.get_rank():
                    assert block.local is not None
                    source = block.local[rows].clone()
                buffer = _buffer(block, rows, device, source)
                dist.broadcast(buffer, src=block.owner)
                if tensor is not None:
                    tensor[block.index][rows] = buffer.cpu()
        if tensor is not None:
            full[key] = tensor
    return full


@torch.no_grad()
def _scatter(full: dict[str, Tensor], blocks_by_key: TensorBlocks, device: torch.device) -> None:
    for key, blocks in blocks_by_key.items():
        for block in blocks:
            for rows in _chunks(block):
                buffer = _buffer(block, rows, device, full[key][block.index][rows] if dist.get_rank() == 0 else None)
                dist.broadcast(buffer, src=0)
                if block.local is not None:
                    block.local[rows].copy_(buffer)


def _chunks(block: TensorBlock) -> Iterable[slice]:
    rows, *others = block.shape
    step = max(1, _CHUNK_ELEMENTS // max(1, torch.Size(others).numel()))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _buffer(block: TensorBlock, rows: slice, device: torch.device, source: Tensor | None) -> Tensor:
    """Returns the buffer to broadcast some rows of a block in: a copy of `source` on the rank that has it."""
    buffer = torch.empty(rows.stop - rows.start, *block.shape[1:], device=device)
    return buffer if source is None else buffer.copy_(source)


def _check(state: ModelState, blocks: StateBlocks) -> None:
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        wrong = [
            *_differences(state.weights, blocks.weights, ""),
            *_differences(state.optimizer, blocks.optimizer, "optimizer of "),
        ]
        if wrong:
            answer = [f"{wrong[0]}; give both runs the same --model flags and the same --optimizer.embedding"]
    dist.broadcast_object_list(answer, src=0)
    if answer[0] is not None:
        raise ValueError(answer[0])


def _differences(full: dict[str, Tensor], blocks_by_key: TensorBlocks, what: str) -> Iterator[str]:
    needed = {key: full_shape(blocks) for key, blocks in blocks_by_key.items()}
    given = {key: tuple(tensor.shape) for key, tensor in full.items()}
    for key in sorted(needed.keys() | given.keys()):
        if given.get(key) != needed.get(key):
            has, needs = given.get(key, "nothing"), needed.get(key, "nothing")
            yield f"the state is of another model: {what}{key}: it has {has}, but {needs} is needed"
