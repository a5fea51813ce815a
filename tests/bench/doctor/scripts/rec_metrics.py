"""Updates TorchRec's metrics in each iteration; --device-metrics puts DeviceRecMetrics in their place."""

import os
import sys

import torch
import torch.distributed as dist
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import MetricsConfig, RecMetricDef, RecMetricEnum, RecTaskInfo

BATCH = 512
cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
if not dist.is_initialized():
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
metric_class = RecMetricModule
if "--device-metrics" in sys.argv:
    from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics

    metric_class = DeviceRecMetrics
tasks = [RecTaskInfo("click", "click_label", "click_prediction", "weight")]
enums = (RecMetricEnum.NE, RecMetricEnum.CALIBRATION, RecMetricEnum.CTR, RecMetricEnum.MSE)
metrics = generate_metric_module(
    metric_class=metric_class,
    metrics_config=MetricsConfig(
        rec_tasks=tasks,
        rec_metrics={each: RecMetricDef(rec_tasks=tasks, window_size=8 * BATCH) for each in enums},
        should_validate_update=True,
    ),
    batch_size=BATCH,
    world_size=1,
    my_rank=0,
    state_metrics_mapping={},
    device=device,
)
torch.manual_seed(0)
model = torch.nn.Linear(16, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
features = torch.randn(BATCH, 16, device=device)
labels = torch.randint(0, 2, (BATCH,), device=device).double()
weight = torch.ones(BATCH, dtype=torch.float64, device=device)


for _ in range(int(os.environ.get("ITERATIONS", "300"))):
    logits = model(features)[:, 0].double()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    predictions = torch.sigmoid(logits.detach())
    metrics.update({"click_label": labels, "click_prediction": predictions, "weight": weight})  # planted
