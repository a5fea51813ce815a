"""A training loop with metrics: TorchRec's RecMetricModule and DeviceRecMetrics, which give the same values.

PYTHONPATH=. torchrun --nproc_per_node 2 examples/device_metrics.py

It runs with or without GPUs. In your own script, change two lines: the import, and metric_class. PYTHONPATH is only
needed in a checkout, not for an installed package.
"""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import MetricsConfig, RecMetricDef, RecMetricEnum, RecTaskInfo

from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics

BATCH, ITERATIONS, EVERY = 512, 60, 20
METRICS = (
    RecMetricEnum.NE,
    RecMetricEnum.CALIBRATION,
    RecMetricEnum.CTR,
    RecMetricEnum.MSE,
    RecMetricEnum.ACCURACY,
    RecMetricEnum.AUC,
)

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
rank, world_size = dist.get_rank(), dist.get_world_size()

tasks = [RecTaskInfo(name, f"{name}_label", f"{name}_prediction", "weight") for name in ("click", "conversion")]
config = MetricsConfig(
    rec_tasks=tasks,
    rec_metrics={metric: RecMetricDef(rec_tasks=tasks, window_size=8 * BATCH * world_size) for metric in METRICS},
)


def metrics_of(metric_class: type[RecMetricModule]) -> RecMetricModule:
    # TorchRec extends the arguments in the definitions that it is given, so each module gets its own copy.
    own = {metric: replace(definition, arguments={}) for metric, definition in config.rec_metrics.items()}
    return generate_metric_module(
        metric_class=metric_class,
        metrics_config=replace(config, rec_metrics=own),
        batch_size=BATCH,
        world_size=world_size,
        my_rank=rank,
        state_metrics_mapping={},
        device=device,
    )


torchrec_metrics, device_metrics = metrics_of(RecMetricModule), metrics_of(DeviceRecMetrics)
torch.manual_seed(1)  # the same model on all ranks
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, len(tasks)).to(device))
truth = torch.randn(16, len(tasks), device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
torch.manual_seed(2 + rank)

largest = 0.0
for iteration in range(1, ITERATIONS + 1):
    features = torch.randn(BATCH, 16, device=device)
    labels = (torch.rand(BATCH, len(tasks), device=device) < torch.sigmoid(features @ truth - 1)).float()
    weight = (torch.rand(BATCH, device=device) < 0.8).float()
    logits = model(features)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, weight[:, None])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model_out = {"weight": weight.double()}  # in float64, TorchRec's sums are as exact
    for place, task in enumerate(tasks):
        model_out[task.label_name] = labels[:, place].double()
        model_out[task.prediction_name] = torch.sigmoid(logits[:, place].detach()).double()
    device_metrics.update(model_out)
    torchrec_metrics.update(model_out)  # after ours: its NE clamps float64 predictions in place
    if iteration % EVERY == 0:
        pending = device_metrics.compute_async()  # training could continue here
        expected, values = torchrec_metrics.compute(), pending.result()
        assert set(values) == set(expected), "the same keys"
        if rank == 0:
            print(f"iteration {iteration}")
        for key, value in expected.items():
            theirs, ours = value.item(), values[key].item()
            difference = abs(theirs - ours) / abs(theirs)
            largest = max(largest, difference)
            print(f"  {key:44} {theirs:.15f}  {ours:.15f}  {difference:.1e}")
if rank == 0:
    print(f"largest relative difference {largest:.1e}")
dist.destroy_process_group()
