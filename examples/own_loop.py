"""Prune inside a training loop of your own: two lines more.

python own_loop.py             # --quick: few images, one epoch
"""

import sys

import torch
from torch import nn

import harp

data = harp.load_data("digits")
quick = "--quick" in sys.argv
count = 200 if quick else len(data.train)
train = torch.utils.data.TensorDataset(data.train.images[:count].float() / 255, data.train.labels[:count])
loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True)
model = harp.build_model("tinynet", num_classes=10, shape=data.shape)
epochs = 1 if quick else 12


def loss_under_attack(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Your loss takes this place."""
    attacked = harp.Pgd(epsilon=0.1, steps=5)(model, x, y)
    return nn.functional.cross_entropy(model(attacked), y)


def train_for(epochs: int, optimizer: torch.optim.Optimizer, pruner: harp.Pruner | None = None) -> None:
    """An ordinary loop."""
    for epoch in range(epochs):
        for x, y in loader:
            loss = loss_under_attack(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if pruner is not None:
            pruner.after_epoch()  # the second line
        print(f"epoch {epoch + 1}, loss {loss.item():.3f}")


train_for(epochs, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
pruner = harp.Harp(harp.Weights(model), keep=0.02).attach(optimizer)  # the first line
train_for(epochs, optimizer, pruner)
masks = pruner.finish()

x, y = data.test.images[:].float() / 255, data.test.labels
print(f"{sum(int(mask.sum()) for mask in masks.values()):,} weights, natural {harp.accuracy(model, x, y).accuracy:.1%}")
