"""Compare two methods at one budget over three seeds: the same start, the same epochs, the same attack.

python compare.py              # --quick: one seed, few images, one epoch
"""

import statistics
import sys

import harp

quick = "--quick" in sys.argv
data = harp.load_data("digits")
train = data.train.select(range(200)) if quick else data.train
objective = harp.PgdTraining(epsilon=0.1, steps=5)
attack = harp.Pgd(epsilon=0.1, steps=20)
METHODS = {"tandem": harp.Tandem, "magnitude": harp.Magnitude}
found: dict[str, list[float]] = {name: [] for name in METHODS}

for seed in range(1 if quick else 3):
    batches = harp.Batches(train, 64, seed=seed, augment=harp.Augment(pad=1, flip=False))
    parent = harp.build_model("tinynet", num_classes=10, shape=data.shape)
    harp.fit(parent, batches, objective, harp.Dense(harp.Weights(parent)), epochs=1 if quick else 8, lr=0.05, seed=seed)
    harp.save_model("parent.safetensors", parent)
    for name, method in METHODS.items():
        model = harp.build_model("tinynet", num_classes=10, shape=data.shape)
        harp.load_weights(model, "parent.safetensors")
        units = harp.Weights(model)
        pruner = method(units, keep=0.01)
        harp.fit(model, batches, objective, pruner, epochs=1 if quick else 6, lr=0.05, seed=seed)
        fixed = harp.Fixed(units, pruner.masks())
        harp.fit(model, batches, objective, fixed, epochs=1 if quick else 8, lr=0.02, seed=seed)
        found[name].append(harp.accuracy(model, data.test.images[:200], data.test.labels[:200], attack=attack).accuracy)

for name, values in found.items():
    spread = f" ± {statistics.stdev(values):.1%} (standard deviation)" if len(values) > 1 else ""
    print(f"{name:10} {statistics.mean(values):.1%}{spread}, seeds: {', '.join(f'{value:.1%}' for value in values)}")
print("`harp compare digits --methods tandem,magnitude --keep 1%` does this with intervals, a table and a plot.")
