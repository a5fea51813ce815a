"""Trains stock TorchRec's DLRM_DCN with MLPerf's 26 tables, some of them split by rows, on batches in pinned memory.

--drop-in puts our pipeline and sharder in the place of TorchRec's; tables are then whole, as the sharder needs them.
--rows N shortens tables, --batch N is the local batch.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

flags = argparse.ArgumentParser()
flags.add_argument("--drop-in", action="store_true")
flags.add_argument("--whole", action="store_true", help="split no table by rows")
flags.add_argument("--rows", type=int, default=2_000_000)
flags.add_argument("--batch", type=int, default=512)
flags = flags.parse_args()

# fmt: off
ROWS = [40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
        14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36]
HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
# fmt: on
cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
torch.manual_seed(dist.get_rank())
torch.set_float32_matmul_precision("high")

names = [f"f{i}" for i in range(26)]
rows = [min(count, flags.rows) for count in ROWS]
tables = [
    EmbeddingBagConfig(num_embeddings=n, embedding_dim=128, name=f"t_{f}", feature_names=[f])
    for f, n in zip(names, rows, strict=True)
]
ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
dlrm = DLRM_DCN(
    ebc, 13, [512, 256, 128], [1024, 1024, 512, 256, 1], dcn_num_layers=3, dcn_low_rank_dim=512, dense_device=device
)
apply_optimizer_in_backward(torch.optim.Adagrad, dlrm.sparse_arch.parameters(), {"lr": 0.004, "eps": 1e-8})
split = cuda and not (flags.whole or flags.drop_in)  # TorchRec's planner splits by rows on GPUs alone
ways = {t.name: ["row_wise" if split and t.num_embeddings > 1_000_000 else "table_wise"] for t in tables}
sharder = EmbeddingBagCollectionSharder()
if flags.drop_in:
    from dlrm_bench.pipeline.five_stage import FiveStageOptions, FiveStagePipeline, TrimmedEBCSharder

    sharder = TrimmedEBCSharder(dict(zip(names, HOT, strict=True)), cuda_graph=True)
planner = EmbeddingShardingPlanner(
    topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
    constraints={name: ParameterConstraints(sharding_types=types) for name, types in ways.items()},
)
train = DLRMTrain(dlrm)
plan = planner.collective_plan(train, [sharder], dist.GroupMember.WORLD)
model = DistributedModelParallel(train, device=device, plan=plan, sharders=[sharder])
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
dense_optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.004))
optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])


def batch(size: int) -> Batch:
    ids = [torch.randint(0, n, (size * hot,)) for n, hot in zip(rows, HOT, strict=True)]
    lengths = torch.tensor(HOT, dtype=torch.int32).repeat_interleave(size)
    features = KeyedJaggedTensor(names, torch.cat(ids), lengths=lengths)
    made = Batch(torch.randn(size, 13), features, torch.randint(0, 2, (size,)))
    return made.pin_memory() if cuda else made


def forever():
    ready = [batch(flags.batch) for _ in range(4)]
    while True:
        yield from ready


if flags.drop_in:
    pipeline = FiveStagePipeline(model, optimizer, device, FiveStageOptions(cuda_graph="dense" if cuda else "none"))
else:
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

stream = forever()
for _ in range(200):
    loss, logits, labels = pipeline.progress(stream)
print(f"rank {dist.get_rank()}: {loss.item():.6f}")
if flags.drop_in:
    pipeline.close()
dist.destroy_process_group()
