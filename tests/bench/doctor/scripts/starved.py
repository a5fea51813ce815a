"""Has one worker that takes 40 ms for a batch, longer than the loop does on a busy machine too."""

import time

import torch
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
labels = torch.randint(0, 2, (64, 1), device=device).float()


class Slow(Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, i):
        time.sleep(0.04)
        return torch.full((64, 13), float(i))


for batch in DataLoader(Slow(), batch_size=None, num_workers=1, pin_memory=device.type == "cuda"):  # planted
    dense = batch.to(device, non_blocking=True)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
