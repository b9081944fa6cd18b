"""Recipes from a base and a few choices: what `harp run BASE --method ... --keep ... --objective ...` stands for.

A base is a recipe file: data, model, training and its own method. A `Choice` puts another method, budget or objective
in their place. `stages.py` lays out the stages, with the same epochs for every method; options of the base's own pruner
hold for methods of its class; another objective keeps the threat. Without a choice a recipe is what its file says.

A short name is a base and a choice in one word:

    BASE/METHOD[-STRATEGY][-OBJECTIVE]-PRUNED             cifar10/vgg16/hydra-lamp-trades-99.9
    BASE/METHOD[-STRATEGY][-OBJECTIVE]-channels-FACTORx   fashion/harp-channels-4x

PRUNED is in per cent of the weights, FACTOR what the FLOPs are divided by.
"""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from harp.errors import RecipeError
from harp.experiments import stages as pipeline
from harp.experiments.recipe import Axes, Recipe, as_axes, number, parse, read, read_file, unknown
from harp.pruning.allocation import STRATEGIES
from harp.pruning.channels import TARIFFS
from harp.pruning.methods import PRUNERS
from harp.pruning.units import BUDGETS
from harp.training import objectives
from harp.training.free_at import FreeTraining
from harp.training.objectives import OBJECTIVES

SHIPPED = Path(__file__).parent / "recipes"
_NO_METHODS = ("dense", "fixed")  # pruners that prune nothing by themselves

_WORDS = {"flying-bird-plus": "flying-bird+", "harp-s2ap": "harp:sharpness=0.01"}  # methods that names spell otherwise
_END = r"channels-(?P<factor>\d+(\.\d+)?)x|(?P<pruned>\d+(\.\d+)?)"
_SHORT = re.compile(rf"(?P<method>.+?)(-(?P<objective>{'|'.join(OBJECTIVES)}))?-(?P<end>{_END})")
_OBJECTIVE_TITLES = {
    "pgd": "PGD training",
    "trades": "TRADES",
    "mart": "MART",
    "natural": "natural training",
    "free": "Free-AT",
    "fast": "fast adversarial training",
}
_METHOD_TITLES = {
    "harp": "HARP",
    "harp-r": "HARP-r, the ablation that learns rates only",
    "harp-s": "HARP-S, the ablation that learns scores only",
    "harp-erk": "HARP, its rates starting from ERK's",
    "harp-lamp": "HARP, its rates starting from LAMP's",
    "harp-s2ap": "HARP with S2AP's sharpness-aware scores",
    "tandem": "Tandem, our own: weights and scores together",
    "hydra": "HYDRA at one rate for all layers",
    "hydra-erk": "HYDRA at ERK's rates",
    "hydra-lamp": "HYDRA at LAMP's rates",
    "hydra-igq": "HYDRA at ideal gas quotas",
    "hydra-boosted": "HYDRA at ideal gas quotas, first and last boosted",
    "r-admm": "R-ADMM at one rate for all layers",
    "r-admm-erk": "R-ADMM at ERK's rates",
    "r-admm-lamp": "R-ADMM at LAMP's rates",
    "bcs-p": "BCS-P, sparse from scratch",
    "bcs-p-erk": "BCS-P at ERK's rates",
    "bcs-p-lamp": "BCS-P at LAMP's rates",
    "mad": "MAD",
    "dnr": "DNR, reconstructed from the publication",
    "anp-vs": "ANP-VS",
    "flying-bird": "Flying Bird",
    "flying-bird-plus": "Flying Bird+",
    "twinrep": "TwinRep",
    "magnitude": "least weight magnitude (LWM) at one rate for all layers",
    "lamp": "LAMP, one-shot",
    "erk": "magnitude at ERK's rates",
    "global": "global magnitude",
    "random": "random masks",
}


@dataclass(frozen=True)
class Choice:
    """What takes the place of a base's own; what is not given stays as it is."""

    method: str | None = None  # NAME, NAME+STRATEGY or NAME:option=value,option=value
    strategy: str | None = None
    keep: str | None = None
    objective: str | None = None
    channels: bool = False

    def over(self, other: "Choice") -> "Choice":
        """This choice, and what it leaves open as in the other one."""
        strategy = self.strategy if self.method or self.strategy else other.strategy
        given = {key: value or getattr(other, key) for key, value in vars(self).items()}
        return Choice(**{**given, "strategy": strategy})


