"""Sorts numbers in Python in each iteration."""

import random

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
dense = torch.randn(64, 13, device=device)
labels = torch.randint(0, 2, (64, 1), device=device).float()
numbers = [random.random() for _ in range(40_000)]


for _ in range(150):
    order = sorted(range(len(numbers)), key=numbers.__getitem__)  # planted
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
