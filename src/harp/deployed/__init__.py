"""Networks as they are deployed, attacked: files that answer, and have no gradients to give.

opening    a .harp or .onnx file -> an artefact: something to ask, with its hash
manifest   what is written beside the file, and the run that it came from
twin       a network of torch that computes the same, for the attacks that need gradients
trial      accuracies of both: what is found on the twin is replayed on the artefact, queries go to it directly
verdicts   whether artefact and twin are the same network, and whether the numbers can be believed
"""

from harp.deployed.manifest import origin_of
from harp.deployed.opening import Artefact, is_artefact, opened
from harp.deployed.trial import Trial
from harp.deployed.twin import Subjects, prepared

__all__ = [
    "Artefact",
    "Subjects",
    "Trial",
    "is_artefact",
    "opened",
    "origin_of",
    "prepared",
]
