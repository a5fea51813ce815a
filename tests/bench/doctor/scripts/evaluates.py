"""Evaluates after every 7th iteration, for 15 ms of CPU time: on a busy machine it goes on for as long."""

import time

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
dense = torch.randn(64, 13, device=device)
labels = torch.randint(0, 2, (64, 1), device=device).float()


def evaluate():
    end = time.thread_time() + 0.015
    while time.thread_time() < end:
        with torch.no_grad():
            model(dense)


for iteration in range(200):
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if iteration % 7 == 0:
        evaluate()  # planted