def shipped() -> dict[str, Path]:
    """The bases that come with the package, by name."""
    return {path.relative_to(SHIPPED).with_suffix("").as_posix(): path for path in sorted(SHIPPED.rglob("*.yaml"))}


def load(source: str | Path, changes: Sequence[str] = (), choice: Choice = Choice()) -> Recipe:  # noqa: B008 (frozen)
    """Read a recipe from a file or by its name, put a choice in place, then apply changes of the form `a.b=c`.

    Arguments:
        source: a file, or a name (`harp list recipes`).
        changes: texts such as "stages.prune.epochs=5".
        choice: another method, budget or objective than the recipe's own.

    Example:
        recipe = harp.load_recipe("demo", ["seed=1"])
    """
    return parse(content(source, choice), changes)


def content(source: str | Path, choice: Choice = Choice()) -> dict[str, Any]:  # noqa: B008 (frozen)
    """The content of a recipe by its file or its name, with a choice in place."""
    if Path(source).is_file():
        return with_choice(read_file(Path(source)), choice)
    found = _named(str(source))
    if found is None:
        raise RecipeError(f"no recipe file {source}, and {unknown('recipe', str(source), near(str(source)))}")
    path, short = found
    return with_choice(read_file(path), choice.over(short))


def is_recipe(source: str) -> bool:
    """Whether this is the name of a recipe, or a YAML file."""
    return _named(source) is not None or Path(source).suffix in (".yaml", ".yml")


def near(source: str) -> list[str]:
    """Names that may have been meant: the bases, and short names of the base that this one begins with."""
    base, found = base_of(source), shipped()
    if base is None:
        return list(found)
    own = read_file(found[base])
    end = re.search(_END, source.removeprefix(base))
    budgets = {*as_axes(own).budgets, *([end[0]] if end else [])}
    losses = ["", *(f"-{name}" for name in OBJECTIVES)]
    return [f"{base}/{method}{loss}-{budget}" for method in _method_words() for loss in losses for budget in budgets]


