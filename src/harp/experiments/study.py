"""Studies: a recipe, the methods that are compared under it, the budgets and the seeds.

A study is a YAML file with `recipe`, `methods`, `keep`, `seeds`, `rank_by` (an attack) and `protocol` (the layout of
the methods' stages, see `harp.experiments.stages`), or a recipe with the rest as options of the command. A method is
written `NAME`, `NAME+STRATEGY`, `NAME:option=value,option=value`, or as a mapping with a label. Options of the recipe's
own pruner also apply to methods of its class.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harp.errors import RecipeError
from harp.experiments import compose
from harp.experiments.compose import Choice, inherited
from harp.experiments.recipe import Evaluation, Recipe, Stage, read, read_file, unknown
from harp.experiments.recipe import parse as parse_recipe
from harp.experiments.stages import PROTOCOLS
from harp.system.numbers import share

SHIPPED = Path(__file__).parent / "studies"
DENSE, SMALL = "dense", "dense-small"  # the network before pruning; a dense network of the size of a pruned one
_KEYS = ("name", "description", "recipe", "methods", "keep", "seeds", "rank_by", "protocol")


@dataclass(frozen=True)
class Method:
    """A method of the comparison: a pruner with its options, and a label for tables."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    at: Mapping[float, Mapping[str, Any]] = field(default_factory=dict)  # all options, by budget

    def pruner(self, keep: float) -> dict[str, Any]:
        """The method as the pruner of a recipe."""
        return {"name": self.name, **self.at.get(keep, self.options), "keep": keep}


@dataclass(frozen=True)
class Study:
    """What is compared, checked."""

    name: str
    description: str
    recipe: Recipe  # its evaluation includes `rank_by`
    methods: tuple[Method, ...]
    keep: tuple[float, ...]  # the largest first
    seeds: tuple[int, ...]
    rank_by: str | Mapping[str, Any]  # the attack that ranks the methods
    protocol: str  # a name in `harp.experiments.stages.PROTOCOLS`


def shipped() -> dict[str, dict[str, Any]]:
    """The contents of the shipped studies, by name. A file with `bases` is a study of each, named BASE/STUDY."""
    studies: dict[str, dict[str, Any]] = {}
    titles = {base: read_file(path).get("description", "") for base, path in compose.shipped().items()}
    for path in SHIPPED.glob("*.yaml"):
        content = read(path, str(path))
        bases = content.pop("bases", None)
        if bases is None:
            studies[path.stem] = {"name": path.stem, **content}
        for base, own in (bases or {}).items():
            studies[f"{base}/{path.stem}"] = {
                **content,
                **own,
                "name": slug(f"{base}/{path.stem}"),
                "description": f"{content['description']}: {titles[base]}",
                "recipe": f"{base}/{content['recipe']}",
            }
    return dict(sorted(studies.items()))


def load(
    source: str,
    *,
    methods: str | None = None,
    keep: str | None = None,
    seeds: str | None = None,
    rank_by: str | None = None,
    protocol: str | None = None,
    changes: Sequence[str] = (),
    choice: Choice = Choice(),  # noqa: B008 (frozen)
) -> Study:
    """Read a study or a recipe from a file or by its name; other arguments override its keys and its recipe.

    Arguments:
        source: a file, or the name of a study or a recipe.
        methods: names with their options, with commas in between.
        keep: shares of the budget, such as "10%,1%".
        seeds: whole numbers, with commas in between.
        rank_by: the attack that the methods are ranked by.
        protocol: "equal" epochs for all, or those of the methods' "paper".
        changes: of the recipe, such as "data.batch=64".
        choice: of the recipe's objective and units.

    Example:
        study = harp.load_study("digits", keep="10%,1%", seeds="0,1")
        print(len(study.methods), study.keep)
    """
    content = _content(source)
    given = {"methods": methods, "keep": keep, "seeds": seeds}
    content |= {key: text.split(",") for key, text in given.items() if text is not None}
    content |= {key: text for key, text in (("rank_by", rank_by), ("protocol", protocol)) if text is not None}
    if methods is not None:
        content["methods"] = split_methods(methods)
    if choice.channels and content.get("keep"):
        choice = replace(choice, keep=str(content["keep"][0]))
    return parse(content, Path(source).parent if Path(source).is_file() else SHIPPED, changes, choice)


def _content(source: str) -> dict[str, Any]:
    """The content of a study; that of a recipe has no methods."""
    studies, path = shipped(), Path(source)
    if not path.is_file() and source in studies:
        return studies[source]
    if not path.is_file() and not compose.is_recipe(source):
        raise RecipeError(
            f"no file {source}, and {unknown('study or recipe', source, [*studies, *compose.near(source)])}"
        )
    content = read(path, source) if path.is_file() else {"stages": []}
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is neither a study nor a recipe: it must be a mapping")
    if "recipe" in content or "stages" not in content:
        return {"name": path.stem, **content}
    content = compose.content(source)
    return {"name": content["name"], "recipe": content}


