"""Weights and optimizer state of a model sharded by TorchRec, in the format of pipeline/state.py."""

from collections.abc import Collection
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_bench.dlrm.optimizers import SGD, Adagrad, TableOptimizer
from dlrm_bench.dlrm.torchrec_model import TorchRecModel
from dlrm_bench.pipeline.state import StateBlocks, TensorBlock


def state_blocks(
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    of_benchmark: TorchRecModel,
    tables: Collection[str],
    table_optimizer: TableOptimizer,
) -> StateBlocks:
    """Returns the blocks of the tensors in the public state_dict of model and optimizer, which are the trained memory
    itself.

    tables: names of the tables' weights in the model's state_dict. ValueError if a state belongs to the sharding and
    not to the model.
    """
    weights, state = model.state_dict(), optimizer.state_dict()["state"]
    of_weights, of_optimizer = {}, {}
    for key, value in weights.items():
        name = key.removeprefix(of_benchmark.prefix)
        of_weights[name] = tensor_blocks(value, value)
        if key not in tables:
            for kind, ending in of_benchmark.dense_states.items():
                of_optimizer[name + ending] = [TensorBlock.whole(_with_rows(state[key][kind]))]
        elif not isinstance(table_optimizer, SGD):
            blocks = tensor_blocks(value, _sums(state.get(key, {})))
            of_optimizer[name] = blocks if isinstance(table_optimizer, Adagrad) else _of_rows(name, blocks)
    return StateBlocks(of_weights, of_optimizer)


def forget_cached_rows(model: nn.Module) -> None:
    """Empties the GPU's caches of tables in host memory, after their rows have been replaced there."""
    for module in model.modules():
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
            module.reset_cache_states()


def tensor_blocks(weights: Tensor | ShardedTensor, tensor: Tensor | ShardedTensor | None) -> list[TensorBlock]:
    """Returns the blocks of `weights`, with the memory of `tensor`, sharded alike; None without a local shard."""
    if not isinstance(weights, ShardedTensor):
        assert isinstance(tensor, Tensor)
        return [TensorBlock.whole(tensor)]
    local = {}
    if isinstance(tensor, ShardedTensor):  # row-wise state has different offsets; its shards are in the same order
        for shard, of_weights in zip(tensor.local_shards(), weights.local_shards(), strict=True):
            local[tuple(of_weights.metadata.shard_offsets)] = shard.tensor
    return [
        TensorBlock(s.placement.rank(), tuple(s.shard_offsets), tuple(s.shard_sizes), local.get(tuple(s.shard_offsets)))
        for s in weights.metadata().shards_metadata
    ]


def _with_rows(state: Tensor) -> Tensor:
    """Returns a view with at least one dimension: for a step count, [1]."""
    return state if state.dim() else state.view(1)


def _sums(state: dict[str, Any]) -> Tensor | ShardedTensor | None:
    """Returns Adagrad's state, which a fused optimizer calls momentum1 and has only if there is a shard."""
    return next((value for name, value in state.items() if name == "sum" or name.endswith(".momentum1")), None)


def _of_rows(name: str, blocks: list[TensorBlock]) -> list[TensorBlock]:
    """Returns the blocks of row-wise state, [rows, 1], of a table with `blocks`; ValueError if columns are split."""
    if any(block.start[1] > 0 for block in blocks):
        raise ValueError(
            f"{name}: TorchRec's plan splits its columns, so row-wise Adagrad's state is per shard, not per row: save "
            "and load states with --optimizer.embedding adagrad"
        )
    return [
        TensorBlock(b.owner, b.start, (b.shape[0], 1), b.local.view(-1, 1) if isinstance(b.local, Tensor) else None)
        for b in blocks
    ]
