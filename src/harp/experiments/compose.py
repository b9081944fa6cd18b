"""Recipes from a base and a choice: `harp run BASE --method ... --keep ... --objective ...`.

A base is a recipe file with data, model, training and a method of its own. A `Choice` replaces the method, the budget
or the objective. `stages.py` lays out the stages, with the same epochs for every method. Options of the base's pruner
also apply to methods of its class. Another objective keeps the threat.

A short name is a base and a choice in one word:

    BASE/METHOD[-STRATEGY][-OBJECTIVE]-PRUNED             cifar10/vgg16/hydra-lamp-trades-99.9
    BASE/METHOD[-STRATEGY][-OBJECTIVE]-channels-FACTORx   fashion/harp-channels-4x

PRUNED is in per cent of the weights; FACTOR divides the FLOPs.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from harp.errors import RecipeError
from harp.experiments import stages as pipeline
from harp.experiments.recipe import Axes, Recipe, as_axes, parse, read, read_file, unknown
from harp.pruning.allocation import STRATEGIES
from harp.pruning.channels import TARIFFS
from harp.pruning.methods import PRUNERS
from harp.pruning.units import BUDGETS
from harp.system.numbers import share
from harp.training import objectives
from harp.training.objectives import OBJECTIVES

SHIPPED = Path(__file__).parent / "recipes"
_WORDS = {"flying-bird-plus": "flying-bird+", "harp-s2ap": "harp:sharpness=0.01"}  # other spellings, in short names
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
    """What replaces a base's own; None keeps it."""

    method: str | None = None  # NAME, NAME+STRATEGY or NAME:option=value,option=value
    strategy: str | None = None
    keep: str | None = None
    objective: str | None = None
    channels: bool = False
    protocol: str | None = None  # of `harp.experiments.stages`; None: equal, as in the names of recipes

    def over(self, other: "Choice") -> "Choice":
        """This choice, completed by another one."""
        strategy = self.strategy if self.method or self.strategy else other.strategy
        given = {key: value or getattr(other, key) for key, value in vars(self).items()}
        return Choice(**{**given, "strategy": strategy})


def shipped() -> dict[str, Path]:
    """The bases that come with the package, by name."""
    return {path.relative_to(SHIPPED).with_suffix("").as_posix(): path for path in sorted(SHIPPED.rglob("*.yaml"))}


def load(source: str | Path, changes: Sequence[str] = (), choice: Choice = Choice()) -> Recipe:  # noqa: B008 (frozen)
    """Read a recipe from a file or by its name, apply a choice, then changes of the form `a.b=c`.

    Arguments:
        source: a file, or a name (`harp list recipes`).
        changes: texts such as "stages.prune.epochs=5".
        choice: another method, budget or objective than the recipe's own.

    Example:
        recipe = harp.load_recipe("demo", ["seed=1"])
    """
    return parse(content(source, choice), changes)


def content(source: str | Path, choice: Choice = Choice()) -> dict[str, Any]:  # noqa: B008 (frozen)
    """The content of a recipe by its file or its name, with a choice applied."""
    path = Path(source)
    if not path.is_file():
        named = _named(str(source))
        if named is None and str(source) and path.is_dir():
            raise RecipeError(f"{source} is a folder: give a recipe, or the name of a base (`harp list recipes`)")
        if named is None:
            raise RecipeError(f"no recipe file {source}, and {unknown('recipe', str(source), near(str(source)))}")
        path, choice = named[0], choice.over(named[1])
    return with_choice(read_file(path), choice)


def is_recipe(source: str) -> bool:
    """Whether this is the name of a recipe, or a YAML file."""
    return _named(source) is not None or Path(source).suffix in (".yaml", ".yml")


