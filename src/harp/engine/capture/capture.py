"""Captures the graph of a torch model.

`torch.export` records the calls of the model in eval mode. Known calls become operations of the graph, batch norms are
folded into the layers before them, and results that depend on parameters only become tensors. Every other call becomes
a "torch" node.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harp.engine.capture.exported_program import Derived, Reader
from harp.engine.capture.operations import RULES
from harp.engine.format.reader import BadFile
from harp.engine.graph import passes, reference
from harp.engine.graph.nodes import Graph, reachable
from harp.engine.graph.passes import Fold, folded
from harp.errors import ModelError
from harp.models.modes import evaluating, slow_attention
from harp.system.files import reason

_TOLERANCE = 1e-4  # relative to the largest logit


@dataclass(frozen=True)
class Captured:
    """The graph of a model, and how its tensors are computed from those of the model.

    `folds` are the batch norms that are folded into layers, by the name of the layer's weight. `detached` says that the
    model detaches results from the gradient, which the graph does not.
    """

    graph: Graph
    folds: dict[str, Fold]
    constants: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    derived: Mapping[str, Derived] = field(default_factory=dict, repr=False)
    detached: bool = False

    @torch.no_grad()
    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors of the graph from the model's current weights: float32, batch norms folded."""
        get = self.source(model)
        folded_tensors: dict[str, Tensor] = {}
        for weight, fold in self.folds.items():
            folded_tensors |= folded(weight, fold, get)
        names = self.graph.tensor_names()
        return {name: _plain(folded_tensors[name] if name in folded_tensors else get(name)) for name in names}

    def source(self, model: nn.Module) -> Callable[[str], Any]:
        """A function from names to the model's current tensors, not folded, and to tensors derived from them."""
        state = _state(model)
        device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
        state = {name: tensor.to(device) for name, tensor in self.constants.items()} | state
        cache: dict[str, Any] = {}

        def get(name: str) -> Any:
            if name not in cache:
                rule = self.derived.get(name)
                if rule is None and name not in state:
                    raise ModelError(f"the model has no tensor {name!r}: it isn't the one whose graph was captured")
                with torch.no_grad(), torch.device(device):
                    cache[name] = state[name].detach() if rule is None else rule.function(*map(get, rule.inputs))
            return cache[name]

        return get


def capture(model: nn.Module, example: Tensor) -> Captured:
    """The graph of a model in eval mode; `example` is a batch of its images.

    The graph is compared with the model before it is returned. No parameter, buffer or mode of the model is changed.
    """
    if len(example) == 0:
        raise ModelError("a model can't be captured with an empty batch of images")
    single, several = example[:1], example if len(example) > 1 else example.repeat(3, *[1] * (example.ndim - 1))
    with torch.inference_mode(False), evaluating(model), slow_attention():
        program = exported(model, several[:2])
        with quiet():
            functional = program.run_decompositions({})  # without in-place calls
        captured = _read(functional, _first_names(model))
        with torch.no_grad(), torch.autocast(example.device.type, enabled=False):
            tensors = captured.tensors(model)
            for x in (several, single):
                _compare(captured.graph, tensors, x, model(x.clone()))
    return captured


def exported(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The program of a model in eval mode for any number of images; `example` has at least two."""
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    first: Exception | None = None
    # Strict mode reads the model's Python code: it is slower, but sees that len(x) is the number of images.
    for strict in (False, True):
        try:
            with quiet():
                return torch.export.export(model, (example,), dynamic_shapes=dynamic, strict=strict)
        except Exception as error:  # forward may do anything
            first = first or error
    assert first is not None
    raise ModelError(f"the model's graph can't be captured: {reason(first)}") from first


def _read(program: torch.export.ExportedProgram, names: Mapping[str, str]) -> Captured:
    """The graph of a program, after all passes."""
    reader = Reader(program, RULES, names)
    output = reader.read()
    nodes = {node.name: node for node in reachable(list(reader.nodes.values()), output)}
    nodes, folds, output = passes.fold(nodes, reader.norms, output, taken=reader.sizes)
    nodes = passes.merged(nodes, output, lambda name, function, inputs: reader.derive(name, function, inputs, ()).name)
    graph = passes.renamed(nodes, output)
    try:
        Graph.from_dict(graph.as_dict())
    except BadFile as error:
        raise ModelError(f"the model has no proper graph: {error}") from error
    return Captured(graph, folds, reader.constants, reader.derived, reader.detached)


def _compare(graph: Graph, tensors: Mapping[str, Tensor], x: Tensor, expected: Any) -> None:
    try:
        result = reference.run(graph, tensors, x.float())
    except Exception as error:  # a function of torch may raise anything
        raise ModelError(f"the model's graph can't be computed for {len(x)} images: {reason(error)}") from error
    if result.shape != expected.shape:
        raise ModelError(f"the model gives {tuple(expected.shape)}, its graph {tuple(result.shape)}")
    difference, largest = float((result - expected).abs().max()), float(expected.abs().max())
    if not difference <= _TOLERANCE * largest:
        raise ModelError(
            f"the model's graph is off by {difference:.1e} for {len(x)} images, logits are up to {largest:.1e}:"
            " does forward depend on more than the images?"
        )


def _state(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, by all their names."""
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first name of every tensor, by all its names; masks use the first name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in _state(model).items()}


def _plain(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.is_floating_point() else tensor).contiguous()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the logs, warnings and error output of `torch.export`."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
