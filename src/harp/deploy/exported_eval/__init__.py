"""Attack networks as they are deployed: files that compute logits but no gradients.

open      opens a .harp or .onnx file as an artefact: a model without gradients, with its hash
twin      finds the file's run and data set, and its twin: a torch network that computes the same, with gradients
evaluate  accuracies of both: adversarial images of the twin are replayed on the artefact, queries go to it directly
checks    whether artefact and twin are the same network, and whether the numbers are plausible
"""

from harp.deploy.exported_eval.evaluate import FileEvaluation, is_black_box
from harp.deploy.exported_eval.open import is_artefact, opened
from harp.deploy.exported_eval.twin import Setup, prepared

__all__ = [
    "FileEvaluation",
    "Setup",
    "is_artefact",
    "is_black_box",
    "opened",
    "prepared",
]
