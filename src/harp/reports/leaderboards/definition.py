"""A model's definition as one Python file that needs nothing but torch.

The source of our networks is put together from the modules that define them, without what a network has no use for, so
that what is shipped is what was trained. A model from a file of the user's keeps that file, beside the definition.
"""

import ast
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harp.errors import ModelError
from harp.experiments.recipe import Model
from harp.models import MODELS, source_file
from harp.reports import templating

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Definition:
    """The text of the definition, and the file of the user's that it imports, if there is one."""

    text: str
    source: str | None = None


def define(part: Model, title: str, name: str, classes: int, shape: Shape, options: Mapping[str, Any]) -> Definition:
    """The file that defines class `name`: the model of a recipe with its normalisation inside, and `load`."""
    facts: dict[str, Any] = {"num_classes": classes, "in_channels": shape[0], "shape": shape}
    file = source_file(part.name)
    if file is not None:
        function = part.name.rpartition(":")[2]
        text = _user_text(Path(file), part.name)
        taken = _parameters(text, function, part.name)
        imports, body = {f"from {source_name(name)} import {function}"}, ""
        call = _call(function, taken, facts, options)
    elif part.name in MODELS:
        factory = MODELS[part.name].factory
        text = None
        imports, body = _inlined(factory)
        call = _call(factory.__name__, list(inspect.signature(factory).parameters), facts, options)
    else:
        raise ModelError(
            f"{part.name}: RobustBench wants the definition as code of its own: put a function that builds the model "
            "without the library into a file, and train with model: file.py:function"
        )
    lines = {*imports, "import torch", "from torch import Tensor", "from torch import nn"}
    head = "\n".join(sorted(lines, key=lambda line: (line.split()[1], line.startswith("from"), line)))
    title = title.replace("\\", "").replace('"', "'")  # it becomes part of a docstring
    values = {"title": title, "imports": head, "body": body, "name": name, "call": call, "normalize": part.normalize}
    return Definition(templating.render("definition.py.jinja", **values), text)


def source_name(name: str) -> str:
    """The name of the module that holds the user's file."""
    return f"{name}_source"


def _call(function: str, taken: Sequence[str], facts: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """The call that builds the network, as text."""
    arguments = {key: value for key, value in facts.items() if key in taken} | dict(options)
    return f"{function}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _user_text(file: Path, spec: str) -> str:
    try:
        return Path(os.path.expanduser(file)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"the model {spec!r} needs its file, which can't be read: {file}") from error


def _parameters(text: str, function: str, spec: str) -> list[str]:
    """The parameters of a function or class at the top of a file, without running the file."""
    try:
        nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    except SyntaxError as error:
        raise ModelError(f"the model {spec!r}: its file is not Python of this version (line {error.lineno})") from error
    node = nodes.get(function)
    if isinstance(node, ast.ClassDef):
        methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
        node = next((method for method in methods if method.name == "__init__"), None)
    if not isinstance(node, ast.FunctionDef):
        raise ModelError(f"the model {spec!r}: define {function} in the file itself, by `def` or with an __init__")
    return [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]


def _inlined(factory: Callable[..., Any]) -> tuple[set[str], str]:
    """The imports and the definitions that a factory of ours needs, and no others, in the order of their modules."""
    imports: dict[str, str] = {}
    parts: dict[str, tuple[ast.stmt, str]] = {}
    _gather(factory.__module__, imports, parts)
    needed, pending = set(), [factory.__name__]
    while pending:
        name = pending.pop()
        if name not in needed and (name in parts or name in imports):
            needed.add(name)
            nodes = ast.walk(parts[name][0]) if name in parts else iter(())
            pending += [node.id for node in nodes if isinstance(node, ast.Name)]
    texts = [text for name, (_, text) in parts.items() if name in needed]
    return {line for name, line in imports.items() if name in needed}, "\n\n" + "\n\n\n".join(texts) + "\n"


def _gather(module: str, imports: dict[str, str], parts: dict[str, tuple[ast.stmt, str]]) -> None:
    """What a module of ours imports and defines, by name; modules of ours that it imports come first."""
    source = inspect.getsource(sys.modules[module])
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("harp."):
            if node.module == "harp.errors":  # the only thing of ours that the models raise, and it is a ValueError
                alias = "ModelError = ValueError"
                parts["ModelError"] = (ast.parse(alias).body[0], alias)
            else:
                _gather(str(node.module), imports, parts)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias_node in node.names:
                single = ast.ImportFrom(node.module, [alias_node], 0) if isinstance(node, ast.ImportFrom) else None
                text = ast.unparse(single or ast.Import([alias_node]))
                imports[alias_node.asname or alias_node.name.partition(".")[0]] = text
        else:
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
            text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
            parts |= dict.fromkeys(_defined(node), (node, text))


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
