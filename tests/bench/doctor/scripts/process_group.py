"""Makes a process group for each iteration's all-reduce."""

import torch
import torch.distributed as dist

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
dense = torch.randn(64, 13, device=device)
labels = torch.randint(0, 2, (64, 1), device=device).float()
dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)


for _ in range(100):
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense), labels)
    loss.backward()
    group = dist.new_group([0])  # planted
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    optimizer.step()
    optimizer.zero_grad()
