"""Codings of the sparse file's weights, and the accuracy of a network with exactly the numbers that the file holds."""

from typing import Any

import numpy as np
import torch

from harp.deploy.export.source import ACCURACY_KEYS, Source
from harp.engine.capture.capture import Captured
from harp.engine.format.reader import read
from harp.engine.graph.nodes import Graph
from harp.engine.graph.torch_module import InTorch
from harp.engine.store import pack
from harp.errors import CheckpointError, DataError
from harp.evaluation import accuracy
from harp.experiments import build
from harp.system.progress import Quiet

CODINGS = ("f32", "f16", "int8")
ATTACK = "pgd-20"


def packed(captured: Captured, source: Source, header: dict[str, Any], values: str) -> bytes:
    """The content of a sparse file in one coding. Other numbers are stored as f16 too, where they fit."""
    parts = captured.graph, captured.tensors(source.model), source.masks, header, values
    if values == "f32":
        return pack(*parts)
    try:
        return pack(*parts, others="f16")
    except CheckpointError:  # a bias too large for f16
        return pack(*parts, others="f32")


def unpacked(graph: Graph, content: bytes) -> InTorch:
    """The network that a file holds, with its rounded numbers."""
    _, tensors = read(content, limit=1 << 40)
    return InTorch(graph, {name: torch.from_numpy(np.asarray(tensors[name])) for name in graph.tensor_names()}).eval()


def accuracies(captured: Captured, source: Source, examples: int | None, display: Quiet) -> list[dict[str, Any]]:
    """Natural and robust accuracy of the network in every coding, measured like the run's evaluation."""
    if source.data is None:
        raise DataError("the accuracy of codings is measured on a data set: this network has none")
    results = []
    attack, size = build.attack_of(ATTACK, source.threat)[1], len(source.data.test)
    ball = {"epsilon": source.threat.epsilon, "norm": source.threat.norm}
    for values in CODINGS:
        network = unpacked(captured.graph, packed(captured, source, {}, values))
        for name, chosen, threat in (("natural", None, {}), (ATTACK, attack, ball)):
            with display.counting(f"{values}, {name}", min(examples or size, size)):
                result, _ = accuracy.measure(
                    network, source.data, name, chosen, examples=examples, seed=source.seed, progress=display.count
                )
            results.append({"values": values, **{key: result[key] for key in ACCURACY_KEYS}, **threat})
    return results
