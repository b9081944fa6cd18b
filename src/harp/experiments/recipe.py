"""Recipes: one YAML file is one experiment, checked in full before anything runs.

A value comes from the default, then from the file, then from `--set`: the last one wins. A part such as `model`,
`pruner`, `objective` or an attack is a name with options, which are checked against the signature of the named class.
Numbers may be written `8/255`, `1e-4` or `1%`.
"""

import copy
import hashlib
import inspect
import json
import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self, get_args, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from torch import nn

from harp import models
from harp.attacks import ATTACKS, length, named
from harp.data import registry
from harp.data.dataset import DataSet
from harp.errors import RecipeError
from harp.models import MODELS, local, written_out
from harp.pruning.allocation import STRATEGIES
from harp.pruning.channels import TARIFFS
from harp.pruning.methods import PRUNERS
from harp.pruning.schedules import SCHEDULES
from harp.pruning.units import BUDGETS
from harp.system.nearest import unknown as unknown
from harp.system.numbers import number, share
from harp.system.progress import Quiet
from harp.training.objectives import OBJECTIVES

FORMAT = 2  # part of every hash: raise it if the same recipe gives another result

_NUMERAL = re.compile(r"[\d.]+(%|/[\d.]+|e[+-]?\d+)", re.IGNORECASE)  # numbers that are text to YAML
_Table = Mapping[str, Callable[..., Any]]
_SUPPLIED = ("units", "masks", "seed", "num_classes", "in_channels", "shape")  # arguments of the run, not options


def _numeral(value: Any) -> Any:
    """Read text that looks like a number as one, where the type of a value is not known."""
    return number(value) if isinstance(value, str) and _NUMERAL.fullmatch(value) else value


def _strategy(value: Any) -> Any:
    if isinstance(value, str) and value not in STRATEGIES:
        raise ValueError(unknown("strategy", value, STRATEGIES))
    return value


Number = Annotated[float, BeforeValidator(number), Field(allow_inf_nan=False)]
NotNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Positive, Field(le=1)]
Whole = Annotated[int, Field(strict=True)]
WholeIfWhole = Annotated[Number, AfterValidator(lambda x: int(x) if x == int(x) else x)]  # hashes tell 4 from 4.0
Count = Annotated[Whole, Field(ge=1)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f.][^/\\\x00-\x1f]*$")]  # part of a folder's name
_Untyped = Annotated[Any, BeforeValidator(_numeral)]
Strategy = Annotated[str | dict[str, Number], BeforeValidator(_strategy)]

# Types of arguments that are narrower than their annotations: an error now is better than one of the pruner later.
_BY_NAME = {
    "keep": Annotated[float, BeforeValidator(share)],
    "initial_rate": Share,
    "strategy": Strategy,
    "initial_strategy": Strategy,
}
_BY_TYPE: dict[Any, Any] = {
    float: Number,
    float | None: Number | None,
    int: Whole,
    int | None: Whole | None,
    int | float: WholeIfWhole,
    bool: Flag,
    Sequence[float]: list[Number],
}


