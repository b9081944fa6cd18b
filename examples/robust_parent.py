"""Start from a checkpoint that somebody else trained: what is inside must fit, or nothing is loaded.

python robust_parent.py        # --quick: few images, one epoch
"""

import sys

import torch

import harp

quick = "--quick" in sys.argv
data = harp.load_data("digits")
train = data.train.select(range(200)) if quick else data.train
batches = harp.Batches(train, 64, seed=0, augment=harp.Augment(pad=1, flip=False))
objective = harp.Trades(epsilon=0.1, steps=5)

# Somebody else's training. Checkpoints of data-parallel training have names such as `module.features.0.weight`.
parent = harp.build_model("tinynet", num_classes=10, shape=data.shape)
harp.fit(parent, batches, objective, harp.Dense(harp.Weights(parent)), epochs=1 if quick else 15, lr=0.05)
torch.save({"state_dict": {f"module.{name}": value for name, value in parent.state_dict().items()}}, "parent.pt")

# Yours.
model = harp.build_model("tinynet", num_classes=10, shape=data.shape)
harp.load_weights(model, "parent.pt")
attack = harp.Pgd(epsilon=0.1, steps=20)
x, y = data.test.images[:100], data.test.labels[:100]
before = harp.accuracy(model, x, y, attack=attack)

units = harp.Weights(model)
pruner = harp.Tandem(units, keep=0.02)
harp.fit(model, batches, objective, pruner, epochs=1 if quick else 8, lr=0.05)
harp.fit(model, batches, objective, harp.Fixed(units, pruner.masks()), epochs=1 if quick else 12, lr=0.02)
after = harp.accuracy(model, x, y, attack=attack)
kept = f"{units.total(0.02):,} of {units.size:,} weights"
print(f"under PGD: {before.accuracy:.1%} with all weights, {after.accuracy:.1%} with {kept}")