def near(source: str) -> list[str]:
    """Names to suggest instead: the bases, or short names of the base that this one begins with."""
    base = base_of(source)
    if base is None:
        return list(shipped())
    end = re.search(_END, source.removeprefix(base))
    budgets = {*as_axes(read_file(shipped()[base])).budgets, *([end[0]] if end else [])}
    losses = ["", *(f"-{name}" for name in OBJECTIVES)]
    taking = [name for name in methods() if strategy_key(name)]
    words = [*_WORDS, *methods(), *(f"{name}-{strategy}" for name in taking for strategy in STRATEGIES)]
    return [f"{base}/{word}{loss}-{budget}" for word in words for loss in losses for budget in budgets]


def with_choice(content: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """The content of a recipe file with a choice applied, and without its axes."""
    axes, base = as_axes(content), {key: value for key, value in content.items() if key != "axes"}
    return base if choice == Choice() else _composed(base, axes, choice)


def _composed(base: dict[str, Any], axes: Axes, choice: Choice) -> dict[str, Any]:
    resolved = parse(base)  # an error in the file comes before any other
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
        parts = parts.replayed(bool(PRUNERS[name].finetuning))
    pruner = {"name": name, **inherited(name, own), **options, "keep": keep}
    stages = pipeline.protocol_of(choice.protocol or "equal").stages(parts, pruner, objective)
    pipeline.check_learns(name, name, stages)
    evaluate = dict(base.get("evaluate", {}))
    if objective["name"] == "natural":
        evaluate.setdefault("epsilon", _epsilon(resolved))
    trained, budget = objective["name"], _budget_word(axes, keep, units)
    says_objective = axes.name_objective or trained != resolved.objective["name"]
    word = method_word(name, options)
    words = [resolved.name, word, *([trained] if says_objective else []), budget]
    title = f"{_METHOD_TITLES.get(word, word)}: {resolved.description or resolved.name}"
    description = f"{title}, {_OBJECTIVE_TITLES.get(trained, trained)}, {_pruned(budget, keep, units)}"
    return {
        **base,
        "name": "-".join(words),
        "description": description,
        "units": units,
        "objective": objective,
        "stages": stages,
        "evaluate": evaluate,
    }


# Methods


def is_method(name: str) -> bool:
    """Whether a name is that of a method that prunes."""
    return name in PRUNERS and name not in ("dense", "fixed")


def methods() -> list[str]:
    """The methods that prune, including those of other packages."""
    return list(filter(is_method, PRUNERS))


def read_method(text: str, strategy: str | None = None, others: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """The name and options of a method, written `NAME`, `NAME+STRATEGY`, `NAME:option=value,...` or all three.

    `others` are further names that are allowed, such as a comparison's dense network.
    """
    head, _, tail = text.strip().partition(":")
    pairs = [pair.partition("=") for pair in tail.split(",")] if tail else []
    for key, equals, value in pairs:
        if not (key.strip() and equals and value.strip()):
            raise RecipeError(f"method {text!r}: write options like NAME:option=value,option=value")
    options = {key.strip(): read(value, f"method {text!r}") for key, _, value in pairs}
    if "keep" in options:
        raise RecipeError(f"method {text!r}: keep is not an option of a method, give it as --keep")
    name, options = spread(text, head.strip(), options, others)
    return name, options if strategy is None else _strategy(text, name, strategy, options)


def spread(label: str, text: str, options: dict[str, Any], others: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """A method's name, and its options with the strategy that may follow the name."""

    def known(name: str) -> bool:
        return name in others or is_method(name)

    name, plus, strategy = text.rpartition("+") if "+" in text and not known(text) else (text, "", "")
    if not known(name):
        raise RecipeError(unknown("method", name, [*others, *methods()]))
    return name, _strategy(label, name, strategy, options) if plus else options


def _strategy(label: str, name: str, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """A method's options with a strategy; to HARP it is the start of its rates."""
    key = strategy_key(name)
    if key is None or key in options:
        why = "takes no strategy" if key is None else f"has its {key} twice"
        raise RecipeError(f"method {label!r}: {name} {why}")
    if strategy not in STRATEGIES:
        raise RecipeError(f"method {label!r}: {unknown('strategy', strategy, STRATEGIES)}")
    return {key: strategy, **options}


def strategy_key(name: str) -> str | None:
    """The name of a method's option for a strategy, if it has one."""
    taken = inspect.signature(PRUNERS[name]).parameters if is_method(name) else {}
    return next((key for key in ("initial_strategy", "strategy") if key in taken), None)


def inherited(name: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the recipe's pruner that also apply to a method: those with the same default in both."""
    if not base or not issubclass(PRUNERS[name], PRUNERS[base["name"]]):
        return {}
    ours, theirs = (inspect.signature(PRUNERS[method]).parameters for method in (name, base["name"]))
    shared = [key for key in theirs if key in ours and ours[key].default == theirs[key].default]
    return {key: value for key, value in base.items() if key in shared and key != "keep"}


# Objectives


def _objective(base: Mapping[str, Any], resolved: Recipe, wanted: str | None) -> dict[str, Any]:
    """The base's objective, or the wanted one under the same threat."""
    own = {"name": "pgd", **_part(base.get("objective", "pgd"))}
    if wanted is None or wanted == own["name"]:
        return own
    if wanted not in OBJECTIVES:
        raise RecipeError(unknown("objective", wanted, OBJECTIVES))
    if own["name"] == "free":
        remedy = "keep free, or write a recipe of your own"
        raise RecipeError(f"objective {wanted!r}: {base['name']} has the epochs of free, which differ; {remedy}")
    if wanted == "natural":
        return {"name": "natural"}
    one_step = own["name"] in pipeline.ONE_STEP or wanted in pipeline.ONE_STEP
    keys = ("norm",) if one_step else ("step", "steps", "norm", "clean_statistics")
    return {"name": wanted, "epsilon": _epsilon(resolved)} | {key: own[key] for key in keys if key in own}


def _epsilon(resolved: Recipe) -> float:
    """The epsilon of a recipe's objective; a natural recipe may have one for its evaluation."""
    if (own := objectives.epsilon(resolved.objective)) is not None:
        return own
    return objectives.PgdTraining.epsilon if resolved.evaluate.epsilon is None else resolved.evaluate.epsilon


# Names


def _budget_word(axes: Axes, keep: float, units: Mapping[str, Any]) -> str:
    """A budget as the end of a short name."""
    if units.get("kind") == "channels":
        return f"channels-{1 / keep:.10g}x"
    names = (name for name, kept in axes.budgets.items() if kept == keep)
    return next(names, f"{100 - 100 * keep:.10g}")


def _pruned(budget: str, keep: float, units: Mapping[str, Any]) -> str:
    """A budget as the end of a description."""
    counted = units.get("budget", "weights")
    if units.get("kind") != "channels":
        return f"{budget} % of {BUDGETS.get(counted, counted)} pruned"
    noun = TARIFFS[counted][1] if counted in TARIFFS else counted
    return f"channels pruned to {100 * keep:.10g}% of the {noun}"


def method_word(name: str, options: Mapping[str, Any]) -> str:
    """A method as part of a short name."""
    for word, text in _WORDS.items():
        if read_method(text) == (name, options):
            return word
    key = strategy_key(name)
    strategy = [str(options[key])] if key is not None and key in options else []
    return "-".join([name, *strategy, *(f"{other}={value}" for other, value in options.items() if other != key)])


def _named(source: str) -> tuple[Path, Choice] | None:
    """The base and the choice of a short name."""
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
    """The method, and perhaps its strategy, of a word in a short name."""
    text = _WORDS.get(word, word)
    if is_method(text.partition(":")[0]):
        return Choice(method=text)
    head, _, strategy = word.rpartition("-")
    method = _from_word(head) if strategy in STRATEGIES else None
    return replace(method, strategy=strategy) if method and not method.strategy else None


def _part(value: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"name": value} if isinstance(value, str) else dict(value)
