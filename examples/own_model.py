"""Prune a network of your own on images of your own, under attack.

python own_model.py            # --quick: few images, one epoch
"""

import sys

import torch
from torch import nn

import harp


def images_of_squares(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Your images take this place: float32 from 0 to 1, (n, channels, height, width), and labels from 0."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.2 * torch.rand(n, 1, 16, 16, generator=generator)
    y = torch.randint(4, (n,), generator=generator)
    for image, label in zip(x, y.tolist(), strict=True):
        row, column = 8 * (label // 2), 8 * (label % 2)
        image[0, row + 2 : row + 6, column + 2 : column + 6] += 0.25
    return x, y


model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(32 * 16, 4),
)
epochs = 1 if "--quick" in sys.argv else 10
train = torch.utils.data.TensorDataset(*images_of_squares(200 if epochs == 1 else 2000, seed=0))
batches = torch.utils.data.DataLoader(train, batch_size=50, shuffle=True)

units = harp.Weights(model)
objective = harp.PgdTraining(epsilon=0.1, steps=5)
harp.fit(model, batches, objective, harp.Dense(units), epochs=epochs, lr=0.05)
pruner = harp.Tandem(units, keep=0.02)
harp.fit(model, batches, objective, pruner, epochs=epochs, lr=0.05)
harp.fit(model, batches, objective, harp.Fixed(units, pruner.masks()), epochs=epochs, lr=0.02)

x, y = images_of_squares(500, seed=1)
natural, robust = harp.accuracy(model, x, y), harp.accuracy(model, x, y, attack=harp.Pgd(epsilon=0.1, steps=20))
kept = sum(int(mask.sum()) for mask in pruner.masks().values())
print(f"{kept:,} of {units.size:,} weights: natural {natural.accuracy:.1%}, under PGD {robust.accuracy:.1%}")
harp.save_model("own_model.safetensors", model)
