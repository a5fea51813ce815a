"""Updates its many parameters one after the other."""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
layers = [torch.nn.Linear(13, 32), *(torch.nn.Linear(32, 32) for _ in range(10)), torch.nn.Linear(32, 1)]
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, foreach=False)
dense = torch.randn(64, 13, device=device)
labels = torch.randint(0, 2, (64, 1), device=device).float()


for _ in range(100):
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense), labels)
    loss.backward()
    optimizer.step()  # planted
    optimizer.zero_grad()
