"""The dense network with its backward written out, on flat buffers.

Equal to autograd over dlrm.model.DenseNetwork. Written out, the caller decides when weight gradients are computed: the
chain that the embeddings wait for comes first, weight gradients run beside what follows. Weights, gradients and Adagrad
state lie in flat buffers, so that all-reduce and update are one kernel each.
"""

import itertools

import torch
from torch import Tensor

from dlrm.config import ModelConfig
from dlrm.model import DenseNetwork
from kernels.cross import cross_backward, cross_forward
from kernels.flat_adagrad import flat_adagrad
from kernels.loss import bce_with_logits
from kernels.mlp import bias_relu_backward

# Tensors in the flat buffers start at multiples of this many elements, and the bottom MLP's input is padded to one of
# _PAD: cuBLAS falls to kernels several times slower where an operand is not 16-byte aligned.
_ALIGN = 64
_PAD = 16


class FlatTensors:
    """Named views of one flat, zeroed buffer."""

    def __init__(self, shapes: dict[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self.starts, end = {}, 0
        for name, shape in shapes.items():
            self.starts[name] = end
            end += -(-shape.numel() // _ALIGN) * _ALIGN
        self.flat = torch.zeros(end, dtype=dtype, device=device)
        self._views = {
            name: self.flat[start : start + shapes[name].numel()].view(shapes[name])
            for name, start in self.starts.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]


class ExplicitDense:
    """Forward, backward and update of the dense network at one fixed local batch size.

    `x0` [batch, (features + 1) * dim] is the interaction's input: `bottom_forward` fills its first dim columns, the
    caller the pooled vectors behind them. Call the methods in the order in which they stand here.
    """

    def __init__(
        self,
        model: ModelConfig,
        seed: int,
        batch_size: int,
        global_batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: of activations, gradients and the working copy of the weights, fp32 or bf16. Master weights and
        Adagrad state are fp32."""
        self.model, self.dtype = model, dtype
        self.global_batch_size = global_batch_size
        self._padded = -(-model.dense_in_features // _PAD) * _PAD
        network = DenseNetwork(model)
        network.init_weights(seed)
        weights = network.state_dict()
        weights["bottom_mlp.0.weight"] = self._pad(weights["bottom_mlp.0.weight"])
        shapes = {name: weights[name].shape for name in _backward_order(model)}
        assert shapes.keys() == weights.keys()
        self.master = FlatTensors(shapes, torch.float32, device)
        self.state = FlatTensors(shapes, torch.float32, device)
        self.grad = FlatTensors(shapes, dtype, device)
        for name, value in weights.items():
            self.master[name].copy_(value)
        self.working = self.master
        if dtype != torch.float32:
            self.working = FlatTensors(shapes, dtype, device)
            self.working.flat.copy_(self.master.flat)
        width = (model.num_features + 1) * model.embedding_dim
        self.x0 = torch.zeros(batch_size, width, dtype=dtype, device=device)
        self._dense = torch.zeros(batch_size, self._padded, dtype=dtype, device=device)

    def state_dict(self, which: str = "master") -> dict[str, Tensor]:
        """Copies of the weights ("master") or of Adagrad's state ("state") under DenseNetwork's names and shapes."""
        tensors: FlatTensors = getattr(self, which)
        copies = {name: tensors[name].clone() for name in tensors.starts}
        copies["bottom_mlp.0.weight"] = copies["bottom_mlp.0.weight"][:, : self.model.dense_in_features].contiguous()
        return copies

    def _pad(self, weight: Tensor) -> Tensor:
        padded = weight.new_zeros(weight.shape[0], self._padded)
        padded[:, : weight.shape[1]] = weight
        return padded

    def bottom_forward(self, dense: Tensor) -> None:
        """dense: fp32 [batch, dense_in_features]."""
        self._dense[:, : self.model.dense_in_features].copy_(dense)
        self._bottom = [self._dense]
        for i in range(len(self.model.bottom_mlp)):
            self._bottom.append(self._linear_relu(f"bottom_mlp.{i}", self._bottom[-1]))
        self.x0[:, : self.model.embedding_dim].copy_(self._bottom[-1])

    def forward(self) -> Tensor:
        """Logits [batch], in `dtype`."""
        working = self.working
        self._x, self._u, self._y = [self.x0], [], []
        for i in range(self.model.cross_layers):
            self._u.append(torch.mm(self._x[-1], working[f"cross.{i}.v"].t()))
            self._y.append(torch.mm(self._u[-1], working[f"cross.{i}.w"].t()))
            self._x.append(torch.empty_like(self.x0))
            cross_forward(self.x0, self._x[-2], self._y[-1], working[f"cross.{i}.bias"], self._x[-1])
        self._top = [self._x[-1]]
        last = len(self.model.top_mlp) - 1
        for i in range(last):
            self._top.append(self._linear_relu(f"top_mlp.{i}", self._top[-1]))
        name = f"top_mlp.{last}"
        return torch.addmm(working[f"{name}.bias"], self._top[-1], working[f"{name}.weight"].t()).squeeze(1)

    def loss_backward(self, logits: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
        """Gradient of the GLOBAL mean loss by the logits, [batch]: weight gradients then only need a sum over ranks.

        labels: fp32 [batch]. loss: fp32 scalar, set to the local batch's mean loss.
        """
        dlogits = torch.empty_like(logits)
        bce_with_logits(logits, labels, loss, dlogits, self.global_batch_size)
        return dlogits

    def top_backward(self, dlogits: Tensor) -> Tensor:
        """Gradient by the cross network's output [batch, width]; keeps what `top_weight_gradients` needs."""
        last = len(self.model.top_mlp) - 1
        self._dz_top: list[Tensor] = [dlogits.view(-1, 1)]
        torch.sum(self._dz_top[0], dim=0, out=self.grad[f"top_mlp.{last}.bias"])
        for i in range(last, 0, -1):
            dh = torch.mm(self._dz_top[-1], self.working[f"top_mlp.{i}.weight"])
            bias_relu_backward(dh, self._top[i], dh, self.grad[f"top_mlp.{i - 1}.bias"])
            self._dz_top.append(dh)
        return torch.mm(self._dz_top[-1], self.working["top_mlp.0.weight"])

    def top_weight_gradients(self) -> None:
        """Into `grad`: the top MLP's weights (its biases are there already)."""
        last = len(self.model.top_mlp) - 1
        for dz, i in zip(self._dz_top, range(last, -1, -1), strict=True):
            torch.mm(dz.t(), self._top[i], out=self.grad[f"top_mlp.{i}.weight"])

    def cross_backward(self, grad: Tensor) -> Tensor:
        """Gradient by x0, [batch, width], through the whole cross network."""
        self._dy: list[Tensor] = []
        self._du: list[Tensor] = []
        dx0 = torch.empty_like(grad)
        for i in reversed(range(self.model.cross_layers)):
            dy = self._y[i]  # its place, once it is read
            bias, dbias = self.working[f"cross.{i}.bias"], self.grad[f"cross.{i}.bias"]
            cross_backward(grad, self.x0, self._y[i], bias, dy, dx0, dbias, i < self.model.cross_layers - 1)
            du = torch.mm(dy, self.working[f"cross.{i}.w"])
            grad = torch.addmm(grad, du, self.working[f"cross.{i}.v"])
            self._dy.append(dy)
            self._du.append(du)
        self._dx0 = grad.add_(dx0)
        return self._dx0

    def cross_weight_gradients(self) -> None:
        """Into `grad`: the cross layers' W and V."""
        for dy, du, i in zip(self._dy, self._du, reversed(range(self.model.cross_layers)), strict=True):
            torch.mm(dy.t(), self._u[i], out=self.grad[f"cross.{i}.w"])
            torch.mm(du.t(), self._x[i], out=self.grad[f"cross.{i}.v"])

    def bottom_backward(self) -> None:
        """Into `grad`: everything of the bottom MLP. Nothing else waits for it."""
        dh = self._dx0[:, : self.model.embedding_dim].contiguous()
        for i in reversed(range(len(self.model.bottom_mlp))):
            bias_relu_backward(dh, self._bottom[i + 1], dh, self.grad[f"bottom_mlp.{i}.bias"])
            torch.mm(dh.t(), self._bottom[i], out=self.grad[f"bottom_mlp.{i}.weight"])
            if i > 0:
                dh = torch.mm(dh, self.working[f"bottom_mlp.{i}.weight"])

    def update(self, learning_rate: Tensor, eps: float) -> None:
        """Adagrad on all weights, from gradients summed over the ranks; refreshes the working copy.

        learning_rate: fp32 [1] on the device, so that a captured graph follows its changes.
        """
        working = None if self.working is self.master else self.working.flat
        flat_adagrad(self.master.flat, self.state.flat, self.grad.flat, learning_rate, eps, working)

    def grad_buckets(self) -> tuple[Tensor, Tensor]:
        """`grad` as two parts for the all-reduce: the top MLP's, ready first, and the rest."""
        boundary = self.grad.starts[_backward_order(self.model)[2 * len(self.model.top_mlp)]]
        return self.grad.flat[:boundary], self.grad.flat[boundary:]

    def _linear_relu(self, name: str, x: Tensor) -> Tensor:
        # The public pair addmm and relu is two kernels; this one has bias and ReLU in the GEMM's epilogue.
        return torch._addmm_activation(self.working[f"{name}.bias"], x, self.working[f"{name}.weight"].t())


def _backward_order(model: ModelConfig) -> list[str]:
    """Names of all weights in the order in which their gradients become ready."""
    names = [f"top_mlp.{i}.{kind}" for i in reversed(range(len(model.top_mlp))) for kind in ("weight", "bias")]
    names += [f"cross.{i}.{kind}" for i in reversed(range(model.cross_layers)) for kind in ("w", "v", "bias")]
    bottom = reversed(range(len(model.bottom_mlp)))
    return names + [f"bottom_mlp.{i}.{kind}" for i, kind in itertools.product(bottom, ("weight", "bias"))]
