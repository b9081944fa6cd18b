"""The check of an exported file, in a process that knows nothing but the file.

    python -m harp.export.verify FORMAT FILE QUESTIONS

QUESTIONS is an .npz file with `images`, the `logits` that are expected of them, and `about`, JSON that says how to
build the architecture where the file does not. The answer is one line of JSON: the largest error relative to the
largest logit, how many images get another class, and whether torch was loaded.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
Answer = Callable[[Floats], Floats]


def main(arguments: list[str]) -> int:
    """Open the file, ask it, compare, print."""
    form, path, questions = arguments
    with np.load(questions, allow_pickle=False) as stored:
        images, expected, about = stored["images"], stored["logits"], json.loads(str(stored["about"]))
    answer = OPENERS[form](path, about)
    # One image by itself and the rest together: the number of images must not matter.
    found = np.concatenate([answer(images[:1]), answer(images[1:])]).astype(np.float64)
    if found.shape != expected.shape:
        print(f"logits are of shape {found.shape}, not {expected.shape}", file=sys.stderr)
        return 1
    error = float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1e-30))
    changed = int((found.argmax(1) != expected.argmax(1)).sum())
    print(json.dumps({"error": error, "changed": changed, "torch": "torch" in sys.modules}))
    return 0


def _sparse(path: str, about: Any) -> Answer:
    from harp.sparse.loading import GENEROUS, load

    return load(path, limit=GENEROUS)


def _onnx(path: str, about: Any) -> Answer:
    import onnx
    import onnxruntime

    onnx.checker.check_model(onnx.load(path), full_check=True)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def answer(images: Floats) -> Floats:
        return np.asarray(session.run(None, {name: images})[0])

    return answer


def _program(path: str, about: Any) -> Answer:
    import torch

    with open(path, "rb") as file:  # its own file: to load one runs the code that is in it
        module = torch.export.load(file).module()

    def answer(images: Floats) -> Floats:
        with torch.no_grad():
            return np.asarray(module(torch.from_numpy(images)).numpy())

    return answer


def _state(path: str, about: Any) -> Answer:
    import torch

    from harp import checkpoint, models
    from harp.channels import Cut

    model = models.build(
        about["name"], num_classes=about["classes"], shape=tuple(about["shape"]), normalize=about["normalize"],
        **about["options"],
    )  # fmt: skip
    if about["cut"] is not None:
        Cut.from_dict(about["cut"]).apply(model)
    checkpoint.load_weights(model, path)
    model.eval()

    def answer(images: Floats) -> Floats:
        with torch.no_grad():
            return np.asarray(model(torch.from_numpy(images)).numpy())

    return answer


OPENERS: dict[str, Callable[[str, Any], Answer]] = {
    "sparse": _sparse,
    "onnx": _onnx,
    "torch-export": _program,
    "safetensors": _state,
}

if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except Exception as error:  # whatever a library raises, for who asked it is one line
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        code = 1
    sys.exit(code)
