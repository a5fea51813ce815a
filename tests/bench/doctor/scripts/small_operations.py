"""Has a loop of small operations, whose gradient backward computes too, beside a layer; SMALL_OPERATIONS=0 leaves the
loop out. Prints milliseconds of an iteration."""

import os
import time

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Linear(256, 256).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
dense = torch.randn(256, 256, device=device)
scale = torch.nn.Parameter(torch.ones(1, device=device))
rows = range(24 if os.environ.get("SMALL_OPERATIONS", "1") == "1" else 0)

times = []
for _ in range(200):
    begin = time.perf_counter()
    hidden = model(dense)
    total = hidden.square().mean()
    for row in rows:
        total = total + hidden[row].sum() * (scale * row).sum()  # planted
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - begin)
print(f"{1000 * sorted(times)[len(times) // 2]:.4f}")
