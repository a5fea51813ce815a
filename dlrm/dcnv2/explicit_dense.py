"""The dense network with an explicit backward, on flat buffers.

Equal to autograd over dlrm.dcnv2.network.DenseNetwork. With an explicit backward, the caller decides when weight
gradients are computed: the chain that the embeddings wait for comes first; weight gradients run beside it or beside
later work.

Weights and gradients are in flat buckets: top MLP, cross network, bottom MLP, in the order in which gradients become
ready. The update of the first two is sharded (the optimizer sharding of ZeRO, Rajbhandari et al. 2020): a
reduce-scatter gives each rank the summed gradient of its slice of a bucket, only that rank keeps the slice's master
weights and Adagrad state, and an all-gather distributes the new weights. The two collectives move as many bytes as one
all-reduce, and the update costs a rank 1 / world_size of the memory traffic. The small bottom MLP is updated whole on
every rank.

With peer memory one kernel does all three. There an additional exchange costs little: each cross layer is a bucket,
and the bottom MLP's update is sharded too. For small batches, whose exchanges take longer than the backward that
precedes them, the top MLP's first layer, which has most of the weights, is a separate bucket.
"""

import torch
from torch import Tensor

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.dcnv2.concurrency import bucket_gradients
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.network import DenseNetwork
from dlrm_bench.dlrm.dense.buckets import Bucket, CollectiveBucket, DenseState, NodeBucket, PeerBucket
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.dense import cross, fused_cross, loss, mlp, small_mlp
from dlrm_bench.kernels.dense.column_sums import column_sums

# The bottom MLP's input is padded to a multiple of this: cuBLAS chooses kernels several times slower if rows are not
# 16-byte aligned.
_PAD = 16

LOSSES_KEPT = 1 << 20
"""Number of iterations after which the slot of a mean loss is reused; 4 MB."""


