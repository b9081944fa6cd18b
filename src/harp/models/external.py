"""Models of torchvision and timm, and from functions in Python files of the user."""

import contextlib
import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from harp.errors import HarpError, MissingExtra, ModelError
from harp.system.files import reason

Shape = tuple[int, int, int]
Options = dict[str, Any]

_VISION = 'pip install "harp-prune[vision]"'
_siblings: set[str] = set()  # modules that the latest model file imported from its own folder
_operators: list[torch.library.Library] = []  # torch forgets operators when their Library is collected


def from_torchvision(name: str, num_classes: int, shape: Shape, options: Options) -> nn.Module:
    """The classification model `name` of torchvision."""
    models = import_torchvision().models
    known = models.list_models(module=models)
    if name not in known:
        raise ModelError(f"torchvision has no classification model {name!r}{nearest(name, known)}")
    if shape[0] != 3:
        raise ModelError(
            f"torchvision:{name} takes images of 3 channels, the data has {shape[0]}: "
            "use a timm model or a function in a file of your own"
        )
    with explained(f"can't build torchvision:{name}"):
        model: nn.Module = models.get_model(name, num_classes=num_classes, **options)
    return model


def from_timm(name: str, num_classes: int, shape: Shape, options: Options) -> nn.Module:
    """The model `name` of timm, for the data's channel count."""
    import_torchvision()  # timm imports it, and must find one that works
    try:
        import timm
    except ImportError as error:
        raise MissingExtra(f"timm can't be imported ({reason(error)}): {_VISION}") from error
    if not timm.is_model(name):
        raise ModelError(f"timm has no model {name!r}{nearest(name, timm.list_models())}")
    with explained(f"can't build timm:{name}"):
        model: nn.Module = timm.create_model(name, num_classes=num_classes, in_chans=shape[0], **options)
    return model


def from_file(file: Path, spec: str, num_classes: int, shape: Shape, options: Options) -> nn.Module:
    """What the function of a `path/to/file.py:function` returns. The file is Python code, and it runs."""
    name = spec.rpartition(":")[2]
    if not file.is_file():
        raise ModelError(f"there is no file {file}, which the model {spec!r} should come from")
    with explained(f"can't import {file}", file):
        module = _load(file)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise ModelError(f"{file} has no function {name!r}{nearest(name, functions)}")
    with explained(f"{spec} fails", file):
        model = call(function, spec, num_classes, shape, options)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} returns a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def call(factory: Callable[..., Any], name: str, num_classes: int, shape: Shape, options: Options) -> Any:
    """Call `factory` with the options, and with those facts of the data that its parameters name."""
    facts: Options = {"num_classes": num_classes, "in_channels": shape[0], "shape": shape}
    signature = inspect.signature(factory)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [key for key, parameter in signature.parameters.items() if parameter.kind in by_name]
    accepted = [key for key in named if key not in facts]
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for option in options:
        if option in facts:
            raise ModelError(f"{name}: {option} is not an option, it comes from the data")
        if option not in accepted and not anything:
            raise ModelError(f"{name} has no option {option!r}: it takes {', '.join(accepted) or 'none'}")
    arguments = {key: value for key, value in facts.items() if key in named} | options
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ModelError(f"{name}: {error}: give it a default, or set it as an option of the model") from error
    return factory(**arguments)


@contextlib.contextmanager
def importable(spec: str) -> Iterator[None]:
    """Inside this context, modules in the folder of a `path/to/file.py:function` can be imported.

    They are imported again each time: another model's `layers.py` must not be taken for this one's.
    """
    file = file_of(spec)
    if file is None:
        yield
        return
    folder = file.parent
    for name in _siblings:
        sys.modules.pop(name, None)
    _siblings.clear()
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        _siblings.update(name for name in set(sys.modules) - before if _lies_in(folder, name))
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def explained(what: str, file: Path | None = None) -> Iterator[None]:
    """Turn any error inside this context into a `ModelError` of one line that starts with `what`."""
    try:
        yield
    except HarpError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if file and frame.filename == str(file)]
        if isinstance(error, SyntaxError):
            lines.append(error.lineno)
        where = f" (line {lines[-1]})" if lines else ""
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelError(f"{what}: {message}{where}") from error


def file_of(spec: str) -> Path | None:
    """The Python file that `spec` names, or None where it has another form."""
    file, _, function = spec.rpartition(":")
    if spec.endswith(".py"):
        raise ModelError(f"the model {spec!r} names a file but no function in it: write {spec}:FUNCTION")
    return Path(os.path.expanduser(file)).resolve() if file.endswith(".py") and function else None


def nearest(name: str, known: Iterable[str]) -> str:
    """The question "did you mean ...?", or an empty text if no known name is similar."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {matches[0]!r}?" if matches else ""


def _load(file: Path) -> ModuleType:
    name = "_harp_model_" + hashlib.sha256(str(file).encode(errors="surrogateescape")).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch.compile look the module up by its name
    try:
        # Compiled from the source, not from a cached .pyc, so that what runs is what the file says now.
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _lies_in(folder: Path, name: str) -> bool:
    """Whether module `name` was found through `folder` (and not, say, in an environment below it)."""
    package = sys.modules.get(name.partition(".")[0])
    places = [getattr(package, "__file__", None), *getattr(package, "__path__", ())]
    return any(place and Path(place).resolve().parent == folder for place in places)


def import_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled operators don't fit the installed torch.

    A torchvision built for CUDA can't load its operators into a CPU torch, and its import fails because it registers
    them. Models need none of them, so it is enough to declare the two that it registers.
    """
    try:
        return importlib.import_module("torchvision")
    except ImportError as error:
        raise MissingExtra(f"torchvision can't be imported ({reason(error)}): {_VISION}") from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise ModelError(f"torchvision can't be imported: {reason(error)}") from error
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    if not _operators:
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types here
        for operator in ("nms", "qnms"):
            schema = operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(schema)  # type: ignore[no-untyped-call]  # the same
        _operators.append(library)
    with explained("torchvision can't be imported"):
        return importlib.import_module("torchvision")
