"""A classifier with a transform that is a module, trained and validated as most scripts do it.

Counts the bytes of its parameters, the size of its batches, and its updates.
"""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH, EVALUATION_BATCH, EPOCHS = 8, 256, 2


class Normalize(nn.Module):
    def forward(self, image):
        return (image - 0.5) / 0.25


class Images(Dataset):
    def __init__(self, count):
        self.images = torch.rand(count, 64)
        self.transform = Normalize()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), index % 4


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    updates = 0
    for _ in range(EPOCHS):
        model.train()
        for image, label in DataLoader(Images(2 * BATCH), batch_size=BATCH):
            optimizer.zero_grad()
            criterion(model(image), label).backward()
            optimizer.step()
            updates += 1
        model.eval()
        with torch.no_grad():
            for image, label in DataLoader(Images(EVALUATION_BATCH), batch_size=EVALUATION_BATCH):
                criterion(model(image), label).item()
    size = sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps({"parameters": size, "batch": BATCH, "updates": updates}))


main()
