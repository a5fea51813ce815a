"""Sleeps for 30 ms where a batch would be read."""

import time

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
dense = torch.randn(64, 13, device=device)
labels = torch.randint(0, 2, (64, 1), device=device).float()


def read():
    time.sleep(0.03)  # planted
    return dense


for _ in range(100):
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(read()), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
