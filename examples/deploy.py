"""Export a pruned network to a small file, run the file without torch, and attack it.

python deploy.py               # --quick: few images, one epoch
"""

import subprocess
import sys
from pathlib import Path

import harp

quick = "--quick" in sys.argv
epochs = 1 if quick else 8
data = harp.load_data("digits")
train = data.train.select(range(200)) if quick else data.train
batches = harp.Batches(train, 64, seed=0, augment=harp.Augment(pad=1, flip=False))
objective = harp.PgdTraining(epsilon=0.1, steps=5)
model = harp.build_model("tinynet", num_classes=10, shape=data.shape)
units = harp.Weights(model)
harp.fit(model, batches, objective, harp.Dense(units), epochs=epochs, lr=0.05)
pruner = harp.Tandem(units, keep=0.02)
harp.fit(model, batches, objective, pruner, epochs=epochs, lr=0.05)
harp.fit(model, batches, objective, harp.Fixed(units, pruner.masks()), epochs=epochs, lr=0.02)

harp.export(model, to="sparse", folder="deployed", shape=data.shape)
dense = sum(value.numel() * value.element_size() for value in model.state_dict().values())
print(f"deployed/network.harp has {Path('deployed/network.harp').stat().st_size:,} bytes; dense tensors {dense:,}")

# Another process, which loads no torch.
answer = """
import sys, numpy, harp
network = harp.load("deployed/network.harp")
images = numpy.random.default_rng(0).random((3, 1, 8, 8), dtype=numpy.float32)
print("classes", network(images).argmax(axis=1), "torch was loaded:", "torch" in sys.modules)
"""
subprocess.run([sys.executable, "-c", answer], check=True)

# The file itself under attack: what fools its twin in torch is shown to it, and Square asks it.
command = ["evaluate", "deployed/network.harp", "--data", "digits", "--attack", "pgd-20", "--epsilon", "0.1"]
examples = "10" if quick else "50"
ended = subprocess.run([sys.executable, "-m", "harp", *command, "--examples", examples], check=False)
if ended.returncode == 1:  # measured, but a check found something: after one epoch the network knows nothing
    print("a check of the file found something, see above")
else:
    ended.check_returncode()