class ExplicitDense:
    """Forward, backward and update of the dense network at one fixed local batch size.

    `x0` [batch, (features + 1) * dim] is the interaction's input: `bottom_forward` fills its first dim columns, the
    caller the pooled vectors after them. `dx0`, of the same shape, is its gradient.

    The chain from x0 to dx0 can run in `parts`, equal ranges of rows, each in the order of the methods below, in
    parallel or in sequence; weight gradients of the whole batch come after all parts.
    """

    in_eight_bits = False
    """Whether some products have 8-bit factors: `copy_weights` must then run before the first forward after each
    update."""

    def __init__(
        self,
        model: ModelConfig,
        seed: int,
        shape: BatchShape,
        ranks: Ranks,
        memory: PeerMemory | None = None,
    ) -> None:
        """Collective.

        memory: for the update and, on one node, for x0, to which the owner ranks then write pooled vectors.
        """
        self.model, self.shape = model, shape
        # Other nodes cannot write to x0: their pooled vectors come by a collective.
        self._memory = memory if ranks.nodes == 1 else None
        self.global_batch_size = shape.samples * ranks.world_size
        dtype = shape.dtype
        self._padded = -(-model.dense_in_features // _PAD) * _PAD
        network = DenseNetwork(model)
        network.init_weights(seed)
        weights = network.state_dict()
        weights["bottom_mlp.0.weight"] = self._pad(weights["bottom_mlp.0.weight"])

        def bucket(part: str, layers: tuple[int, ...], sharded: bool = True) -> Bucket:
            names = tuple(f"{part}.{layer}." for layer in layers)
            members = {name: value for name, value in weights.items() if name.startswith(names)}
            if memory is None:
                return CollectiveBucket(members, dtype, ranks, sharded)
            if across is None:
                return PeerBucket(bucket_gradients(names[0]), members, dtype, ranks, memory)
            return NodeBucket(bucket_gradients(names[0]), members, dtype, ranks, memory, across)

        def buckets(part: str, *groups: range) -> dict[tuple[int, ...], Bucket]:
            apart = groups if memory else [range(groups[-1].stop)]
            return {tuple(layers): bucket(part, tuple(layers)) for layers in apart if layers}

        # Without peer memory each bucket has its own process group: collectives of one group queue after one another.
        # Between nodes they would share the network anyway, and one group is set up faster than six.
        across = ranks.new_group_across_nodes() if memory and ranks.nodes > 1 else None
        layers, top = range(model.cross_layers), len(model.top_mlp)
        # Batches that run whole are small: 0.483 ms, not 0.501, at 512 samples a GPU; 2.918, not 2.903, at 6912.
        first = 1 if shape.parts == 1 else top
        self.top = buckets("top_mlp", range(first), range(first, top))
        self.cross = buckets("cross", *(range(layer, layer + 1) for layer in layers))
        """Buckets by the layers whose weights they hold."""
        self.bottom = bucket("bottom_mlp", tuple(range(len(model.bottom_mlp))), sharded=False)
        self.buckets = (*self.top.values(), *self.cross.values(), self.bottom)
        self.working = {name: bucket.view(bucket.working, name) for bucket in self.buckets for name in bucket.starts}
        self.grad = {name: bucket.view(bucket.grad, name) for bucket in self.buckets for name in bucket.starts}
        self.tallies = Tallies(self._rounded(), ranks.device)
        """Tallies of the updates' gradients, and of tensors rounded to 8 bits."""
        self._rows = shape.rows
        self._make_buffers(ranks.device)

    def _rounded(self) -> list[str]:
        """Returns the names of the 8-bit tensors."""
        return []

    def _make_buffers(self, device: torch.device) -> None:
        """Allocates activations and their gradients for whole batches; most of the bottom MLP's, which are small, are
        temporary."""

        def matrices(*columns: int) -> list[Tensor]:
            return [torch.zeros(samples, n, dtype=dtype, device=device) for n in columns]

        samples, dtype = self.shape.samples, self.shape.dtype
        model, layers = self.model, self.model.cross_layers
        width = (model.num_features + 1) * model.embedding_dim
        self.x0s = self._memory.zeros(samples, width, dtype=dtype) if self._memory else None
        """x0 of all ranks, in peer memory."""
        self.x0 = self.x0s.own if self.x0s else matrices(width)[0]
        (self.dx0,) = matrices(width)
        self._x = [self.x0, *matrices(*[width] * layers)]
        self._u, self._du = (matrices(*[model.cross_rank] * layers) for _ in range(2))
        self._y = matrices(*[width] * layers)
        # Gradients of the layers' outputs, and of y. The fused kernels keep all of them, because the first layer sums
        # up x0's gradient; otherwise the former share a buffer, and the latter overwrite y.
        self._fused = self._is_fused(width, device)
        self._dx = matrices(*[width] * layers) if self._fused else matrices(width) * layers
        self._dy = matrices(*[width] * layers) if self._fused else self._y
        # Inputs of the top MLP's layers; their gradients, those before their ReLU, and those of the logits.
        self._top = [self._x[-1], *matrices(*model.top_mlp[:-1])]
        self._dz_top = [self._dx[-1], *matrices(*model.top_mlp)]
        (self._dense,) = matrices(self._padded)
        self._small = small_mlp.applies(model.bottom_mlp, self._padded, dtype)
        self._bottom = [self._dense, *matrices(*model.bottom_mlp)] if self._small else []
        """The inputs of the bottom MLP's layers, and its output."""
        self._make_partial_sums(device)

    def _is_fused(self, width: int, device: torch.device) -> bool:
        shape = self.shape
        return fused_cross.applies(shape.part_samples, width, self.model.cross_rank, shape.dtype, device)

    def _make_partial_sums(self, device: torch.device) -> None:
        """Allocates partial sums of the bias gradients and of the loss: they are added up with the weight gradients, so
        that the chain to dx0 does not wait for it."""
        model, parts, last = self.model, self.shape.parts, len(self.model.top_mlp) - 1
        rows = self.shape.part_samples

        def zeros(rows: int, columns: int, parts: int = parts) -> Tensor:
            return torch.zeros(parts, rows, columns, device=device)

        width = self.x0.shape[1]
        # By layer: [part, rows, width].
        self._partials = {}
        for i in range(model.cross_layers):
            fused = self._fused and i < model.cross_layers - 1
            count = fused_cross.partial_rows(rows, width, device) if fused else cross.partial_rows(rows)
            self._partials[f"cross.{i}"] = zeros(count, width)
        for i, width in enumerate(model.top_mlp[: max(last - 1, 0)]):
            self._partials[f"top_mlp.{i}"] = zeros(mlp.partial_rows(rows), width)
        for i, width in enumerate(model.bottom_mlp):
            self._partials[f"bottom_mlp.{i}"] = zeros(mlp.partial_rows(self.shape.samples), width, parts=1)
        columns = loss.partial_columns(self._top[last].shape[1], relu=last > 0)
        self._loss_partials = zeros(loss.partial_rows(rows), columns)
        self.mean_losses = torch.zeros(LOSSES_KEPT, device=device)
        """A ring of means over the local batch; each `top_weight_gradients` of layer 0 adds the next one, at `step`."""
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.predictions: Tensor | None = None
        """Memory for the local batch's predictions, fp32 [batch], which `loss_backward` writes; None if nothing reads
        them."""

    @property
    def losses(self) -> Tensor:
        """Returns sums of the losses of groups of samples, fp32 [n] of any stride; valid after `loss_backward` of all
        parts."""
        return self._loss_partials.flatten(0, 1)[:, 0]

    def state_dict(self, which: DenseState = "master") -> dict[str, Tensor]:
        """Returns copies of the fp32 weights or of Adagrad's state, with DenseNetwork's names and shapes.
        Collective."""
        full = {name: value for bucket in self.buckets for name, value in bucket.full(getattr(bucket, which)).items()}
        full["bottom_mlp.0.weight"] = full["bottom_mlp.0.weight"][:, : self.model.dense_in_features].contiguous()
        return full

    def load_state_dict(self, values: dict[str, Tensor], which: DenseState = "master") -> None:
        """Loads the result of `state_dict(which)`, on any device, the same on every rank."""
        values = values | {"bottom_mlp.0.weight": self._pad(values["bottom_mlp.0.weight"])}
        for bucket in self.buckets:
            bucket.load(which, {name: values[name] for name in bucket.starts})

    def _pad(self, weight: Tensor) -> Tensor:
        padded = weight.new_zeros(weight.shape[0], self._padded)
        padded[:, : weight.shape[1]] = weight
        return padded

    def copy_weights(self) -> None:
        """Does nothing: products read the working weights."""

    def bottom_forward(self, dense: Tensor) -> None:
        """Computes the bottom MLP into x0. dense: fp32 [batch, dense_in_features]."""
        layers = [f"bottom_mlp.{i}" for i in range(len(self.model.bottom_mlp))]
        if self._small:
            out, parameters = self.x0[:, : self.model.embedding_dim], ("weight", "bias")
            weights, biases = ([self.working[f"{layer}.{name}"] for layer in layers] for name in parameters)
            small_mlp.small_mlp(dense, weights, biases, self._dense, self._bottom[1:], out)
            return
        self._dense[:, : self.model.dense_in_features].copy_(dense)
        self._bottom = [self._dense]
        for name in layers:
            weight, bias = self.working[f"{name}.weight"], self.working[f"{name}.bias"]
            self._bottom.append(torch._addmm_activation(bias, self._bottom[-1], weight.t()))
        self.x0[:, : self.model.embedding_dim].copy_(self._bottom[-1])

    def cross_forward(self, layer: int, part: int = 0) -> None:
        """Computes one layer of the cross network over x0, first layer first."""
        rows, v, w, bias = self._rows[part], *(self.working[f"cross.{layer}.{name}"] for name in ("v", "w", "bias"))
        x, u, y, out = (t[rows] for t in (self._x[layer], self._u[layer], self._y[layer], self._x[layer + 1]))
        torch.mm(x, v.t(), out=u)
        if self._fused:
            fused_cross.fused_cross_forward(self.x0[rows], x, u, w, bias, y, out)
        else:
            torch.mm(u, w.t(), out=y)
            cross.cross_forward(self.x0[rows], x, y, bias, out)

    def top_hidden_forward(self, part: int = 0) -> Tensor:
        """Returns the input of the top MLP's last layer, [rows of the part, its width]."""
        rows = self._rows[part]
        for layer in range(len(self.model.top_mlp) - 1):
            self._top_layer_forward(layer, rows)
        return self._top[-1][rows]

    def _top_layer_forward(self, layer: int, rows: slice) -> None:
        weight, bias = self.working[f"top_mlp.{layer}.weight"].t(), self.working[f"top_mlp.{layer}.bias"]
        # Unlike the public addmm and relu, which are two kernels, this has bias and ReLU in the GEMM's epilogue.
        torch._addmm_activation(bias, self._top[layer][rows], weight, out=self._top[layer + 1][rows])

    def top_forward(self, part: int = 0) -> Tensor:
        """Returns the logits, [rows of the part], in `dtype`, for passes without a loss."""
        last = f"top_mlp.{len(self.model.top_mlp) - 1}"
        weight, bias = self.working[f"{last}.weight"], self.working[f"{last}.bias"]
        return torch.addmm(bias, self.top_hidden_forward(part), weight.t()).view(-1)

    def loss_backward(self, hidden: Tensor, labels: Tensor, part: int = 0) -> None:
        """Computes the top MLP's last layer and the loss, forward and backward.

        The gradient is of the GLOBAL mean loss: weight gradients then only need a sum over ranks.

        hidden: the result of `top_hidden_forward`. labels: fp32 [rows of the part].
        """
        rows, last = self._rows[part], len(self.model.top_mlp) - 1
        weight, bias = self.working[f"top_mlp.{last}.weight"], self.working[f"top_mlp.{last}.bias"]
        dlogits, dz = self._dz_top[last + 1][rows].view(-1), self._dz_top[last][rows]
        partials, kept = self._loss_partials[part], self.predictions
        predictions = None if kept is None else kept[rows]
        # If there is only one layer, its input is the cross network's output, without a ReLU.
        relu = last > 0
        sizes = (self.global_batch_size, relu)
        loss.logit_loss_backward(hidden, weight, bias, labels, dlogits, dz, partials, *sizes, predictions)

    def top_backward(self, part: int = 0) -> None:
        """Computes the gradient of the cross network's output; keeps the inputs of `top_weight_gradients`."""
        for layer in range(len(self.model.top_mlp) - 2, -1, -1):
            self._top_layer_backward(layer, part)

    def _top_layer_backward(self, layer: int, part: int) -> None:
        rows = self._rows[part]
        dh = self._dz_top[layer][rows]
        torch.mm(self._dz_top[layer + 1][rows], self.working[f"top_mlp.{layer}.weight"], out=dh)
        if layer > 0:
            mlp.bias_relu_backward(dh, self._top[layer][rows], dh, self._partials[f"top_mlp.{layer - 1}"][part])

    def cross_backward(self, layer: int, part: int = 0) -> None:
        """Computes the backward of one cross layer, last layer first; keeps the inputs of its `cross_weight_gradients`.

        Gradients of x0 itself are accumulated in dx0; the first layer completes it.
        """
        rows, v, w, bias = self._rows[part], *(self.working[f"cross.{layer}.{name}"] for name in ("v", "w", "bias"))
        x0, dx0, dx, y, du = (t[rows] for t in (self.x0, self.dx0, self._dx[layer], self._y[layer], self._du[layer]))
        last, first = layer == self.model.cross_layers - 1, layer == 0
        if self._fused:
            self._fused_cross_backward(layer, part)
            return
        # Reads y, then overwrites it with its gradient.
        cross.cross_backward(dx, x0, y, bias, y, dx0, self._partials[f"cross.{layer}"][part], not last, first)
        torch.mm(y, w, out=du)
        (dx0 if first else dx).addmm_(du, v)

    def _fused_cross_backward(self, layer: int, part: int) -> None:
        """Computes the gradient of the previous layer's y, or, for the first layer, of x0."""
        rows, v, w = self._rows[part], *(self.working[f"cross.{layer}.{name}"] for name in ("v", "w"))
        x0, dx, dy, du = (t[rows] for t in (self.x0, self._dx[layer], self._dy[layer], self._du[layer]))
        if layer == self.model.cross_layers - 1:
            cross.cross_output_backward(dx, x0, dy, self._partials[f"cross.{layer}"][part])
        torch.mm(dy, w, out=du)
        if layer > 0:
            dx_before, dy_before = (t[layer - 1][rows] for t in (self._dx, self._dy))
            partials = self._partials[f"cross.{layer - 1}"][part]
            fused_cross.fused_cross_backward(dx, du, v, x0, dx_before, dy_before, partials)
        else:
            dxs, ys = ([t[rows] for t in tensors] for tensors in (self._dx, self._y))
            fused_cross.fused_cross_input_backward(dxs, ys, du, v, self.dx0[rows])

    def top_weight_gradients(self, layers: tuple[int, ...]) -> None:
        """Writes all gradients of these layers of the top MLP, and the loss, to `grad`, after their `top_backward`;
        layer 0 comes first."""
        last = len(self.model.top_mlp) - 1
        for i in layers:
            self._top_weight_gradient(i)
            if i < last - 1:
                self._bias_gradient(f"top_mlp.{i}")
        if 0 in layers:
            hidden = self.grad[f"top_mlp.{last - 1}.bias"] if last else None
            partials = self._loss_partials.flatten(0, 1)
            sums = (self.mean_losses, self.step, self.grad[f"top_mlp.{last}.bias"], hidden)
            loss.add_up(partials, *sums, len(self.x0))

    def _top_weight_gradient(self, layer: int) -> None:
        torch.mm(self._dz_top[layer + 1].t(), self._top[layer], out=self.grad[f"top_mlp.{layer}.weight"])

    def cross_weight_gradients(self, layer: int) -> None:
        """Writes all gradients of a layer to `grad`, after its `cross_backward`."""
        torch.mm(self._dy[layer].t(), self._u[layer], out=self.grad[f"cross.{layer}.w"])
        torch.mm(self._du[layer].t(), self._x[layer], out=self.grad[f"cross.{layer}.v"])
        self._bias_gradient(f"cross.{layer}")

    def _bias_gradient(self, layer: str) -> None:
        column_sums(self._partials[layer].flatten(0, 1), self.grad[f"{layer}.bias"])

    def bottom_backward(self) -> None:
        """Computes the bottom MLP's backward; keeps the inputs of `bottom_weight_gradient`."""
        dh = self.dx0[:, : self.model.embedding_dim]
        self._dz_bottom: dict[int, Tensor] = {}
        for i in reversed(range(len(self.model.bottom_mlp))):
            dz = self._dz_bottom[i] = torch.empty_like(self._bottom[i + 1])
            mlp.bias_relu_backward(dh, self._bottom[i + 1], dz, self._partials[f"bottom_mlp.{i}"][0])
            if i > 0:
                dh = torch.mm(dz, self.working[f"bottom_mlp.{i}.weight"])

    def bottom_weight_gradient(self, layer: int) -> None:
        """Writes all gradients of a layer of the bottom MLP to `grad`, after `bottom_backward`."""
        name = f"bottom_mlp.{layer}"
        torch.mm(self._dz_bottom[layer].t(), self._bottom[layer], out=self.grad[f"{name}.weight"])
        self._bias_gradient(name)
