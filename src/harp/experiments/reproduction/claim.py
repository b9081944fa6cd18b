"""A claim of the HARP paper: what is published, the experiment that tests it, and a small one for a small machine.

A claim is a YAML file in `claims/`, named by its id. Expected values are read as

    expected:
      EXPERIMENT:
        MEASURE:                     # natural, or an attack such as pgd-10
          METHOD: 79.68              # the dense network: one number, in per cent
          METHOD: {10%: 80.1, ...}   # a pruned one: a number for each share that is kept

Tolerances and orders are part of the file, so they are fixed before anything runs.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from harp.errors import RecipeError
from harp.experiments import recipe as recipes
from harp.experiments import stages, study
from harp.experiments.compose import Choice
from harp.experiments.recipe import Recipe
from harp.experiments.study import DENSE, SMALL, Study
from harp.system.numbers import share

SHIPPED = Path(__file__).parent / "claims"
SOURCES = {
    "printed": "printed in the paper",
    "figure": "data of a figure in the paper's source",
    "partly": "only the dense networks' values are in the paper's source",
    "none": "no published value in the paper's source",
}


class Cell(NamedTuple):
    """One number of a table: an experiment, a measure, a method and the share it keeps (None: dense)."""

    experiment: str
    measure: str
    method: str
    keep: float | None


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Experiment(_Part):
    """A study of methods under one recipe, and what each run is measured by."""

    recipe: str | dict[str, Any]
    methods: tuple[str | dict[str, Any], ...]
    keep: tuple[str, ...]
    seeds: tuple[int, ...]
    attacks: tuple[str, ...] = ()  # the first one ranks; default: the recipe's own
    objective: str | None = None
    channels: bool = False
    protocol: str = "equal"
    set: tuple[str, ...] = ()

    def study(self, name: str, seeds: tuple[int, ...] | None = None) -> Study:
        """The experiment as a study of `harp compare`."""
        content = {
            "name": study.slug(name),
            "recipe": self.recipe,
            "methods": list(self.methods),
            "keep": list(self.keep),
            "seeds": list(seeds or self.seeds),
            "protocol": self.protocol,
            **({"rank_by": self.attacks[0]} if self.attacks else {}),
        }
        attacks = [f"evaluate.attacks=[{', '.join(self.attacks)}]"] if self.attacks else []
        choice = Choice(objective=self.objective, channels=self.channels, keep=self.keep[0] if self.channels else None)
        return study.parse(content, study.SHIPPED, [*attacks, *self.set], choice)

    def recipes(self, name: str) -> dict[tuple[str, float | None], Recipe]:
        """The recipe of each run, by method and share, without its seed; the pre-training has the share None."""
        planned = self.study(name)
        content = planned.recipe.model_dump(mode="json", exclude_defaults=True)
        parts = stages.parts(content["stages"])
        protocol = stages.PROTOCOLS[planned.protocol]
        laid_out: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
        if parts.pretrain:
            laid_out[DENSE, None] = [{**stage, "pruner": "dense"} for stage in parts.pretrain]
        for method in planned.methods:
            for keep in planned.keep if method.name not in (DENSE, SMALL) else ():
                pruner = method.pruner(keep)
                laid_out[method.label, keep] = protocol.stages(parts, pruner, content.get("objective"))
        return {key: recipes.parse({**content, "stages": stage_list}) for key, stage_list in laid_out.items()}


class Order(_Part):
    """A method that is more accurate than others, by a measure, at some budgets."""

    experiment: str
    measure: str
    better: str
    than: tuple[str, ...]
    keep: tuple[float, ...]
    by: float = 0.0  # points that it must be ahead by; a negative number allows it to be behind by so many

    @field_validator("keep", mode="before")
    @classmethod
    def _shares(cls, value: Any) -> Any:
        return tuple(map(share, value)) if isinstance(value, list) else value


class Computed(_Part):
    """A quantity that needs no data: the name of a function of `computed.py`, its arguments and what it must give."""

    what: str
    arguments: dict[str, Any] = {}
    expected: list[float] | list[str] | float
    tolerance: float = 0.0


class Variant(_Part):
    """Experiments and what they must show."""

    says: str = ""
    experiments: dict[str, Experiment]
    orders: tuple[Order, ...] = ()

    def length(self) -> tuple[int, int]:
        """The number of runs and of their epochs, over all seeds; a pre-training that runs share counts once."""
        runs = epochs = 0
        for name, experiment in self.experiments.items():
            planned = experiment.recipes(name)
            shared = planned.get((DENSE, None))
            before = [] if shared is None else shared.stages
            for (_, keep), recipe in planned.items():
                own = recipe.stages[len(before) :] if keep and recipe.stages[: len(before)] == before else recipe.stages
                runs += len(experiment.seeds)
                epochs += len(experiment.seeds) * sum(stage.epochs for stage in own)
        return runs, epochs


class Claim(_Part):
    """A table or figure of the paper."""

    id: str
    title: str
    says: str  # the claim in words
    place: str
    labels: tuple[str, ...]  # of the paper's LaTeX source
    source: Literal["printed", "figure", "partly", "none"]
    experiments: dict[str, Experiment] = {}
    expected: dict[str, dict[str, dict[str, float | dict[str, float]]]] = {}
    tolerance: float = 1.5  # points, on each side of an expected value
    series: dict[str, dict[str, list[float]]] = {}  # published curves by method: shown, not judged
    orders: tuple[Order, ...] = ()
    computed: tuple[Computed, ...] = ()
    small: Variant | None = None
    departures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def full(self) -> Variant:
        """The paper's experiment."""
        return Variant(says=self.says, experiments=self.experiments, orders=self.orders)

    def variant(self, *, small: bool) -> Variant:
        """The full or the small experiment; an error if there is none."""
        chosen = self.small if small else self.full
        if chosen is None or not chosen.experiments:
            other = "give it without --small" if small and self.experiments else "it needs no run"
            raise RecipeError(f"{self.id} has no {'small' if small else 'full'} experiment: {other}")
        return chosen

    @cached_property
    def cells(self) -> dict[Cell, float]:
        """The published numbers, in per cent."""
        return dict(self._cells())

    def _cells(self) -> Iterator[tuple[Cell, float]]:
        for experiment, measures in self.expected.items():
            for measure, methods in measures.items():
                for method, value in methods.items():
                    if isinstance(value, Mapping):
                        for keep, number in value.items():
                            yield Cell(experiment, measure, method, share(keep)), number
                    else:
                        yield Cell(experiment, measure, method, None), value


def shipped() -> dict[str, Claim]:
    """The claims that come with the package, in the paper's order."""
    claims = [load(path) for path in SHIPPED.glob("*.yaml")]
    return {claim.id: claim for claim in sorted(claims, key=lambda claim: _position(claim.place))}


def _position(place: str) -> tuple[bool, str, int]:
    """Figures and tables in the order of their numbers, those of the appendix after the others."""
    kind, _, number = place.partition(" ")
    return place.endswith("(appendix)"), kind, int(number.split()[0]) if number[:1].isdigit() else 0


def named(name: str) -> Claim:
    """A shipped claim by its id."""
    claims = shipped()
    if name not in claims:
        raise RecipeError(recipes.unknown("claim", name, claims, "harp reproduce"))
    return claims[name]


def load(path: Path) -> Claim:
    """Read and check a claim's file."""
    content = recipes.read(path, str(path))
    try:
        return Claim.model_validate({"id": path.stem, **content})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecipeError(f"{path.name}: {where}: {first['msg'].removeprefix('Value error, ')}") from error
