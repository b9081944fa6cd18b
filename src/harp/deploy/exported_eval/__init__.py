"""Attack networks as they are deployed: files that compute logits but no gradients.

open       opens a .harp or .onnx file as an artefact: a model without gradients, with its hash
manifest   reads the manifest beside the file, and finds the run that it came from
surrogate  the twin: a torch network that computes the same, for attacks that need gradients
evaluate   accuracies of both: adversarial images of the twin are replayed on the artefact, queries go to it directly
checks     whether artefact and twin are the same network, and whether the numbers are plausible
"""

from harp.deploy.exported_eval.evaluate import Trial
from harp.deploy.exported_eval.manifest import origin_of
from harp.deploy.exported_eval.open import Artefact, is_artefact, opened
from harp.deploy.exported_eval.surrogate import Subjects, prepared

__all__ = [
    "Artefact",
    "Subjects",
    "Trial",
    "evaluate",
    "is_artefact",
    "opened",
    "origin_of",
    "prepared",
]
