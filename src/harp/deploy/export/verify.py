"""Check an exported file, in a process that has only this file.

    python -m harp.deploy.export.verify FORMAT FILE QUESTIONS

QUESTIONS is an .npz file with `images`, the expected `logits`, and `about`, JSON that says how to build the
architecture for formats that do not hold it. The output is one line of JSON: the largest error relative to the largest
logit, how many images get another class, and whether torch was loaded.
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
    """Open the file, compute its logits, compare them with the expected ones and print the result."""
    form, path, questions = arguments
    with np.load(questions, allow_pickle=False) as stored:
        images, expected, about = stored["images"], stored["logits"], json.loads(str(stored["about"]))
    answer = OPENERS[form](path, about)
    # One image alone and the others in one batch: the result must not depend on the batch size.
    logits = np.concatenate([answer(images[:1]), answer(images[1:])]).astype(np.float64)
    if logits.shape != expected.shape:
        print(f"logits are of shape {logits.shape}, not {expected.shape}", file=sys.stderr)
        return 1
    error = float(np.abs(logits - expected).max() / max(float(np.abs(expected).max()), 1e-30))
    changed = int((logits.argmax(1) != expected.argmax(1)).sum())
    print(json.dumps({"error": error, "changed": changed, "torch": "torch" in sys.modules}))
    return 0


def _sparse(path: str, about: Any) -> Answer:
    from harp.engine.load import GENEROUS, load

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

    with open(path, "rb") as file:  # safe for a file that we wrote: loading a program runs its code
        module = torch.export.load(file).module()

    def answer(images: Floats) -> Floats:
        with torch.no_grad():
            return np.asarray(module(torch.from_numpy(images)).numpy())

    return answer


def _state(path: str, about: Any) -> Answer:
    import torch

    from harp import models
    from harp.models.weights import load_weights
    from harp.pruning.channels import Cut

    model = models.build(
        about["name"], num_classes=about["classes"], shape=tuple(about["shape"]), normalize=about["normalize"],
        **about["options"],
    )  # fmt: skip
    if about["cut"] is not None:
        Cut.from_dict(about["cut"]).apply(model)
    load_weights(model, path)
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
    except Exception as error:  # the caller reads one line, whatever a library raises
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        code = 1
    sys.exit(code)