class _Part(BaseModel):
    """A part with a fixed set of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        for key in value if isinstance(value, Mapping) else ():
            if key not in cls.model_fields and cls.model_config["extra"] == "forbid":
                raise ValueError(unknown("key", key, cls.model_fields))
        return value


@cache
def _schema(factory: Callable[..., Any], base: type[_Part] = _Part) -> type[_Part]:
    """The schema of a factory's arguments, without those that the run supplies."""
    try:
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except NameError:  # the factory of another package, whose annotations are imported for type checkers only
        hints = {}
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if name not in _SUPPLIED and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            hint = hints.get(name, _Untyped)
            kind: Any = _BY_NAME.get(name) or _BY_TYPE.get(hint, hint)
            if NoneType in get_args(hint):
                kind = kind | None
            fields[name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    return create_model(factory.__name__, __base__=base, **fields)


def _part(what: str, table: _Table, value: Any, *, base: type[_Part] = _Part, build: bool = False) -> Any:
    """Check a part `NAME` or `{name: ..., option: ...}` against the signature of the table's entry."""
    if not isinstance(value, (str, Mapping)):
        return value  # the type check refuses it
    options = {"name": value} if isinstance(value, str) else dict(value)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in table:
        raise ValueError(unknown(what, name, table))
    options = _schema(table[name], base).model_validate(options).model_dump(exclude_defaults=True)
    if build:
        table[name](**options)  # it checks its own values
    return {"name": name, **options}


def _attack(value: Any) -> Any:
    if isinstance(value, str) and _part("attack", ATTACKS, re.sub(r"-\d.*", "", value)):
        return value if named(value) else None  # like `pgd-20`; raises an error for other text
    return _part("attack", ATTACKS, value, build=True)


def _model(value: Any) -> Any:
    part = {"name": value} if isinstance(value, str) else value
    given = written_out(str(part.get("name"))) if isinstance(part, Mapping) else None
    if given is not None:
        if len(part) > 1:
            raise ValueError(f"{part['name']} has its own options, normalize and weights: give none")
        part = given
    elif isinstance(part, Mapping) and isinstance(part.get("weights"), str):
        part = {**part, "weights": local(part["weights"])}
    if isinstance(part, Mapping) and re.search(
        r":|\.py$", str(part.get("name"))
    ):  # a model of the user, whose types are not known
        return {key: _numeral(item) for key, item in part.items()}
    return _part("model", {name: entry.factory for name, entry in MODELS.items()}, part, base=_ForEveryModel)


ObjectivePart = Annotated[dict[str, Any], BeforeValidator(partial(_part, "objective", OBJECTIVES, build=True))]
OrPgd = BeforeValidator(lambda value: {"name": "pgd", **value} if isinstance(value, Mapping) else value)


class Data(_Part):
    """The data set, its batches, and the images that are held out of training for model selection.

    Arguments:
        name: a name of `harp list data`, or a path that ends in `.npz`.
        batch: the number of images of an optimiser step, over all processes.
        holdout: the share (below 1) or the number of training images that are held out to choose the best epoch.
        train: how many of the remaining images to train on, drawn by the seed with the same share of each class;
            default: all.
        augment: random crops, and mirror images where they are usual for the data.
        pad: pixels of zero padding that crops are taken from.
        size: the side of the images of a `folder`.
        stream: leave image files where they are and decode them when they are needed; default: if the decoded images
            would take more than a quarter of the memory.
        crop: `pad` cuts the padded image; `resized` cuts a part of the stored picture and resizes it, as usual for
            ImageNet.
        margin: with `crop: resized`: test images are resized to so many times the size, then their centre is cut.
        corrupt: how many undecodable images a training accepts: a share (at least 10 images), or a count.
    """

    name: str
    batch: Count = 128
    holdout: Positive = 0.1
    train: Count | None = None
    augment: Flag = True
    pad: Annotated[Whole, Field(ge=0)] = 4
    size: Count | None = None
    stream: Flag | None = None
    crop: Literal["pad", "resized"] = "pad"
    margin: Annotated[Number, Field(ge=1, le=4)] = 256 / 224
    corrupt: NotNegative = 0.001

    def load(self, data_dir: Path | None, *, name: str | None = None, display: Quiet | None = None) -> DataSet:
        """Load the data set, or another one by its name with the same options."""
        size, stream, margin = self.size, self.stream, self.test_margin
        return registry.load(name or self.name, data_dir, size, stream=stream, margin=margin, display=display)

    @property
    def test_margin(self) -> float | None:
        """The margin, if it is used."""
        return self.margin if self.crop == "resized" else None

    def held(self, images: int) -> int:
        """The number of images that are held out of training."""
        return round(self.holdout * images) if self.holdout < 1 else int(self.holdout)

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.crop == "resized" and self.stream is False:
            raise ValueError("crop resized reads stored pictures while training: leave out stream: false")
        if self.holdout == 1 or (self.holdout > 1 and self.holdout != int(self.holdout)):
            raise ValueError(f"holdout {self.holdout:g}: give a share below 1, or a whole number of images above 1")
        return self


class _ForEveryModel(_Part):
    """The keys of every model beside the options of its factory."""

    weights: str | None = None
    normalize: tuple[list[Number], list[Positive]] | None = None


class Model(_ForEveryModel):
    """The model; further keys are options of its factory.

    Arguments:
        name: a name of `harp list models`, `torchvision:NAME`, `timm:NAME` or `path/to/file.py:function`.
        weights: a file of weights to start from.
        normalize: `[mean, std]`, a list of one number a channel each; it becomes a part of the model.
    """

    model_config = ConfigDict(extra="allow")

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The factory's options."""
        return dict(self.model_extra or {})

    def build(self, classes: int, shape: tuple[int, int, int]) -> nn.Module:
        """The architecture, not trained."""
        return models.build(self.name, num_classes=classes, shape=shape, normalize=self.normalize, **self.options)


class Units(_Part):
    """What is pruned, what the budget counts, and limits of layers by name pattern.

    Arguments:
        kind: what is pruned: single `weights`, or whole `channels`.
        budget: what `keep` is a share of. Of weights: `weights` (default) or `macs`. Of channels: `flops` (default),
            `macs`, `parameters`, `memory`, or `latency`, the time for one image, measured on this machine when the run
            begins.
        ignore: patterns of layers that stay dense and do not count; of channels, all that they read and give stays.
        include: patterns of bare parameters that are pruned too; weights only.
        minimum: by pattern, the share of a layer that must be kept; of channels, the share of those that the layer is
            the first to read.
        maximum: the same for the share that may be kept.
        multiple: keep a multiple of so many channels, as some hardware wants it; channels only.
        whole_ends: leave what the first layer gives and what the last one reads as it is; channels only.
    """

    kind: Literal["weights", "channels"] = "weights"
    budget: str | None = None
    ignore: list[str] = []
    include: list[str] = []
    minimum: dict[str, Number] = {}
    maximum: dict[str, Number] = {}
    multiple: Count = 1
    whole_ends: Flag = False

    @model_validator(mode="after")
    def _of_this_kind(self) -> Self:
        others = {"weights": ("multiple", "whole_ends"), "channels": ("include",)}[self.kind]
        foreign = [name for name in others if getattr(self, name) != type(self).model_fields[name].default]
        if foreign:
            raise ValueError(f"{foreign[0]} has no meaning for {self.kind}")
        budgets: Collection[str] = BUDGETS if self.kind == "weights" else (*TARIFFS, "latency")
        if self.budget is not None and self.budget not in budgets:
            raise ValueError(unknown(f"budget of {self.kind}", self.budget, budgets))
        return self

    def options(self) -> dict[str, Any]:
        """Arguments for the constructor of these units: all keys that are not at their default."""
        return self.model_dump(exclude_defaults=True, exclude={"kind"})


class Optimizer(_Part):
    """The optimiser and its learning rate over time.

    Arguments:
        name: `sgd` or `adamw`.
        lr: the first learning rate.
        momentum: of SGD.
        weight_decay: of all that is trained, scores and quotas included.
        schedule: a name of the table of schedules, or a mapping with its name and its options.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    lr: Positive = 0.1
    momentum: NotNegative = 0.9
    weight_decay: NotNegative = 5e-4
    schedule: Annotated[dict[str, Any], BeforeValidator(partial(_part, "schedule", SCHEDULES, build=True))] = {
        "name": "cosine"
    }


class Stage(_Part):
    """A training: a pruner, an objective, epochs.

    Arguments:
        name: the name of the stage's folder; no two stages have the same.
        pruner: a name of `harp list methods`, or a mapping with its name and its options, such as `keep`.
        epochs: the number of passes over the training images.
        objective: the stage's own, with its name and its threat: nothing is taken over from the recipe's; default: the
            recipe's.
        optimizer: the optimiser of this stage.
        accumulate: the number of parts that a batch is split into, to save memory.
        compact: of a `fixed` stage: train without the channels that the masks leave unread, which changes nothing but
            rounding; default: if that is faster.
        select: keep the weights of the `best` epoch on the held-out images (under attack, if the objective has one), or
            of the `last`.
    """

    name: Name
    pruner: Annotated[dict[str, Any], BeforeValidator(partial(_part, "pruner", PRUNERS))]
    epochs: Annotated[Whole, Field(ge=0)]
    objective: ObjectivePart | None = None
    optimizer: Optimizer = Optimizer()
    accumulate: Count = 1
    compact: Flag | None = None
    select: Literal["best", "last"] = "best"

    @property
    def prunes(self) -> bool:
        """Whether it chooses what is pruned."""
        return self.pruner["name"] not in ("dense", "fixed")


class Evaluation(_Part):
    """The evaluation of the finished network on the test set.

    Arguments:
        attacks: a list of names such as `fgsm`, `pgd-20`, `pgd-20x5` or `autoattack`, or of mappings with a name and
            options.
        epsilon: of the attacks that are just a name; default: the objective's.
        examples: how many test images, drawn by the seed; default: all.
    """

    attacks: list[Annotated[str | dict[str, Any], BeforeValidator(_attack)]] = ["pgd-20"]
    epsilon: NotNegative | None = None
    examples: Count | None = None


class Recipe(_Part):
    """An experiment.

    Arguments:
        name: what a run's folder is called by.
        description: what it is, for `harp list`.
        seed: of everything that is drawn: first weights, batches, held-out images, attacks.
        data: the data set and its batches.
        model: the architecture, its options and its weights.
        units: what is pruned and what the budget counts.
        objective: what all stages train under, if they don't say otherwise.
        stages: the trainings, one after the other.
        evaluate: the attacks at the end, and on how many images.
        precision: `32-true`, `bf16-mixed`, or `auto`: bfloat16 where a GPU computes in it.
        sync_norms: with several processes, let batch norms see the images of all of them.

    Example:
        recipe = harp.Recipe(
            name="mine",
            data={"name": "digits"},
            model="tinynet",
            stages=[{"name": "prune", "pruner": {"name": "harp", "keep": 0.1}, "epochs": 2}],
        )
        print(recipe.to_yaml())
    """

    name: Name
    description: str = ""
    seed: Whole = 0
    data: Data
    model: Annotated[Model, BeforeValidator(_model)]
    units: Units = Units()
    objective: Annotated[ObjectivePart, OrPgd] = {"name": "pgd"}
    stages: list[Stage] = Field(min_length=1)
    evaluate: Evaluation = Evaluation()
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    sync_norms: Flag = True  # so that the number of processes does not change the result

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: names must differ, got {', '.join(names)}")
        pruners = ["dense", *(stage.pruner["name"] for stage in self.stages)]
        if self.units.kind == "channels" and sum(name not in ("dense", "fixed") for name in pruners) > 1:
            raise ValueError("stages: channels are cut out after the stage that prunes them, so there can be only one")
        for index, stage in enumerate(self.stages):
            if stage.compact and stage.pruner["name"] != "fixed":
                raise ValueError(f"stages[{index}]: compact is for 'fixed' masks, not for {stage.pruner['name']!r}")
        for index, pair in enumerate(pairwise(pruners)):
            if pair == ("dense", "fixed"):
                raise ValueError(f"stages[{index}]: 'fixed' keeps the masks of the stage before it, which has none")
        if self.evaluate.epsilon is not None:
            length("evaluate.epsilon", self.evaluate.epsilon, self.objective.get("norm", "linf"))
        return self

    def stage_objective(self, stage: Stage) -> dict[str, Any]:
        """The objective that a stage trains under."""
        return self.objective if stage.objective is None else stage.objective

    def identity(self, stages: int, *contents: str) -> str:
        """The hash of all that the result of the first stages depends on; `contents` are hashes of files they read.

        Defaults are left out, so that a new option does not change old hashes, and so are keys that these stages don't
        use: names, the objective of other stages, limits while nothing is pruned.
        """
        done = self.stages[:stages]
        used = {"seed", "data", "model", "precision", "sync_norms"} | {
            "units" for stage in done if stage.pruner["name"] != "dense"
        }
        facts = self.model_dump(mode="json", exclude_defaults=True, include=used)
        facts["model"].pop("weights", None)  # a path; the content is in `contents`
        for key in ("stream", "corrupt"):
            facts["data"].pop(key, None)  # they change no result
        steps = [stage.model_dump(mode="json", exclude_defaults=True, exclude={"name"}) for stage in done]
        for stage, step in zip(done, steps, strict=True):
            step["objective"] = self.stage_objective(stage)
            method = PRUNERS[stage.pruner["name"]]
            step["pruner"]["name"] = method.same_as or stage.pruner["name"]
            if method.revision > 1:
                step["pruner"]["revision"] = method.revision
        text = json.dumps([FORMAT, facts, steps, contents], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_yaml(self) -> str:
        """The recipe as YAML, without defaults."""
        # Non-ASCII characters are escaped: YAML reads some of them as line breaks.
        return yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=True), sort_keys=False)


class Axes(_Part):
    """What a recipe file says for short names and options; not a part of the recipe itself.

    Arguments:
        budgets: the kept share for a number in short names.
        channels: options of the file's own pruner that differ if channels are pruned.
        name_objective: names include the objective, even the file's own.
    """

    budgets: dict[str, Share] = {}
    channels: dict[str, Any] = {}
    name_objective: Flag = False


_LONGEST_MESSAGE = 500
_LARGEST = 1 << 18  # bytes of a file
_DEEPEST = 50
_MOST_NODES = 1 << 16  # each use of an anchor counts all that it stands for


class _Loader(yaml.SafeLoader):
    """YAML in which a repeated key is an error, as the standard demands, and anchors can't make a small text large.

    Deep nesting is refused early: the parser needs quadratic time for it.
    """

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.YAMLError(f"its values are nested more than {_DEEPEST} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=node.start_mark)
                keys.add(key.value)
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _nodes_in(node, {}) > _MOST_NODES:
            raise yaml.YAMLError(f"its anchors stand for more than {_MOST_NODES:,} values")
        return node


def _nodes_in(node: yaml.Node, counted: dict[int, float]) -> float:
    """How many nodes a node stands for; infinite if it is inside itself."""
    if id(node) not in counted:
        counted[id(node)] = math.inf  # until it is known
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = (part for item in parts for part in (item if isinstance(item, tuple) else (item,)))
        counted[id(node)] = 1 + sum(_nodes_in(part, counted) for part in inner)
    return counted[id(node)]


def read(text: str | Path, where: str) -> Any:
    """Plain data from YAML text or a file: no dates or sets, and each use of an anchor is a copy."""
    try:
        if isinstance(text, Path):
            if text.stat().st_size > _LARGEST:
                raise RecipeError(f"{where} can't be read: it has more than {_LARGEST:,} bytes")
            text = text.read_text(encoding="utf-8")
        return json.loads(json.dumps(yaml.load(text, _Loader)))
    except (yaml.YAMLError, OSError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{where} can't be read: {' '.join(str(error).split())[:_LONGEST_MESSAGE]}") from error


def read_file(path: Path) -> dict[str, Any]:
    """The content of a recipe file, with its name."""
    content = read(path, str(path))
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is no recipe: it must be a mapping with data, model and stages")
    return {"name": path.stem, **content}


def as_axes(content: Mapping[str, Any]) -> Axes:
    """The axes of a recipe file."""
    try:
        return Axes.model_validate(content.get("axes", {}))
    except ValidationError as error:
        raise RecipeError(_one_line(error, "axes")) from error


def parse(content: Mapping[str, Any], changes: Sequence[str] = ()) -> Recipe:
    """Check the content of a recipe, with changes applied."""
    resolved = copy.deepcopy(dict(content))
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
    node: Any = [content]
    place: Any = 0
    for key in path.strip().split("."):
        if isinstance(node[place], str):  # a part that is written as a name only
            node[place] = {"name": node[place]}
        node, place = node[place], key
        if isinstance(node, dict):
            node.setdefault(key, {})  # a part that is at its default in the file
            continue
        items = enumerate(node if isinstance(node, list) else ())
        place = next((i for i, x in items if key == str(i) or (isinstance(x, dict) and x.get("name") == key)), None)
        if place is None:
            raise RecipeError(f"--set {change!r}: there is no {key!r} to set")
    node[place] = read(text, f"--set {change!r}")


def _one_line(error: ValidationError, *inside: str) -> str:
    """The first error of a validation, with its path."""
    first = error.errors()[0]
    places = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in (*inside, *first["loc"])]
    path = "".join(places).removeprefix(".")
    got = "" if first["type"] in ("value_error", "missing") else f" (got {reprlib.repr(first['input'])})"
    return " ".join(f"recipe: {path}{': ' * bool(path)}{first['msg'].removeprefix('Value error, ')}{got}".split())
