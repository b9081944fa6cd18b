"""Prune networks that do not classify images: a segmentation network, and one with two inputs and dict batches.

    python examples/other_tasks.py

The data are drawn at random. What is needed for data of your own is an objective: the loss of a batch, what the model
is called with (`split`, unless a batch is a pair), and what an epoch is judged by (`measure`).
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import harp


class Segmenter(nn.Module):
    """An encoder and a decoder with a skip connection."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.up, self.head = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 2, 1)

    def forward(self, x):
        fine = self.first(x)
        return self.head(torch.cat([fine, self.up(self.down(fine))], dim=1))


class PixelClasses(harp.Objective):
    """A class for each pixel, from pairs of images and maps of labels."""

    def __call__(self, model, x, y, forward=None):
        return F.cross_entropy((forward or model)(x), y)

    def measure(self, model, x, y):
        return {"pixels": (model(x).argmax(1) == y).float().mean()}


class TwoInputs(nn.Module):
    """An image and a row of numbers."""

    def __init__(self):
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.read = nn.Sequential(nn.Linear(5, 32), nn.ReLU())
        self.head = nn.Linear(96, 1)

    def forward(self, image, facts):
        return self.head(torch.cat([self.look(image), self.read(facts)], dim=1))[:, 0]


class Prices(harp.Objective):
    """A number from a dict; a smaller error is better, so its negative is measured."""

    def split(self, batch):
        return {"image": batch["image"], "facts": batch["facts"]}, batch["price"]

    def __call__(self, model, x, y, forward=None):
        return F.mse_loss((forward or model)(**x), y)

    def measure(self, model, x, y):
        return {"negative error": -F.mse_loss(model(**x), y)}


def pruned(model, data, objective, select):
    """Prune to a tenth of the weights, fine-tune what is left, and say how it went."""
    train, held_out = DataLoader(data[:96], 32, shuffle=True), DataLoader(data[96:], 32)
    settings = {"lr": 0.02, "validate": held_out, "select": select}
    units = harp.Weights(model)
    harp.fit(model, train, objective, harp.Dense(units), epochs=4, **settings)
    masks = harp.fit(model, train, objective, harp.Harp(units, keep=0.1), epochs=2, **settings).masks
    fitted = harp.fit(model, train, objective, harp.Fixed(units, masks), epochs=2, **settings)
    kept = sum(int(mask.sum()) for mask in masks.values())
    best = fitted.history[fitted.epoch - 1][select]
    print(f"{type(model).__name__}: {kept} of {sum(units.sizes)} weights, {select} {best:.3g}")


def main():
    torch.manual_seed(0)
    images, facts = torch.rand(128, 3, 16, 16), torch.randn(128, 5)
    maps = (F.avg_pool2d(images.mean(1, keepdim=True), 3, 1, 1)[:, 0] > 0.5).long()
    pruned(Segmenter(), list(zip(images, maps, strict=True)), PixelClasses(), "pixels")
    keys = ("image", "facts", "price")
    rows = zip(images, facts, facts[:, 0] + images.mean((1, 2, 3)), strict=True)
    pruned(TwoInputs(), [dict(zip(keys, row, strict=True)) for row in rows], Prices(), "negative error")


if __name__ == "__main__":
    main()
