"""DLRM-DCNv2 on TorchRec's modules, as in the MLPerf reference: DLRM_DCN, the true pooling factors for the planner,
torch.optim.Adagrad for the dense weights. See mlcommons/training, recommendation_v2/torchrec_dlrm/dlrm_main.py.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain

from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.data.in_place import empty_like, fill_on
from dlrm_bench.dlrm.dcnv2.config import ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.network import DenseNetwork
from dlrm_bench.dlrm.dcnv2.state_keys import TABLE_PREFIX, torchrec_names
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.torchrec_model import DeclaredSizes, TorchRecModel


def torchrec_model(config: TrainingConfig, ranks: Ranks) -> TorchRecModel:
    """Returns DLRMTrain(DLRM_DCN) with the initial dense weights of our DenseNetwork. ValueError for a top MLP of one
    layer."""
    model, optimizer, pin = config.model, config.optimizer, ranks.device.type == "cuda"
    assert isinstance(model, ModelConfig)
    assert isinstance(optimizer, OptimizerConfig)
    require(
        len(model.top_mlp) > 1,
        f"--model.top-mlp {model.top_mlp[0]}: TorchRec's DLRM needs at least two layers: add one, or choose --pipeline "
        "static",
    )
    unsharded = build_unsharded(model, config.seed, ranks.device)
    sizes = dict(zip(model.feature_names, model.multi_hot_sizes, strict=True))

    def zeros() -> Batch:
        batch = Batch.empty(config.local_batch_size, model, pin)
        batch.storage.zero_()
        return batch

    return TorchRecModel(
        module=DLRMTrain(unsharded),
        prefix="model.",
        table_prefix=TABLE_PREFIX,
        batch=FixedSizes(model, config.local_batch_size, pin).batch,
        zeros=zeros,
        dense_optimizer=partial(_adagrad, lr=optimizer.learning_rate, eps=optimizer.eps),
        dense_states={"sum": ""},
        dense_updates_tables=optimizer.embedding == "adagrad",
        constraints={
            TABLE_PREFIX + name: ParameterConstraints(pooling_factors=[float(size)]) for name, size in sizes.items()
        },
        sizes=DeclaredSizes(bags=sizes),
        compiled=(unsharded.dense_arch, unsharded.inter_arch, unsharded.over_arch),
    )


def build_unsharded(model: ModelConfig, seed: int, device: torch.device) -> DLRM_DCN:
    """Returns TorchRec's DLRM_DCN, with tables on the meta device and the initial dense weights of our DenseNetwork."""
    tables = [
        EmbeddingBagConfig(
            name=TABLE_PREFIX + name, embedding_dim=model.embedding_dim, num_embeddings=rows, feature_names=[name]
        )
        for name, rows in zip(model.feature_names, model.rows, strict=True)
    ]
    dlrm = DLRM_DCN(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=model.dense_in_features,
        dense_arch_layer_sizes=list(model.bottom_mlp),
        over_arch_layer_sizes=list(model.top_mlp),
        dcn_num_layers=model.cross_layers,
        dcn_low_rank_dim=model.cross_rank,
        dense_device=device,
    )
    dense = DenseNetwork(model)
    dense.init_weights(seed)
    theirs = torchrec_names(model)
    result = dlrm.load_state_dict({theirs[name]: value for name, value in dense.state_dict().items()}, strict=False)
    assert not result.unexpected_keys
    assert all("embedding_bags" in key for key in result.missing_keys)
    return dlrm


def _adagrad(
    parameters: list[nn.Parameter], skip: Callable[[], Tensor], lr: float, eps: float
) -> torch.optim.Optimizer:
    """Returns Adagrad. skip: not needed, because zero gradients change nothing."""
    return torch.optim.Adagrad(parameters, lr=lr, eps=eps)


class FixedSizes:
    """The parts of a KJT shared by every batch of fixed multi-hot sizes, computed once as in the reference."""

    def __init__(self, model: ModelConfig, batch_size: int, pin: bool) -> None:
        sizes = torch.tensor(model.multi_hot_sizes, dtype=torch.int32)
        self.keys = list(model.feature_names)
        self.stride = batch_size
        self.lengths = sizes.repeat_interleave(batch_size)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        if pin:
            self.lengths, self.offsets = self.lengths.pin_memory(), self.offsets.pin_memory()
        self.length_per_key = [batch_size * size for size in model.multi_hot_sizes]
        self.offset_per_key = [0, *torch.tensor(self.length_per_key).cumsum(0).tolist()]

    def batch(self, batch: Batch) -> TorchRecBatch:
        """Returns a torchrec Batch over the memory of `batch`."""
        sparse = KeyedJaggedTensor(
            keys=self.keys,
            values=batch.ids,
            lengths=self.lengths,
            offsets=self.offsets,
            stride=self.stride,
            length_per_key=self.length_per_key,
            offset_per_key=self.offset_per_key,
        )
        return InPlaceBatch(dense_features=batch.dense, sparse_features=sparse, labels=batch.labels)


class InPlaceBatch(TorchRecBatch):
    """A torchrec Batch that supports in-place copies: TorchRec's own Batch has no `data_copy_stream`."""

    def to(
        self, device: torch.device, non_blocking: bool = False, data_copy_stream: torch.cuda.Stream | None = None
    ) -> TorchRecBatch:
        """Returns a copy on `device`; with `data_copy_stream`, in the current stream's memory but copied on that
        one."""
        if data_copy_stream is None:
            return super().to(device, non_blocking)
        sources = (self.dense_features, self.sparse_features, self.labels)
        dense, sparse, labels = (empty_like(part, device) for part in sources)
        fill_on(data_copy_stream, device, (dense, sparse, labels), sources, non_blocking)
        return InPlaceBatch(dense_features=dense, sparse_features=sparse, labels=labels)
