"""A plain TorchRec training script under the five-stage pipeline, or with --stock under TorchRec's own.

PYTHONPATH=. torchrun --nproc_per_node 2 examples/torchrec_script.py [--stock]

It runs with or without GPUs, and prints the same losses both ways; without a GPU, all switches of the pipeline are off.
PYTHONPATH is only needed in a checkout, not for an installed package.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_bench.pipeline.five_stage import FiveStageOptions, FiveStagePipeline

# Warnings of TorchRec and torch about their own code would hide those about this script.
warnings.simplefilter("ignore", FutureWarning)
for library in ("torchrec", "torch.fx", *([] if torch.cuda.is_available() else ["dlrm_bench"])):
    logging.getLogger(library).setLevel(logging.ERROR)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--stock", action="store_true", help="train under TorchRec's TrainPipelineSparseDist")
stock = parser.parse_args().stock
cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)  # for object collectives, which TorchRec's planner uses
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


def batches(count: int, size: int = 32) -> Iterator[Batch]:
    """Yields random batches with bags of up to three ids."""
    for _ in range(count):
        lengths = torch.randint(0, 4, (len(names) * size,), dtype=torch.int32)
        features = KeyedJaggedTensor(names, torch.randint(0, 1000, (int(lengths.sum()),)), lengths=lengths)
        yield Batch(torch.randn(size, 13), features, torch.randint(0, 2, (size,)))


if stock:
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
else:
    pipeline = FiveStagePipeline(model, optimizer, device, FiveStageOptions(cuda_graph="dense"))

stream = batches(100)
while True:
    try:
        loss, logits, labels = pipeline.progress(stream)
    except StopIteration:
        break
print(f"rank {dist.get_rank()}: {loss.item():.6f}")
if not stock:
    pipeline.close()  # before the process group is destroyed: NCCL waits for graphs with its collectives
dist.destroy_process_group()