def parse(
    content: Mapping[str, Any],
    folder: Path = Path(),
    changes: Sequence[str] = (),
    choice: Choice = Choice(),  # noqa: B008 (frozen)
) -> Study:
    """Check the content of a study; the path of its recipe is relative to `folder`."""
    for key in content:
        if key not in _KEYS:
            raise RecipeError(f"study: {unknown('key', key, _KEYS)}")
    made = _recipe(content.get("recipe"), str(content.get("name", "study")), folder, changes, choice)
    name = str(content.get("name", made.name))
    if slug(name) != name:
        raise RecipeError(f"study: name {name!r} becomes part of folders' names: write it like {slug(name)!r}")
    methods = tuple(method(value, _own_pruner(made)) for value in _list(content, "methods", []))
    if not methods:
        raise RecipeError("no methods to compare: give some, like --methods harp,hydra+lamp,magnitude,dense-small")
    keep = [share(value) for value in _list(content, "keep", [_own_pruner(made).get("keep")])]
    seeds = [_seed(value) for value in _list(content, "seeds", [made.seed])]
    for what, values in (("keep", keep), ("seeds", seeds), ("methods", [slug(one.label) for one in methods])):
        twice = [value for position, value in enumerate(values) if value in values[:position]]
        if twice:
            raise RecipeError(f"study: {what}: {twice[0]} is there twice")
    protocol = content.get("protocol", "equal")
    if protocol not in PROTOCOLS:
        raise RecipeError(f"study: {unknown('protocol', protocol, PROTOCOLS)}")
    rank_by, evaluate = _rank_by(content.get("rank_by"), made), made.evaluate
    if rank_by not in evaluate.attacks:
        evaluate = evaluate.model_copy(update={"attacks": [*evaluate.attacks, rank_by]})
    return Study(
        name=name,
        description=str(content.get("description", made.description)),
        recipe=made.model_copy(update={"evaluate": evaluate}),
        methods=methods,
        keep=tuple(sorted(keep, reverse=True)),
        seeds=tuple(seeds),
        rank_by=rank_by,
        protocol=protocol,
    )


def split_methods(text: str) -> list[str]:
    """Split a list of methods at its commas, except those between the options of a method."""
    texts: list[str] = []
    for piece in text.split(","):
        if texts and "=" in piece and ":" not in piece.partition("=")[0]:
            texts[-1] += f",{piece}"
        else:
            texts.append(piece.strip())
    return texts


def method(value: Any, base: Mapping[str, Any] | None = None) -> Method:
    """Read a method from text or from a mapping, and check its options; `base` is the pruner of the recipe."""
    base = base or {}
    if isinstance(value, str):
        return _checked(value.strip(), *compose.read_method(value, others=(DENSE, SMALL)), base)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise RecipeError(f"method {value!r}: write it like harp+lamp:reach=0 or {{label: ..., name: ..., ...}}")
    options = {key: option for key, option in value.items() if key not in ("label", "name", "at")}
    label, by_budget = str(value.get("label", value["name"])), value.get("at", {})
    if not isinstance(by_budget, Mapping) or not all(isinstance(some, Mapping) for some in by_budget.values()):
        raise RecipeError(f"method {label!r}: at is {by_budget!r}: give options by budget, like {{1%: {{rho: 0.01}}}}")
    name, own = compose.spread(label, value["name"], options, (DENSE, SMALL))
    at = {share(keep): _checked(label, name, {**own, **some}, base).options for keep, some in by_budget.items()}
    return replace(_checked(label, name, own, base), at=at)


def slug(label: str) -> str:
    """A label as part of a file's name."""
    return re.sub(r"[^\w.+=%-]+", "-", label).strip("-.") or "-"


def _checked(label: str, name: str, options: dict[str, Any], base: Mapping[str, Any]) -> Method:
    if name in (DENSE, SMALL):
        if options:
            raise RecipeError(f"method {label!r}: {name} has no options")
        return Method(label, name)
    if "keep" in options:
        raise RecipeError(f"method {label!r}: keep is a key of the study, the same for all methods")
    pruner = {"name": name, **inherited(name, base), **options, "keep": 0.5}
    try:
        stage = Stage.model_validate({"name": "prune", "pruner": pruner, "epochs": 0})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        message = first["msg"].removeprefix("Value error, ")
        raise RecipeError(f"method {label!r}: {place}{': ' * bool(place)}{message}") from error
    return Method(label, name, {key: value for key, value in stage.pruner.items() if key not in ("name", "keep")})


def _recipe(value: Any, name: str, folder: Path, changes: Sequence[str], choice: Choice) -> Recipe:
    if isinstance(value, Mapping):
        return parse_recipe(compose.with_choice({"name": name, **value}, choice), changes)
    if not isinstance(value, str):
        raise RecipeError(
            f"study: recipe is {value!r}: give a shipped name, a path from the study's folder or a recipe"
        )
    path = folder / value
    if not path.is_file() and not compose.is_recipe(value):
        raise RecipeError(f"study: no recipe file {path}, and {unknown('recipe', value, compose.near(value))}")
    return compose.load(path if path.is_file() else value, changes, choice)


def _rank_by(value: Any, made: Recipe) -> str | Mapping[str, Any]:
    """The attack that ranks the methods; by default the recipe's last one."""
    if value is None:
        if not made.evaluate.attacks:
            raise RecipeError("evaluate.attacks is empty: name the attack that ranks the methods, like rank_by: pgd-20")
        return made.evaluate.attacks[-1]
    try:
        return Evaluation.model_validate({"attacks": [value]}).attacks[0]
    except (ValidationError, RecipeError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise RecipeError(f"study: rank_by: {first.removeprefix('Value error, ')}") from error


def _list(content: Mapping[str, Any], key: str, default: list[Any]) -> list[Any]:
    value = content.get(key, default)
    if not isinstance(value, list):
        raise RecipeError(f"study: {key} is {value!r}: give a list")
    return value or default


def _own_pruner(made: Recipe) -> dict[str, Any]:
    return next((stage.pruner for stage in made.stages if stage.prunes), {})


def _seed(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d+\s*", value):
        return int(value)
    if type(value) is not int:
        raise RecipeError(f"seed {value!r}: give a whole number")
    return value
