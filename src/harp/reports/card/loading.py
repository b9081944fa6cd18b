"""The code that loads a run's network, with HARP and without."""

from pathlib import Path

from harp.experiments import artefact
from harp.experiments.run_folder import Finished
from harp.pruning.channels import Cut
from harp.reports.card.markdown import table


def loading(found: Finished) -> str:
    """How to load it, in Markdown."""
    part = found.recipe.model
    file, colon, function = part.name.rpartition(":")
    spec = f"{Path(file).name}:{function}" if colon and file.endswith(".py") else part.name
    options = {"num_classes": repr(found.classes), "shape": repr(found.shape or "(CHANNELS, HEIGHT, WIDTH)").strip("'")}
    options |= {"normalize": repr(part.normalize)} if part.normalize is not None else {}
    options |= {key: repr(value) for key, value in part.options.items()}
    arguments = ", ".join(f"{key}={value}" for key, value in options.items())
    where = "" if found.shape else " (put in the shape of your images)"
    cut = artefact.cut_of(found.folder)
    return _dense(spec, arguments, where) if cut is None else _slim(cut, spec, arguments, where)


def _dense(spec: str, arguments: str, where: str) -> str:
    return f"""With HARP{where}:

```python
import harp

model = harp.build_model({spec!r}, {arguments})
harp.load_weights(model, "model.safetensors")
model.eval()
```

The weights are an ordinary state dict, dense, with zeros where they were pruned. Without HARP, for a definition of your
own with the same names (`harp submit robustbench` writes one for CIFAR-10):

```python
from safetensors.torch import load_file

state = load_file("model.safetensors")
print(len(state), "tensors;", sum(int((value == 0).sum()) for value in state.values()), "zeros")
# model.load_state_dict(state, strict=True)
```
"""


def _slim(cut: Cut, spec: str, arguments: str, where: str) -> str:
    """How to load a network that channels were cut out of, and which of its tensors are smaller."""
    shapes = []
    for name, before in cut.shapes.items():
        if len(before) > 1:
            now = [len(cut.kept[name].get(axis, range(size))) for axis, size in enumerate(before)]
            shapes.append([f"`{name}`", *("x".join(map(str, shape)) for shape in (before, now))])
    return f"""With HARP{where}:

```python
from pathlib import Path

import harp
from harp import artefact

model = harp.build_model({spec!r}, {arguments})
artefact.load(Path("."), model)  # this folder's: the channels of slim.json are cut out, then the small tensors fit
model.eval()
```

The weights are an ordinary state dict, dense, and smaller than the architecture's: a plain `load_state_dict` into the
whole architecture fails. `slim.json` says what was cut out: of each tensor the indices that are kept along each axis,
and the numbers of channels that each module has now. `harp slim RUN --out FOLDER` writes both files beside a
`rebuild.py`, which gives any copy of the architecture the small tensors and needs nothing but torch and safetensors.
Without either, a definition of your own with the shapes below takes the tensors under the same names:

```python
import json
from pathlib import Path

from safetensors.torch import load_file

state, cut = load_file("model.safetensors"), json.loads(Path("slim.json").read_text(encoding="utf-8"))
print(len(state), "tensors;", len(cut["kept"]), "of them are smaller than the architecture's")
# model.load_state_dict(state, strict=True)
```

{table(["tensor", "in the architecture", "here"], shapes)}
"""
