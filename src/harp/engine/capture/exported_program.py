"""Reads the program that `torch.export` recorded, call by call: constants, numbers, nodes of a graph."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from harp.engine.format.reader import BadFile
from harp.engine.graph.allowed_calls import is_allowed
from harp.engine.graph.nodes import Node, Shape, complete, mentioned, result_shape
from harp.engine.graph.passes import Fold
from harp.errors import ModelError

# Calls that return their input unchanged in eval mode.
_NO_OPS = {
    "alias", "clone", "contiguous", "detach", "detach_copy", "dropout", "feature_dropout", "alpha_dropout",
    "feature_alpha_dropout", "lift", "lift_fresh", "lift_fresh_copy", "native_dropout",
}  # fmt: skip
_DETACHED = {"detach", "detach_copy"}
_TYPES = {"to", "_to_copy", "type_as", "float"}  # no-ops if the input has the type already
RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "view_copy", "_reshape_alias"}
_NEW = ("new_zeros", "new_ones", "new_full")
_DROPPED = ("device", "layout", "memory_format", "pin_memory", "non_blocking")  # they do not change the result


class Derived(NamedTuple):
    """A tensor that is computed from others, given by their names."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]


class Result(NamedTuple):
    """The result of a node of the graph."""

    name: str


class Constant(NamedTuple):
    """A tensor, or several, that do not depend on the images."""

    name: str


class Times(NamedTuple):
    """`factor` times the number of images."""

    factor: int


class Several(NamedTuple):
    """The results of a call that has more than one."""

    call: fx.Node


_UNKNOWN = object()  # a number that depends on the number of images, but is no multiple of it


