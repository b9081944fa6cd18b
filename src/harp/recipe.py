"""Recipes: one YAML file is one experiment, checked in full before anything runs.

What a value is decided by has one order: the default, then the file, then `--set`. An open part (`pruner`, `objective`,
an attack) is a name with options; the options are the arguments of what the name stands for, checked against its
signature. Numbers may be written `8/255`, `1e-4` or `1%`.
"""

import difflib
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError, create_model, model_validator

from harp.attacks import ATTACKS, named
from harp.errors import HarpError, RecipeError
from harp.objectives import OBJECTIVES
from harp.pruners import PRUNERS

SHIPPED = Path(__file__).parent / "recipes"
FORMAT = 1  # part of every hash: raise it when the same recipe would give another result


def number(value: Any) -> Any:
    """Read `8/255`, `1e-4` and `1%` as numbers; leave everything else to the type check."""
    if not isinstance(value, str):
        return value
    text = value.strip().replace("_", "")
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        above, _, below = text.partition("/")
        return float(above) / float(below) if below else float(above)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{value!r} is no number: write it like 0.01, 1%, 8/255 or 1e-4") from error


def unknown(what: str, value: str, known: Iterable[str]) -> str:
    """One line for a word that is not in a table, with the nearest that is."""
    names = list(known)
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"one of {', '.join(names)}"
    return f"unknown {what} {value!r}: {hint}"


Number = Annotated[float, BeforeValidator(number)]


class _Part(BaseModel):
    """A part with a fixed set of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        for key in value if isinstance(value, Mapping) else ():
            if key not in cls.model_fields:
                raise ValueError(unknown("key", key, cls.model_fields))
        return value


def _as_recipe_type(annotation: Any) -> Any:
    """The type of an argument as a recipe writes it: floats may be `8/255`, mappings are plain dictionaries."""
    if annotation is float:
        return Number
    if get_origin(annotation) in (Union, UnionType):
        return Union[tuple(_as_recipe_type(choice) for choice in get_args(annotation))]  # noqa: UP007 (dynamic)
    if get_origin(annotation) in (Mapping, dict):
        return dict[str, _as_recipe_type(get_args(annotation)[1])]  # type: ignore[misc]  # built at run time
    return annotation


def _options(factory: Callable[..., Any]) -> type[_Part]:
    """The schema of a factory's arguments; those that the run supplies (`units`, `masks`) are not options."""
    hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if name not in ("units", "masks"):
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[name] = (_as_recipe_type(hints[name]), default)
    return create_model(factory.__name__, __base__=_Part, **fields)


