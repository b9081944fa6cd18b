"""Reads the program that `torch.export` recorded, call by call: constants, numbers, nodes of a graph."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "view_copy", "_reshape_alias"}
# No-ops if the result has the type and the shape of the input.
_MAYBE_NO_OPS = {*RESHAPES, "to", "_to_copy", "type_as", "float", "slice", "expand", "squeeze"}
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
        signature, kinds = self.program.graph_signature, torch.export.graph_signature.OutputKind
        if signature.buffers_to_mutate:
            raise ModelError("the model changes its buffers in eval mode")
        for call in self.program.graph.nodes:
            if call.op == "placeholder":
                self._placeholder(call)
            elif call.op == "call_function":
                self._call(call)
        # A model that overwrites its images also returns them, which is ignored here.
        names = [spec.arg.name for spec in signature.output_specs if spec.kind is not kinds.USER_INPUT_MUTATION]
        results = [self.values.get(call) for call in self.program.graph.nodes if call.name in names]
        output = results[0] if len(results) == 1 == len(names) else None
        if not isinstance(output, Result):
            raise ModelError("the model has to give one tensor, the logits of the images")
        return output.name

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

    def images(self, value: Any, axes: int | None = None) -> Shape | None:
        """The shape of a value if it is a result with the batch axis in front and `axes` others (1 or 3)."""
        if not isinstance(value, Result):
            return None
        shape = self.nodes[value.name].shape
        return shape if len(shape) in ((1, 3) if axes is None else (axes,)) and min(shape) > 0 else None

    def _placeholder(self, call: fx.Node) -> None:
        kinds = torch.export.graph_signature.InputKind
        (spec,) = (spec for spec in self.program.graph_signature.input_specs if spec.arg.name == call.name)
        shape: list[Any] = list(getattr(call.meta.get("val"), "shape", ()))
        if spec.kind is kinds.USER_INPUT:
            self.batch = shape[0].node.expr
            self.values[call] = self.add(Node("input", "input", (), tuple(map(int, shape[1:]))))
        elif spec.kind in (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR):
            target = str(spec.target)
            name = self.names.get(target, target)
            self.values[call] = Constant(name)
            self.sizes[name] = tuple(shape)
            if spec.kind is kinds.CONSTANT_TENSOR:
                self.constants[name] = self.program.constants[target]
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
            # A new constant tensor that only takes its type from a result.
            shape, dtype = tuple(value.shape), value.dtype
            filler: Any = {"new_zeros": 0, "new_ones": 1}.get(_packet(call.target), call.args[-1])
            self.values[call] = self.derive(call.name, lambda: torch.full(shape, filler, dtype=dtype), (), shape)
        elif not isinstance(value, (Tensor, tuple, list)):
            self.values[call] = self._number(value)
        elif all(isinstance(self.values[node], (Constant, int, float)) for node in call.all_input_nodes):
            self.values[call] = self._derive_call(call, tuple(getattr(value, "shape", ())))
        elif isinstance(value, (tuple, list)):
            self.values[call] = Several(call)
        else:
            self.values[call] = self._native(call, value) or self._torch(call, value, None)

    def _number(self, value: Any) -> Any:
        """A number, a multiple of the number of images, or `_UNKNOWN`."""
        if not isinstance(value, torch.SymInt):
            return value if isinstance(value, (int, float)) else _UNKNOWN
        expression = value.node.expr
        factor = expression / self.batch
        return int(expression) if expression.is_Integer else Times(int(factor)) if factor.is_Integer else _UNKNOWN

    def _derive_call(self, call: fx.Node, shape: Shape) -> Constant:
        """The constant result of a call whose arguments are constants."""
        values: dict[fx.Node, Any] = {node: self.values[node] for node in call.all_input_nodes}
        names = tuple(dict.fromkeys(value.name for value in values.values() if isinstance(value, Constant)))
        target: Any = call.target

        def compute(*tensors: Any) -> Any:
            named = dict(zip(names, tensors, strict=True))
            known = {node: named[v.name] if isinstance(v, Constant) else v for node, v in values.items()}
            args, kwargs = fx.map_arg((call.args, call.kwargs), known.__getitem__)
            return target(*args, **{key: value for key, value in kwargs.items() if key != "device"})

        return self.derive(call.name, compute, names, shape)

    def _shape(self, value: Tensor) -> Shape:
        """The shape of a result without the batch axis, or with all axes if the batch axis is not in front."""
        sizes = [self._number(size) for size in value.shape]
        if _UNKNOWN in sizes or sum(isinstance(size, Times) for size in sizes) != 1:
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
            sizes = [self._argument(self._number(size)) for size in value.shape]
            name, args, kwargs = "aten.reshape.default", [args[0], sizes], {}
        attributes = {"op": name, "args": args, "kwargs": kwargs, "pick": pick}
        tensors = {tensor: tensor for tensor in mentioned(attributes, "tensor")}
        return self.add(Node(call.name, "torch", mentioned(attributes, "node"), shape, tensors, attributes))

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
        """Add a call as an operation of the graph, if there is a rule for it that fits."""
        target: Any = call.target
        if not isinstance(target, torch._ops.OpOverload):
            return None
        bound: dict[str, Any] = {}
        for place, argument in enumerate(target._schema.arguments):
            default = call.kwargs.get(argument.name, argument.default_value)
            given = call.args[place] if place < len(call.args) else default
            bound[argument.name] = None if given is None else fx.map_arg(given, self.values.__getitem__)
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
        return rule(Call(self, call.name, bound, shape))

    def _is_plain(self, call: fx.Node, value: Tensor) -> bool:
        """Whether a call has floats of one type and known numbers as arguments; reshapes may have any sizes."""
        values = {node: self.values[node] for node in call.all_input_nodes}
        types = {node.meta["val"].dtype for node, known in values.items() if isinstance(known, Result)}
        known = all(isinstance(known, (Result, Constant, int, float)) for known in values.values())
        return value.is_floating_point() and types == {value.dtype} and (known or _packet(call.target) in RESHAPES)

    def _is_no_op(self, packet: str, call: fx.Node, value: Tensor) -> bool:
        """Whether a call returns its input unchanged."""
        before = call.all_input_nodes[0].meta.get("val")
        if not isinstance(before, Tensor) or value.dtype != before.dtype:
            return False
        same = len(value.shape) == len(before.shape) and all(map(_is_same, value.shape, before.shape))
        return packet in _NO_OPS or (same and packet in _MAYBE_NO_OPS)


@dataclass(frozen=True)
class Call:
    """A call of torch: its arguments by their names, and the shape of its result."""

    reader: Reader
    name: str
    bound: dict[str, Any]
    shape: Shape

    def __getitem__(self, key: str) -> Any:
        return self.bound.get(key)

    def images(self, key: str, axes: int | None = None) -> Shape | None:
        """The shape of an argument if it is images, see `Reader.images`."""
        return self.reader.images(self[key], axes)

    def make(self, op: str, *inputs: Result, **more: Any) -> Result | None:
        """Add the node, if its shape is the one that the graph's rules give; else None."""
        tensors, attributes = more.pop("tensors", {}), complete(op, more)
        names = tuple(result.name for result in inputs)
        try:
            inferred = result_shape(op, attributes, [self.reader.nodes[name].shape for name in names])
        except BadFile:
            return None
        if inferred not in (None, self.shape):
            return None
        return self.reader.add(Node(self.name, op, names, self.shape, tensors, attributes))


Rule = Callable[[Call], Result | None]


def _packet(target: Any) -> str:
    return str(target._schema.name).removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else ""


def _is_same(first: Any, second: Any) -> bool:
    """Whether two sizes are the same for every number of images."""
    symbolic = [isinstance(size, torch.SymInt) for size in (first, second)]
    if any(symbolic):
        return all(symbolic) and bool(first.node.expr == second.node.expr)
    return bool(first == second)