class Reader:
    """Goes through an exported program once and turns its calls into nodes.

    `rules` turn calls into operations of the graph, by the name of the function; if a rule returns None, the call
    becomes a "torch" node. `names` maps every name of a tensor of the model to its first name.
    """

    def __init__(
        self, program: torch.export.ExportedProgram, rules: Mapping[str, "Rule"], names: Mapping[str, str]
    ) -> None:
        self.program, self.rules, self.names = program, rules, names
        self.nodes: dict[str, Node] = {}
        self.norms: dict[str, Fold] = {}  # by the names of the nodes that are batch norms
        self.values: dict[fx.Node, Any] = {}
        self.sizes: dict[str, Shape] = {}  # of constants
        self.constants: dict[str, Tensor] = {}
        self.derived: dict[str, Derived] = {}
        self.detached = False  # whether the model detaches a result from the gradient
        self.batch: Any = None

    def read(self) -> str:
        """Fill `nodes`, and return the name of the model's result."""
        self._placeholders()
        for call in self.program.graph.nodes:
            if call.op == "call_function":
                self._call(call)
        specs = self.program.graph_signature.output_specs
        # A model that overwrites its images also returns them, which is ignored here.
        kinds = torch.export.graph_signature.OutputKind
        names = [spec.arg.name for spec in specs if spec.kind is not kinds.USER_INPUT_MUTATION]
        results = [self.values.get(call) for call in self.program.graph.nodes if call.name in names]
        output = results[0] if len(results) == 1 == len(names) else None
        if not isinstance(output, Result):
            raise ModelError("the model has to give one tensor, the logits of the images")
        return output.name

    def _placeholders(self) -> None:
        kinds = torch.export.graph_signature.InputKind
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        if self.program.graph_signature.buffers_to_mutate:
            raise ModelError("the model changes its buffers in eval mode")
        for call in self.program.graph.nodes:
            if call.op != "placeholder":
                continue
            spec, shape = specs[call.name], list(getattr(call.meta.get("val"), "shape", ()))
            if spec.kind is kinds.USER_INPUT:
                self.batch = shape[0].node.expr
                self.values[call] = self.add(Node("input", "input", (), tuple(map(int, shape[1:]))))
            elif spec.kind in (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR):
                name = self.names.get(spec.target, spec.target)
                self.values[call] = Constant(name)
                self.sizes[name] = tuple(shape)
                if spec.kind is kinds.CONSTANT_TENSOR:
                    self.constants[name] = self.program.constants[spec.target]
            else:
                raise ModelError(f"the model's graph can't be captured: it has an input {call.name} of another kind")

    def _call(self, call: fx.Node) -> None:
        """Store the result of a call: a constant, a number, or a node."""
        value: Any = call.meta.get("val")
        if call.target is operator.getitem and isinstance(self.values[call.args[0]], Several):  # type: ignore[index]
            source, pick = self.values[call.args[0]].call, call.args[1]  # type: ignore[index]
            native = self._native(source, value) if pick == 0 else None
            self.values[call] = native or self._torch(source, value, pick)  # type: ignore[arg-type]
        elif value is None:
            return  # an assertion
        elif _packet(call.target) in _NEW and all(type(size) is int for size in value.shape):
            self.values[call] = self._derive_new(call, value)
        elif not isinstance(value, (Tensor, tuple, list)):
            self.values[call] = self._number(value)
        elif all(self._is_constant(argument) for argument in _flat([*call.args, *call.kwargs.values()])):
            self.values[call] = self._derive_call(call, value)
        elif isinstance(value, (tuple, list)):
            self.values[call] = Several(call)
        else:
            self.values[call] = self._native(call, value) or self._torch(call, value, None)

    def _is_constant(self, argument: Any) -> bool:
        return not isinstance(argument, fx.Node) or isinstance(self.values[argument], (Constant, int, float, bool))

    def _number(self, value: Any) -> Any:
        """A number, a multiple of the number of images, or `_UNKNOWN`."""
        if not isinstance(value, torch.SymInt):
            return value if isinstance(value, (int, float, bool)) else _UNKNOWN
        expression = value.node.expr
        factor = expression / self.batch
        return int(expression) if expression.is_Integer else Times(int(factor)) if factor.is_Integer else _UNKNOWN

    def _derive_new(self, call: fx.Node, value: Tensor) -> Constant:
        """A new constant tensor that only takes its type from a result."""
        shape, dtype = tuple(value.shape), value.dtype
        filler = {"new_zeros": 0, "new_ones": 1}.get(_packet(call.target), call.args[-1])
        return self.derive(call.name, lambda: torch.full(shape, filler, dtype=dtype), (), shape)  # type: ignore[arg-type]

    def _derive_call(self, call: fx.Node, value: Any) -> Constant:
        """The constant result of a call whose arguments are constants."""
        node_arguments = [
            argument for argument in _flat([*call.args, *call.kwargs.values()]) if isinstance(argument, fx.Node)
        ]
        names = tuple(
            dict.fromkeys(v.name for v in map(self.values.__getitem__, node_arguments) if isinstance(v, Constant))
        )
        values, target = self.values, call.target

        def compute(*tensors: Any) -> Any:
            tensors_by_name = dict(zip(names, tensors, strict=True))

            def get(argument: fx.Node) -> Any:
                stored = values[argument]
                return tensors_by_name[stored.name] if isinstance(stored, Constant) else stored

            args, kwargs = fx.map_arg(call.args, get), fx.map_arg(call.kwargs, get)
            return target(*args, **{k: v for k, v in kwargs.items() if k != "device"})  # type: ignore[operator]

        return self.derive(call.name, compute, names, tuple(getattr(value, "shape", ())))

    def derive(self, name: str, function: Callable[..., Any], inputs: tuple[str, ...], shape: Shape) -> Constant:
        """Add a constant of some shape that is computed from others."""
        while name in self.sizes:
            name += "_"
        self.sizes[name] = shape
        self.derived[name] = Derived(function, inputs)
        return Constant(name)

    def add(self, node: Node) -> Result:
        """Add a node; its name gets a suffix if it is taken."""
        name = node.name
        while name in self.nodes:
            name += "_"
        self.nodes[name] = replace(node, name=name, attributes=complete(node.op, node.attributes))
        return Result(name)

    def _shape(self, value: Tensor) -> Shape:
        """The shape of a result without the batch axis, or with all axes if the batch axis is not in front."""
        sizes = [self._number(size) for size in value.shape]
        counts = sum(isinstance(size, Times) for size in sizes)
        if _UNKNOWN in sizes or counts != 1:
            raise ModelError("the model mixes the images of a batch: no graph holds for all numbers of images")
        if sizes[0] == Times(1):
            return tuple(sizes[1:])
        return tuple(-size.factor if isinstance(size, Times) else size for size in sizes)

    def _torch(self, call: fx.Node, value: Tensor, pick: int | None) -> Result:
        """Add a call as a "torch" node."""
        target: Any = call.target
        if not isinstance(target, torch._ops.OpOverload) or not is_allowed(target):
            raise ModelError(f"the model calls {target}, which a graph can't hold")
        name, shape = str(target), self._shape(value)
        args = [self._argument(argument) for argument in call.args]
        kwargs = {key: self._argument(argument) for key, argument in call.kwargs.items() if key not in _DROPPED}
        if _packet(target) in RESHAPES:  # one form for all of them, which works for any memory layout
            name, args, kwargs = "aten.reshape.default", [args[0], [self._size(size) for size in value.shape]], {}
        attributes = {"op": name, "args": args, "kwargs": kwargs, "pick": pick}
        tensors = {tensor: tensor for tensor in mentioned(attributes, "tensor")}
        return self.add(Node(call.name, "torch", mentioned(attributes, "node"), shape, tensors, attributes))

    def _size(self, size: Any) -> Any:
        number = self._number(size)
        return {"batch": number.factor} if isinstance(number, Times) else number

    def _argument(self, argument: Any) -> Any:
        """An argument of a call as JSON."""
        if isinstance(argument, fx.Node):
            argument = self.values[argument]
        match argument:
            case Result(name):
                return {"node": name}
            case Constant(name):
                return {"tensor": name}
            case Times(factor):
                return {"batch": factor}
            case list() | tuple() if not isinstance(argument, Several):
                return [self._argument(item) for item in argument]
            case torch.dtype():
                return {"dtype": str(argument).removeprefix("torch.")}
            case float() if not math.isfinite(argument):
                return {"float": str(argument)}
            case None | bool() | int() | float() | str():
                return argument
        raise ModelError(f"the model passes {argument!r:.100} to a function, which a graph can't hold")

    def _native(self, call: fx.Node, value: Tensor) -> Result | None:
        target: Any = call.target
        if not isinstance(target, torch._ops.OpOverload):
            return None
        bound = self._bound(call)
        x = next(iter(bound.values()), None)
        packet = _packet(target)
        if isinstance(x, Result) and not bound.get("train") and self._is_no_op(packet, call, value):
            self.detached |= packet in _DETACHED
            return x
        rule = self.rules.get(packet)
        if rule is None or not self._is_plain(call, value):
            return None
        shape = self._shape(value)
        if len(shape) not in (1, 3) or min(shape) < 1:
            return None
        return rule(self, call.name, bound, shape)

    def _is_plain(self, call: fx.Node, value: Tensor) -> bool:
        """Whether a call has floats of one type and known numbers as arguments; reshapes may have any sizes."""
        node_arguments = [
            argument for argument in _flat([*call.args, *call.kwargs.values()]) if isinstance(argument, fx.Node)
        ]
        known_values = [self.values[argument] for argument in node_arguments]
        types = {
            argument.meta["val"].dtype
            for argument, known_value in zip(node_arguments, known_values, strict=True)
            if isinstance(known_value, Result)
        }
        known = all(isinstance(known_value, (Result, Constant, int, float)) for known_value in known_values)
        return value.is_floating_point() and types == {value.dtype} and (known or _packet(call.target) in RESHAPES)

    def _bound(self, call: fx.Node) -> dict[str, Any]:
        """The arguments of a call by their names, with the defaults of missing ones."""
        bound: dict[str, Any] = {}
        for place, argument in enumerate(call.target._schema.arguments):  # type: ignore[union-attr]
            value = (
                call.args[place] if place < len(call.args) else call.kwargs.get(argument.name, argument.default_value)
            )
            bound[argument.name] = fx.map_arg(value, self.values.__getitem__) if value is not None else None
        return bound

    def _is_no_op(self, packet: str, call: fx.Node, value: Tensor) -> bool:
        """Whether a call returns its input unchanged."""
        first = next((argument for argument in _flat(call.args) if isinstance(argument, fx.Node)), None)
        before = None if first is None else first.meta.get("val")
        if not isinstance(before, Tensor) or value.dtype != before.dtype:
            return False
        if packet in _NO_OPS:
            return True
        same = len(value.shape) == len(before.shape) and all(map(_is_same, value.shape, before.shape))
        return same and packet in {*RESHAPES, *_TYPES, "slice", "expand", "squeeze"}

    def images(self, value: Any, axes: int | None = None) -> Shape | None:
        """The shape of a value if it is a result with the batch axis in front and `axes` others (1 or 3)."""
        if not isinstance(value, Result):
            return None
        shape = self.nodes[value.name].shape
        fits = len(shape) in ((1, 3) if axes is None else (axes,)) and min(shape) > 0
        return shape if fits else None

    def make(self, name: str, op: str, inputs: Sequence[Result], shape: Shape, **more: Any) -> Result | None:
        """Add a node, if its shape is the one that the graph's rules give; else None."""
        tensors, attributes = more.pop("tensors", {}), complete(op, more)
        try:
            inferred = result_shape(op, attributes, [self.nodes[result.name].shape for result in inputs])
        except BadFile:
            return None
        if inferred not in (None, shape):
            return None
        return self.add(Node(name, op, tuple(result.name for result in inputs), shape, tensors, attributes))


Rule = Callable[[Reader, str, dict[str, Any], Shape], Result | None]


def _packet(target: Any) -> str:
    return str(target._schema.name).removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else ""


def _flat(argument: Any) -> Iterator[Any]:
    if isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _flat(item)
    else:
        yield argument


def _is_same(first: Any, second: Any) -> bool:
    """Whether two sizes are the same for every number of images."""
    symbolic = [isinstance(size, torch.SymInt) for size in (first, second)]
    if any(symbolic):
        return all(symbolic) and bool(first.node.expr == second.node.expr)
    return bool(first == second)