def _in(what: str, table: Mapping[str, Callable[..., Any]]) -> BeforeValidator:
    """Check a part `{name: ..., option: ...}` whose options belong to the table's entry; just a name is fine too."""

    def check(value: Any) -> dict[str, Any]:
        part = {"name": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
        name = part.pop("name", None)
        if name not in table:
            raise ValueError(unknown(what, name, table))
        options = _options(table[name]).model_validate(part)
        return {"name": name, **options.model_dump(exclude_defaults=True)}

    return BeforeValidator(check)


PrunerPart = Annotated[dict[str, Any], _in("pruner", PRUNERS)]
ObjectivePart = Annotated[dict[str, Any], _in("objective", OBJECTIVES)]
AttackPart = Annotated[dict[str, Any], _in("attack", ATTACKS)]


def _check_attack(value: Any) -> Any:
    if isinstance(value, str):
        try:
            named(value)
        except HarpError as error:
            raise ValueError(str(error)) from error
        return value
    return TypeAdapter(AttackPart).validate_python(value)


class Data(_Part):
    """The data set, how it is cut into batches, and what is held out of training for model selection."""

    name: str
    batch: int = 128
    holdout: Number = 0.1  # a share of the training set, or a count
    augment: bool = True
    pad: int = 4
    size: int | None = None


class Model(BaseModel):
    """The model; every other key is an option of its factory."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    weights: str | None = None
    normalize: tuple[list[Number], list[Number]] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The factory's options."""
        return {
            key: number(value) if isinstance(value, str) else value for key, value in (self.model_extra or {}).items()
        }


class Units(_Part):
    """Limits per layer, by name pattern."""

    ignore: list[str] = []
    include: list[str] = []
    minimum: dict[str, Number] = {}
    maximum: dict[str, Number] = {}


class Optimizer(_Part):
    """The optimiser and its learning rate over time."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: Number = 0.1
    momentum: Number = 0.9
    weight_decay: Number = 5e-4
    schedule: Literal["cosine", "constant"] = "cosine"


class Stage(_Part):
    """One training: a pruner, an objective, so many epochs."""

    name: str
    pruner: PrunerPart
    epochs: int
    objective: ObjectivePart | None = None  # the recipe's, unless the stage has its own
    optimizer: Optimizer = Optimizer()
    accumulate: int = 1
    select: Literal["best", "last"] = "best"  # by accuracy under attack on the held-out images

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.epochs < 0 or self.accumulate < 1 or self.optimizer.lr <= 0:
            raise ValueError(
                f"epochs {self.epochs}, accumulate {self.accumulate}, lr {self.optimizer.lr:g}: must be positive"
            )
        return self


class Evaluation(_Part):
    """What the finished network is measured by, once, on the test set."""

    attacks: list[Annotated[str | dict[str, Any], BeforeValidator(_check_attack)]] = ["pgd-20"]
    epsilon: Number | None = None  # of attacks named by text; default: the objective's
    examples: int | None = None  # drawn by the recipe's seed; default: all


class Recipe(_Part):
    """An experiment."""

    name: str
    description: str = ""
    seed: int = 0
    data: Data
    model: Model
    units: Units = Units()
    objective: ObjectivePart = {"name": "pgd"}
    stages: list[Stage]
    evaluate: Evaluation = Evaluation()
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if not self.stages:
            raise ValueError("stages: at least one is needed")
        if self.data.batch < 1 or self.data.holdout < 0:
            raise ValueError(f"data.batch {self.data.batch}, data.holdout {self.data.holdout:g}: must be positive")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: names must differ, got {', '.join(names)}")
        if self.stages[0].pruner["name"] == "fixed":
            raise ValueError("stages[0]: 'fixed' keeps the masks of an earlier stage, and there is none")
        return self

    def stage_objective(self, stage: Stage) -> dict[str, Any]:
        """The objective that a stage trains under."""
        return self.objective if stage.objective is None else stage.objective

    def identity(self, stages: int, *contents: str) -> str:
        """The hash of all that the first stages' result depends on; `contents` are hashes of files they read.

        Defaults are left out, so that a new option does not disown old results; names are left out too.
        """
        kept = self.model_dump(
            mode="json", exclude_defaults=True, include={"seed", "data", "units", "objective", "precision"}
        )
        model = self.model.model_dump(mode="json", exclude_defaults=True, exclude={"weights"})
        done = [s.model_dump(mode="json", exclude_defaults=True, exclude={"name"}) for s in self.stages[:stages]]
        text = json.dumps([FORMAT, kept, model, done, contents], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_yaml(self) -> str:
        """The recipe as it was resolved, defaults left out."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=True), sort_keys=False)


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {path.relative_to(SHIPPED).with_suffix("").as_posix(): path for path in sorted(SHIPPED.rglob("*.yaml"))}


def load(source: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file or by its shipped name, and apply changes of the form `a.b=c`."""
    path = Path(source)
    if not path.is_file():
        recipes = shipped()
        if str(source) not in recipes:
            raise RecipeError(f"no recipe file {source}, and " + unknown("shipped recipe", str(source), recipes))
        path = recipes[str(source)]
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"{path} can't be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is no recipe: it must be a mapping with name, data, model and stages")
    content.setdefault("name", path.stem)
    return parse(content, changes)


def parse(content: Mapping[str, Any], changes: Sequence[str] = ()) -> Recipe:
    """Check the content of a recipe, with changes applied."""
    resolved = json.loads(json.dumps(content))  # our own copy, and proof that it is plain data
    for change in changes:
        _change(resolved, change)
    try:
        return Recipe.model_validate(resolved)
    except ValidationError as error:
        raise RecipeError(_one_line(error)) from error


def _change(content: dict[str, Any], change: str) -> None:
    path, equals, text = change.partition("=")
    if not equals:
        raise RecipeError(f"--set {change!r}: write it like stages.prune.epochs=5")
    node: Any = content
    keys = path.strip().split(".")
    for key in keys[:-1]:
        place = _place(node, key, change)
        if isinstance(node[place], str):  # an open part written as just its name
            node[place] = {"name": node[place]}
        node = node[place]
    node[_place(node, keys[-1], change)] = yaml.safe_load(text)


def _place(node: Any, key: str, change: str) -> int | str:
    """Where a key points: in a mapping to itself, in a list to a position or to the item of that name."""
    if isinstance(node, dict):
        node.setdefault(key, {})
        return key
    for index, item in enumerate(node if isinstance(node, list) else ()):
        if key == str(index) or (isinstance(item, dict) and item.get("name") == key):
            return index
    raise RecipeError(f"--set {change!r}: there is no {key!r} to set")


def _one_line(error: ValidationError) -> str:
    """The first problem of a validation, with its path."""
    problems = error.errors()
    first = problems[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    message = first["msg"].removeprefix("Value error, ")
    shown = "" if first["type"] in ("value_error", "missing") else f" (got {first['input']!r})"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return " ".join(f"recipe: {path + ': ' if path else ''}{message}{shown}{more}".split())
