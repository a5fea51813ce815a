"""FBGEMM's fused Adam on the CPU, where FBGEMM has none, for tests of what is around its update.

`adam` is the arithmetic of FBGEMM's kernel for GPUs (optimizers.py of its code generator), of whole rows: each row that
an id names is updated once, by the sum of its gradients, even where all of its weights are zero.
"""

from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu import split_embedding_codegen_lookup_invokers as invokers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    construct_split_state,
)
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

SUM, MEAN, NONE = range(3)


def adam(rows: Tensor, m: Tensor, v: Tensor, grads: Tensor, *, lr: float, step: int, of: Any) -> None:
    """Updates rows and both moments, fp32 [rows, dim], in place by grads [rows, dim]. of: FBGEMM's eps, beta1, beta2
    and weight_decay. FBGEMM's powers are fp32, and 1.0 minus them fp64, as all is that they divide."""
    m.mul_(of.beta1).add_(grads * (1.0 - of.beta1))
    v.mul_(of.beta2).add_(grads * grads * (1.0 - of.beta2))
    bias1, bias2 = (1.0 - torch.tensor(beta).pow(float(step)).double() for beta in (of.beta1, of.beta2))
    update = m / bias1 / ((v / bias2).float().sqrt() + of.eps)
    rows.sub_((lr * (update + of.weight_decay * rows)).float())


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, common: Any, of: Any, moments: Any, step: int) -> Tensor:
        ctx.given = common, of, moments, step
        out = empty_output(common)  # seen by modes, as memory that this has made
        with _disable_current_modes():
            fill_output(out, common, lambda f, ids, first: _rows(common.host_weights, common, f)[ids])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        common, of, moments, step = ctx.given
        (grad,) = grads
        with _disable_current_modes(), torch.no_grad():
            sums: dict[int, tuple[int, Tensor, Tensor]] = {}
            for f, offset in enumerate(common.weights_offsets.tolist()):
                ids, of_ids = gradients_of_ids(common, f, grad)
                rows = _rows(common.host_weights, common, f)
                _, total, named = sums.setdefault(offset, (f, torch.zeros_like(rows), torch.zeros(len(rows)).bool()))
                total.index_add_(0, ids, of_ids)
                named[ids] = True
            for f, total, named in sums.values():
                states = [_rows(of_all, common, f) for of_all in (common.host_weights, *(m.host for m in moments))]
                mine = [state[named] for state in states]
                adam(*mine, total[named], lr=float(common.learning_rate_tensor), step=step, of=of)
                for state, changed in zip(states, mine, strict=True):
                    state[named] = changed
        return (None,) * 5


def _of_feature(common: Any, f: int) -> tuple[Tensor, Tensor, Tensor | None, slice, int]:
    """Returns a feature's ids, their bags, their weights, its columns in the output and the place of its first id."""
    bags = (len(common.offsets) - 1) // len(common.weights_offsets)
    offsets = common.offsets[f * bags : (f + 1) * bags + 1]
    first, end = int(offsets[0]), int(offsets[-1])
    weights = None if common.indice_weights is None else common.indice_weights[first:end]
    bag = torch.arange(bags).repeat_interleave(offsets.diff())
    if common.pooling_mode == MEAN:
        weights = (1.0 if weights is None else weights) / offsets.diff()[bag]
    columns = slice(0, common.max_D) if common.pooling_mode == NONE else slice(*common.D_offsets[f : f + 2].tolist())
    return common.indices[first:end].long(), bag, weights, columns, first


def empty_output(common: Any) -> Tensor:
    """Returns zeros of the shape of a lookup's output: [bags, columns of all features], or [ids, columns] unpooled."""
    bags = (len(common.offsets) - 1) // len(common.weights_offsets)
    if common.pooling_mode == NONE:
        return torch.zeros(len(common.indices), common.max_D)
    return torch.zeros(bags, common.total_D)


def fill_output(out: Tensor, common: Any, vectors_of: Callable[[int, Tensor, int], Tensor]) -> None:
    """Adds the vectors of all ids to the zeros of a lookup's output. vectors_of: those of a feature's ids, [ids,
    columns], given the feature, its ids and the place of its first one."""
    for f in range(len(common.weights_offsets)):
        ids, bag, weights, columns, first = _of_feature(common, f)
        vectors = vectors_of(f, ids, first)
        if common.pooling_mode == NONE:
            out[first : first + len(ids)] = vectors
        else:
            vectors = vectors if weights is None else vectors * weights.unsqueeze(1)
            out[:, columns].index_add_(0, bag, vectors)


def gradients_of_ids(common: Any, f: int, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a feature's ids and the gradient of each one's row, [ids, columns], from that of the output."""
    ids, bag, weights, columns, first = _of_feature(common, f)
    of_ids = grad[bag, columns] if common.pooling_mode != NONE else grad[first : first + len(ids)]
    return ids, of_ids if weights is None else of_ids * weights.unsqueeze(1)


def _rows(of_all: Tensor, common: Any, f: int) -> Tensor:
    """Returns the rows of a feature's table, and of the tables behind it, as [rows, dim]."""
    width = common.max_D if common.pooling_mode == NONE else int(common.D_offsets[f + 1] - common.D_offsets[f])
    behind = of_all.detach()[int(common.weights_offsets[f]) :]
    return behind[: len(behind) // width * width].view(-1, width)


def _invoke(common: Any, of: Any, momentum1: Any, momentum2: Any, step: int, row_counter: Any = None) -> Tensor:
    assert row_counter is None, "without counters of rows"
    result: Tensor = _Lookup.apply(common.placeholder_autograd_tensor, common, of, (momentum1, momentum2), step)
    return result


def adam_on_cpu() -> None:
    """In this process: FBGEMM has it."""
    kind: Any = SplitTableBatchedEmbeddingBagsCodegen
    if getattr(kind, "adam_on_cpu", False):
        return
    plain = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        is_adam = kwargs.get("optimizer") == EmbOptimType.ADAM
        plain(self, *args, **kwargs | ({"optimizer": EmbOptimType.EXACT_ADAGRAD} if is_adam else {}))
        if is_adam:
            self.optimizer = EmbOptimType.ADAM
            split = construct_split_state(self.embedding_specs, rowwise=False, cacheable=False)
            self._apply_split(split, prefix="momentum2", dtype=torch.float32)

    kind.__init__, kind.adam_on_cpu = init, True
    invokers.lookup_adam.invoke = _invoke
