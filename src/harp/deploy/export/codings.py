"""What a coding of the values does to a network: the network with exactly the numbers that its file holds."""

from typing import Any

import numpy as np
import torch

from harp import assess
from harp.compact.reader import read
from harp.display import Quiet
from harp.errors import CheckpointError
from harp.export.subject import Subject
from harp.sparse.capture import Captured
from harp.sparse.graph import Graph
from harp.sparse.in_torch import InTorch
from harp.sparse.storing import pack

CODINGS = ("f32", "f16", "int8")
ATTACK = "pgd-20"


def packed(captured: Captured, subject: Subject, header: dict[str, Any], values: str) -> bytes:
    """The content of the file with one coding of the kept weights; other numbers are halves too, where they can be."""
    parts = captured.graph, captured.tensors(subject.model), subject.masks, header, values
    if values == "f32":
        return pack(*parts)
    try:
        return pack(*parts, others="f16")
    except CheckpointError:  # a bias that is too large for a half
        return pack(*parts, others="f32")


def twin(graph: Graph, content: bytes) -> InTorch:
    """The network that a file holds, with its rounded numbers."""
    _, tensors = read(content, limit=1 << 40)
    return InTorch(graph, {name: torch.from_numpy(np.asarray(tensors[name])) for name in graph.tensor_names()}).eval()


def accuracies(captured: Captured, subject: Subject, examples: int | None, display: Quiet) -> list[dict[str, Any]]:
    """Natural and robust accuracy of the network in every coding, measured as the run's evaluation does it."""
    source = subject.source
    assert source is not None
    found = []
    attack = assess.attack_of(ATTACK, subject.threat)[1]
    for values in CODINGS:
        content = packed(captured, subject, {}, values)
        network = twin(captured.graph, content)
        for name, made in (("natural", None), (ATTACK, attack)):
            total = min(examples or len(source.test), len(source.test))
            with display.counting(f"{values}, {name}", total):
                result, _ = assess.measure(
                    network, source, name, made, examples=examples, seed=subject.seed, progress=display.count
                )
            keys = ("name", "value", "low", "high", "n", "seed", "data", "measure")
            ball = {} if made is None else {"epsilon": subject.threat.epsilon, "norm": subject.threat.norm}
            found.append({"values": values, **{key: result[key] for key in keys}, **ball})
    return found
