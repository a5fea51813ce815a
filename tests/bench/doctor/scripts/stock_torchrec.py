"""Trains stock TorchRec's DLRM_DCN on random batches, as the example of the README does before its two lines."""

import os

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)  # for collectives of objects, which TorchRec's planner makes
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
torch.manual_seed(dist.get_rank())

names = [f"f{i}" for i in range(8)]
tables = [EmbeddingBagConfig(num_embeddings=1000, embedding_dim=16, name=f"t_{f}", feature_names=[f]) for f in names]
ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
dlrm = DLRM_DCN(ebc, 13, [64, 16], [64, 1], dcn_num_layers=2, dcn_low_rank_dim=16, dense_device=device)
apply_optimizer_in_backward(torch.optim.SGD, dlrm.sparse_arch.parameters(), {"lr": 0.1})
model = DistributedModelParallel(DLRMTrain(dlrm), device=device)
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
dense_optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])


def batches(count: int, size: int = 32):
    for _ in range(count):
        lengths = torch.randint(0, 4, (len(names) * size,), dtype=torch.int32)
        features = KeyedJaggedTensor(names, torch.randint(0, 1000, (int(lengths.sum()),)), lengths=lengths)
        yield Batch(torch.randn(size, 13), features, torch.randint(0, 2, (size,)))


pipeline = TrainPipelineSparseDist(model, optimizer, device)

stream = batches(100)
while True:
    try:
        loss, logits, labels = pipeline.progress(stream)
    except StopIteration:
        break
print(f"rank {dist.get_rank()}: {loss.item():.6f}")

dist.destroy_process_group()
