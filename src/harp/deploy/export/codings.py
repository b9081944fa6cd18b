"""The effect of a coding on a network: its accuracy with exactly the numbers that the file holds."""

from typing import Any

import numpy as np
import torch

from harp.deploy.export.source import Subject
from harp.engine.capture.capture import Captured
from harp.engine.format.reader import read
from harp.engine.graph.nodes import Graph
from harp.engine.graph.reference import InTorch
from harp.engine.store import pack
from harp.errors import CheckpointError, DataError
from harp.evaluation import accuracy
from harp.experiments import build
from harp.system.progress import Quiet

CODINGS = ("f32", "f16", "int8")
ATTACK = "pgd-20"


def packed(captured: Captured, subject: Subject, header: dict[str, Any], values: str) -> bytes:
    """The content of a sparse file in one coding. Other numbers are stored as f16 too, where they fit."""
    parts = captured.graph, captured.tensors(subject.model), subject.masks, header, values
    if values == "f32":
        return pack(*parts)
    try:
        return pack(*parts, others="f16")
    except CheckpointError:  # a bias too large for f16
        return pack(*parts, others="f32")


def twin(graph: Graph, content: bytes) -> InTorch:
    """The network that a file holds, with its rounded numbers."""
    _, tensors = read(content, limit=1 << 40)
    return InTorch(graph, {name: torch.from_numpy(np.asarray(tensors[name])) for name in graph.tensor_names()}).eval()


def accuracies(captured: Captured, subject: Subject, examples: int | None, display: Quiet) -> list[dict[str, Any]]:
    """Natural and robust accuracy of the network in every coding, measured like the run's evaluation."""
    source = subject.source
    if source is None:
        raise DataError("the accuracy of codings is measured on a data set: this network has none")
    results = []
    attack = build.attack_of(ATTACK, subject.threat)[1]
    for values in CODINGS:
        content = packed(captured, subject, {}, values)
        network = twin(captured.graph, content)
        for name, chosen in (("natural", None), (ATTACK, attack)):
            total = min(examples or len(source.test), len(source.test))
            with display.counting(f"{values}, {name}", total):
                result, _ = accuracy.measure(
                    network, source, name, chosen, examples=examples, seed=subject.seed, progress=display.count
                )
            keys = ("name", "value", "low", "high", "n", "seed", "data", "measure")
            ball = {} if chosen is None else {"epsilon": subject.threat.epsilon, "norm": subject.threat.norm}
            results.append({"values": values, **{key: result[key] for key in keys}, **ball})
    return results
