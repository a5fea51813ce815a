"""Rank 1 stands still for 50 ms of each iteration; --gpu-work gives its GPU more to compute instead."""

import os
import sys
import time

import torch
import torch.distributed as dist

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
dense = torch.randn(64, 13, device=device)
labels = torch.randint(0, 2, (64, 1), device=device).float()
square = torch.randn(8192, 8192, device=device) if "--gpu-work" in sys.argv else None


def read():
    if dist.get_rank() == 1 and square is None:
        time.sleep(0.05)  # planted
    elif dist.get_rank() == 1:
        square @ square
    return dense


for _ in range(100):
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(read()), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
