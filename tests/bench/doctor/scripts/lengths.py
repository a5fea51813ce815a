"""Reads the lengths of bags into a list in each iteration."""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
labels = torch.randint(0, 2, (64, 1), device=device).float()
lengths = torch.ones(64, dtype=torch.int64, device=device)
values = torch.randn(64, 13, device=device)


for _ in range(100):
    splits = lengths.view(8, 8).sum(1).tolist()  # planted
    dense = values.split(splits)[0].mean(0, keepdim=True).expand(64, 13)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