def with_choice(content: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """The content of a recipe file with a choice in place, without what only choices need."""
    axes, base = as_axes(content), {key: value for key, value in content.items() if key != "axes"}
    return base if choice == Choice() else _composed(base, axes, choice)


def _composed(base: dict[str, Any], axes: Axes, choice: Choice) -> dict[str, Any]:
    resolved = parse(base)  # what is wrong with the file is said before anything else
    parts = pipeline.parts([{**stage, "pruner": _part(stage["pruner"])} for stage in base["stages"]])
    own = dict(parts.prune["pruner"])
    units = dict(base.get("units", {}))
    if choice.channels and resolved.units.kind == "weights":
        if choice.keep is None:
            raise RecipeError(f"{base['name']}: channels need a budget of their own, like --keep 25% of the FLOPs")
        own |= axes.channels
        units |= {"kind": "channels", "budget": "flops"}
    name, options = read_method(choice.method or own["name"], choice.strategy)
    keep = share(own.get("keep") if choice.keep is None else choice.keep)
    objective = _objective(base, resolved, choice.objective)
    if objective["name"] == "free" != resolved.objective["name"]:
        parts = _replayed(parts, bool(PRUNERS[name].finetuning))
    pruner = {"name": name, **inherited(name, own), **options, "keep": keep}
    stages = pipeline.stages(pruner, *parts, objective)
    pipeline.check_learns(name, name, stages)
    evaluate = dict(base.get("evaluate", {}))
    if objective["name"] == "natural":
        evaluate.setdefault("epsilon", _epsilon(resolved))
    words = _Words(resolved, axes, method_word(name, options), objective["name"], keep, units)
    return {
        **base,
        "name": words.name(),
        "description": words.description(),
        "units": units,
        "objective": objective,
        "stages": stages,
        "evaluate": evaluate,
    }


# Methods


def methods() -> list[str]:
    """The methods that prune, those of other packages included."""
    return [name for name in PRUNERS if name not in _NO_METHODS]


def is_method(name: str) -> bool:
    """Whether a name stands for a method that prunes."""
    return name in PRUNERS and name not in _NO_METHODS


def read_method(text: str, strategy: str | None = None, others: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """The name and the options of a method, written `NAME`, `NAME+STRATEGY`, `NAME:option=value,...` or both.

    `others` are names that stand for no pruner, such as a comparison's dense network.
    """
    head, _, tail = text.strip().partition(":")
    pairs = [pair.partition("=") for pair in tail.split(",")] if tail else []
    for key, equals, value in pairs:
        if not (key.strip() and equals and value.strip()):
            raise RecipeError(f"method {text!r}: write options like NAME:option=value,option=value")
    options = {key.strip(): read(value, f"method {text!r}") for key, _, value in pairs}
    if "keep" in options:
        raise RecipeError(f"method {text!r}: keep is given apart from the method, the same for all")
    name, options = spread(text, head.strip(), options, others)
    return name, options if strategy is None else _strategy(text, name, strategy, options)


def spread(label: str, text: str, options: dict[str, Any], others: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The method's name, and its own options with the strategy that may follow the name."""

    def known(name: str) -> bool:
        return name in others or is_method(name)

    name, plus, strategy = text.rpartition("+") if "+" in text and not known(text) else (text, "", "")
    if not known(name):
        raise RecipeError(unknown("method", name, [*others, *methods()]))
    return name, _strategy(label, name, strategy, options) if plus else options


def _strategy(label: str, name: str, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """A method's options with a strategy, which HARP takes as the start of its rates."""
    key = strategy_key(name)
    if key is None or key in options:
        why = "takes no strategy" if key is None else f"has its {key} twice"
        raise RecipeError(f"method {label!r}: {name} {why}")
    if strategy not in STRATEGIES:
        raise RecipeError(f"method {label!r}: {unknown('strategy', strategy, STRATEGIES)}")
    return {key: strategy, **options}


def strategy_key(name: str) -> str | None:
    """The option that a method takes a strategy by, if it takes one."""
    taken = inspect.signature(PRUNERS[name]).parameters if is_method(name) else {}
    return next((key for key in ("initial_strategy", "strategy") if key in taken), None)


def inherited(name: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """What a method takes over from the recipe's pruner: options that mean the same to both.

    An option that the method has another default for is its own, as the strategy is to Tandem beside HYDRA.
    """
    if not base or not issubclass(PRUNERS[name], PRUNERS[base["name"]]):
        return {}
    ours, theirs = (inspect.signature(PRUNERS[method]).parameters for method in (name, base["name"]))
    shared = [key for key in theirs if key in ours and ours[key].default == theirs[key].default]
    return {key: value for key, value in base.items() if key in shared and key != "keep"}


def share(value: Any) -> float:
    """A budget as a share, from text or a number."""
    try:
        kept = number(value)
    except ValueError as error:
        raise RecipeError(f"keep: {error}") from error
    if isinstance(kept, bool) or not isinstance(kept, (int, float)) or not 0 < kept <= 1:
        raise RecipeError(f"keep {value!r}: give a share above 0 and at most 1 (= 100%)")
    return float(kept)


# Objectives


def _objective(base: Mapping[str, Any], resolved: Recipe, wanted: str | None) -> dict[str, Any]:
    """The base's objective, or another one under the same threat."""
    own = {"name": "pgd", **_part(base.get("objective", "pgd"))}
    if wanted is None or wanted == own["name"]:
        return own
    if wanted not in OBJECTIVES:
        raise RecipeError(unknown("objective", wanted, OBJECTIVES))
    if own["name"] == "free":
        raise RecipeError(
            f"objective {wanted!r}: {base['name']} has the epochs of free, which differ; keep free, or "
            "write a recipe of your own"
        )
    if wanted == "natural":
        return {"name": "natural"}
    few = own["name"] in pipeline.ONE_STEP or wanted in pipeline.ONE_STEP
    keys = ("norm",) if few else ("step", "steps", "norm", "clean_statistics")
    return {"name": wanted, "epsilon": _epsilon(resolved)} | {key: own[key] for key in keys if key in own}


def _epsilon(resolved: Recipe) -> float:
    """How far the attack of a recipe may go; a natural one may say it for its evaluation."""
    if (own := objectives.epsilon(resolved.objective)) is not None:
        return own
    return objectives.PgdTraining.epsilon if resolved.evaluate.epsilon is None else resolved.evaluate.epsilon


def replayed(epochs: int) -> int:
    """The length of Free-AT: an epoch stands for as many as it replays."""
    return math.ceil(epochs / FreeTraining.replays)


def _replayed(parts: pipeline.Parts, own_loss: bool) -> pipeline.Parts:
    """The lengths of Free-AT, for stages under the recipe's objective; fine-tuning by a loss of its own has none."""

    def shorter(stage: Mapping[str, Any]) -> dict[str, Any]:
        return {**stage} if "objective" in stage else {**stage, "epochs": replayed(stage["epochs"])}

    finetune = parts.finetune if own_loss else shorter(parts.finetune)
    return pipeline.Parts([shorter(stage) for stage in parts.pretrain], shorter(parts.prune), finetune)


# Names


@dataclass(frozen=True)
class _Words:
    """How a composed recipe is called and described."""

    base: Recipe
    axes: Axes
    method: str
    objective: str
    keep: float
    units: Mapping[str, Any]

    def name(self) -> str:
        said = self.axes.name_objective or self.objective != self.base.objective["name"]
        channels = ["channels"] if self._channels() else []
        return "-".join([self.base.name, self.method, *([self.objective] if said else []), *channels, self._budget()])

    def description(self) -> str:
        counted = self.units.get("budget", "weights")
        words = TARIFFS[counted][1] if self._channels() and counted in TARIFFS else BUDGETS.get(counted, counted)
        kept = f"channels pruned to {100 * self.keep:.10g}% of the {words}"
        pruned = kept if self._channels() else f"{self._budget()} % of {words} pruned"
        what = f"{_METHOD_TITLES.get(self.method, self.method)}: {self.base.description or self.base.name}"
        return f"{what}, {_OBJECTIVE_TITLES.get(self.objective, self.objective)}, {pruned}"

    def _channels(self) -> bool:
        return self.units.get("kind") == "channels"

    def _budget(self) -> str:
        if self._channels():
            return f"{1 / self.keep:.10g}x"
        own = (name for name, kept in self.axes.budgets.items() if kept == self.keep)
        return next(own, f"{100 - 100 * self.keep:.10g}")


def method_word(name: str, options: Mapping[str, Any]) -> str:
    """A method as part of a name."""
    for word, text in _WORDS.items():
        if read_method(text) == (name, options):
            return word
    key = strategy_key(name)
    strategy = [str(options[key])] if key is not None and key in options else []
    return "-".join([name, *strategy, *(f"{key_}={value}" for key_, value in options.items() if key_ != key)])


def _method_words() -> tuple[str, ...]:
    """Methods as names have them, alone and with every strategy."""
    taking = [name for name in methods() if strategy_key(name)]
    return (*_WORDS, *methods(), *(f"{name}-{strategy}" for name in taking for strategy in STRATEGIES))


def _named(source: str) -> tuple[Path, Choice] | None:
    """The base and the choice that a name stands for."""
    base = base_of(source)
    if base is None:
        return None
    path = shipped()[base]
    if source == base:
        return path, Choice()
    match = _SHORT.fullmatch(source.removeprefix(f"{base}/"))
    method = match and _from_word(match["method"])
    if not match or not method:
        return None
    choice = replace(method, objective=match["objective"])
    if match["factor"]:
        return path, replace(choice, keep=f"1/{match['factor']}", channels=True)
    own = as_axes(read_file(path)).budgets.get(match["pruned"])
    left = 100 - Decimal(match["pruned"])
    return (path, replace(choice, keep=f"{left}%" if own is None else str(own))) if left > 0 else None


def base_of(source: str) -> str | None:
    """The shipped base that a name begins with."""
    return next((name for name in shipped() if f"{source}/".startswith(f"{name}/")), None)


def _from_word(word: str) -> Choice | None:
    """A method, and its strategy, from how names have them."""
    text = _WORDS.get(word, word)
    if is_method(text.partition(":")[0]):
        return Choice(method=text)
    head, _, strategy = word.rpartition("-")
    method = _from_word(head) if strategy in STRATEGIES else None
    return replace(method, strategy=strategy) if method and not method.strategy else None


def _part(value: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"name": value} if isinstance(value, str) else dict(value)
