"""The graph of a model of torch.

`torch.export` records what the model in eval mode calls; its calls become the few operations of a graph, batch norms go
into the layers before them, and what is computed of parameters alone becomes a tensor. The rest is left to torch, call
by call.
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

from harp.compact.reader import BadFile
from harp.errors import ModelError
from harp.modes import evaluating, slow_attention
from harp.sparse import passes, reference
from harp.sparse.calls import RULES
from harp.sparse.exported import Derived, Reader
from harp.sparse.folds import Fold, folded
from harp.sparse.graph import Graph

_TOLERANCE = 1e-4  # relative to the largest logit


@dataclass(frozen=True)
class Captured:
    """The graph of a model, and how its tensors follow from the model's own.

    `folds` are the batch norms that went into layers, by the name of the layer's weight. `detached` says that the model
    cuts results off from the gradient, which the graph does not.
    """

    graph: Graph
    folds: dict[str, Fold]
    constants: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    derived: Mapping[str, Derived] = field(default_factory=dict, repr=False)
    detached: bool = False

    @torch.no_grad()
    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors that the graph names, of the model's weights at this moment: float32, batch norms folded."""
        get = self.source(model)
        with_norm: dict[str, Tensor] = {}
        for weight, fold in self.folds.items():
            with_norm |= folded(weight, fold, get)
        made = {name: with_norm[name] if name in with_norm else get(name) for name in self.graph.tensor_names()}
        return {name: _plain(tensor) for name, tensor in made.items()}

    def source(self, model: nn.Module) -> Callable[[str], Any]:
        """A function from names to the model's tensors of this moment, not folded, and to what follows from them."""
        state = _state(model)
        device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
        state = {name: tensor.to(device) for name, tensor in self.constants.items()} | state
        found: dict[str, Any] = {}

        def get(name: str) -> Any:
            if name not in found:
                rule = self.derived.get(name)
                if rule is None and name not in state:
                    raise ModelError(f"the model has no tensor {name!r}: it isn't the one whose graph was captured")
                with torch.no_grad(), torch.device(device):
                    found[name] = state[name].detach() if rule is None else rule.function(*map(get, rule.inputs))
            return found[name]

        return get


def capture(model: nn.Module, example: Tensor) -> Captured:
    """The graph of a model in eval mode; `example` is a batch of its images.

    The graph is compared with the model before it is given. No parameter, buffer or mode of the model is touched.
    """
    if len(example) == 0:
        raise ModelError("a model can't be captured with an empty batch of images")
    single, several = example[:1], example if len(example) > 1 else example.repeat(3, *[1] * (example.ndim - 1))
    with torch.inference_mode(False), evaluating(model), slow_attention():
        captured = _read(_functional(exported(model, several[:2])), _first_names(model))
        with torch.no_grad(), torch.autocast(example.device.type, enabled=False):
            tensors = captured.tensors(model)
            for x in (several, single):
                _compare(captured.graph, tensors, x, model(x.clone()))
    return captured


def exported(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """What the model, which is in eval mode, calls for any number of images; `example` has at least two."""
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    first: Exception | None = None
    # The strict way reads the model's Python code: it is slower, but sees that len(x) is the number of images.
    for strict in (False, True):
        try:
            with quiet():
                return torch.export.export(model, (example,), dynamic_shapes=dynamic, strict=strict)
        except Exception as error:  # forward may do anything
            first = first or error
    raise ModelError(f"the model's graph can't be captured: {_line(first)}") from first


def _functional(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same without calls that overwrite anything."""
    with quiet():
        found: torch.export.ExportedProgram = program.run_decompositions({})
    return found


def _read(program: torch.export.ExportedProgram, names: Mapping[str, str]) -> Captured:
    """The graph of a program, folded and tidied up."""
    reader = Reader(program, RULES, names)
    output = reader.read()
    nodes = passes.reachable(reader.nodes, output)
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
        raise ModelError(f"the model's graph can't be computed for {len(x)} images: {_line(error)}") from error
    if result.shape != expected.shape:
        raise ModelError(f"the model gives {tuple(expected.shape)}, its graph {tuple(result.shape)}")
    difference, largest = float((result - expected).abs().max()), float(expected.abs().max())
    if not difference <= _TOLERANCE * largest:
        raise ModelError(
            f"the model's graph is off by {difference:.1e} for {len(x)} images, logits are up to {largest:.1e}:"
            " does forward depend on more than the images?"
        )


def _state(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, under all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first name of every tensor, by all its names: the one that masks are known by."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in _state(model).items()}


def _plain(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.is_floating_point() else tensor).contiguous()


def _line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch has to say of itself, or prints of a model that it can't export."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
