"""What many runs take on hardware that is not here: by counting, not by measuring.

    GPU hours  =  Σ stages  epochs · (images · passes of a step  +  held-out images · passes of the attack) · 2 · MACs
                  /  operations a second that the GPU is assumed to do

A stage that several runs begin with is counted once, by the same hash that a run finds it by.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harp.errors import RecipeError
from harp.experiments import build, compose, energy, recipe, study
from harp.experiments import stages as pipeline
from harp.experiments.estimate.hardware import Hardware, hardware
from harp.experiments.estimate.known import Sizes
from harp.experiments.estimate.passes import Passes
from harp.experiments.recipe import Recipe, unknown
from harp.system.progress import Quiet
from harp.training import objectives

_SEEDS = (1, 2, 3)  # those of the shipped studies


@dataclass(frozen=True)
class Part:
    """An experiment of a plan: the recipes of its runs with one seed, which the other seeds cost as much as."""

    name: str
    recipes: Callable[[], Sequence[Recipe]]
    seeds: int


@dataclass
class Tally:
    """The operations of runs whose stages may be the same."""

    passes: Passes = field(default_factory=Passes)
    seen: set[str] = field(default_factory=set)

    def count(self, made: Recipe) -> tuple[float, int]:
        """The operations of what a run adds to those before it, and how many stages that are."""
        sizes, total, added = Sizes.of(made, None), 0.0, 0
        pruned = False
        for number, stage in enumerate(made.stages, 1):
            one, identity = self.passes.operations(made, sizes, number - 1), made.identity(number)
            name = stage.pruner["name"]
            if name != "dense" and not pruned:
                total += self._evaluation(made, sizes, number - 1)
                pruned = True
            if identity not in self.seen:
                self.seen.add(identity)
                judge = objectives.made(made.stage_objective(made.stages[number - 1])).judge()
                held = 1.0 + (self.passes.of_attack(judge) if judge is not None else 0.0)
                step = self.passes.of_step(made, stage) if stage.epochs else 0.0
                epoch = sizes.trained(made) * step + sizes.held(made) * held
                total += stage.epochs * epoch * one
                added += 1
        return total + self._evaluation(made, sizes, len(made.stages)), added

    def _evaluation(self, made: Recipe, sizes: Sizes, number: int) -> float:
        """The operations of attacking what the first stages leave, unless that was counted before."""
        ball, examples = build.threat(made), made.evaluate.examples or sizes.test
        total = 0.0
        for name, attack in [("", None), *(build.attack_of(wish, ball) for wish in made.evaluate.attacks)]:
            key = f"{made.identity(number)} {name} {attack!r} {examples}"
            if key not in self.seen:
                self.seen.add(key)
                total += examples * self.passes.of_attack(attack) * self.passes.operations(made, sizes, number)
        return total


def estimate(
    name: str,
    machine: str,
    precision: str | None = None,
    utilisation: float | None = None,
    *,
    intensity: float = energy.INTENSITY,
    display: Quiet | None = None,
) -> dict[str, Any]:
    """The GPU hours, energy and CO2 of a plan, part by part, as plain numbers."""
    if name not in PLANS:
        raise RecipeError(unknown("plan", name, PLANS))
    on, display = hardware(machine, precision, utilisation), display or Quiet()
    parts = PLANS[name]()
    tally, rows = Tally(), list[dict[str, Any]]()
    with display.counting_runs("experiments", len(parts)):
        for part in parts:
            display.active_runs([part.name])
            made = part.recipes()
            counts = [tally.count(each) for each in made]
            stages = part.seeds * sum(added for _, added in counts)
            flop = part.seeds * sum(flop for flop, _ in counts)
            rows.append(
                {"name": part.name, "runs": part.seeds * len(made), "stages": stages} | _cost(flop, on, intensity)
            )
            display.run_finished(part.name, None, [])
    keys = ("runs", "stages", "flop", "gpu_hours", "kwh", "co2_g")
    total = {key: sum(row[key] for row in rows) for key in keys}
    return {
        "plan": name,
        "hardware": {
            "words": on.words,
            "count": on.count,
            "precision": on.precision,
            "tflops": on.sustained / 1e12,
            "utilisation": on.utilisation,
            "watts": on.gpu.watts,
        },
        "parts": rows,
        "total": {**total, "days": total["gpu_hours"] / on.count / 24},
        "assumptions": [
            f"a GPU is assumed to reach {on.utilisation:.0%} of its peak in {on.precision} (--utilisation), and to "
            f"draw its full {on.gpu.watts:g} W all the time; hosts and cooling are not in it",
            f"{intensity:g} g CO2 / kWh (--intensity; the default is the world's mean, IEA 2019)",
            "every pass counts dense, masked weights too; channels that were cut do not count",
            "a stage that several runs begin with counts once; runs share GPUs without waiting for each other",
            "batch norms, activations, augmentation, decoding and the exchange of gradients are in the utilisation",
        ],
    }


def _cost(flop: float, on: Hardware, intensity: float) -> dict[str, float]:
    hours = flop / on.sustained / 3600
    used = energy.estimate(hours, watts=on.gpu.watts, intensity=intensity)
    return {"flop": flop, "gpu_hours": hours, "kwh": used["kwh"], "co2_g": used["co2_g"]}


def paper() -> list[Part]:
    """All experiments of the HARP paper, as far as recipes and studies of them are shipped."""
    parts = [_of_study(name) for name in study.shipped() if name.startswith("cifar10/")]
    more = [f"cifar10/{net}/harp-{loss}" for net in _NETS for loss in ("trades", "mart")]
    house = [f"svhn/{net}/harp-{loss}" for net in _NETS for loss in ("pgd", "trades", "mart")]
    parts.append(_of_recipes("cifar10, TRADES and MART", more))
    parts.append(_of_recipes("svhn, HARP", house))
    photos = [f"imagenet/resnet50/{method}-free-{pruned}" for method in _LARGE for pruned in ("90", "99")]
    parts.append(Part("imagenet, Free-AT", lambda: [compose.load(name) for name in photos], 1))
    return parts


_NETS = ("vgg16", "resnet18")
_LARGE = ("harp", "hydra", "hydra-erk", "hydra-lamp", "r-admm")


def _of_study(name: str) -> Part:
    planned = study.load(name)
    return Part(name, lambda: laid_out(planned), len(planned.seeds))


def laid_out(planned: study.Study) -> list[Recipe]:
    """The runs that a comparison makes with one seed, without the network and the data that it checks them with."""
    base = planned.recipe
    content = base.model_dump(mode="json", exclude_defaults=True)
    parts = pipeline.parts(content["stages"])
    lay_out = pipeline.PROTOCOLS[planned.protocol].stages
    runs: list[dict[str, Any]] = []
    if parts.pretrain:
        runs.append({"stages": [{**stage, "pruner": "dense"} for stage in parts.pretrain]})
    for keep in planned.keep:
        for method in planned.methods:
            if method.name == study.SMALL:
                # weights and operations both grow with the square of the width
                runs.append({"stages": parts.dense(), "model": {**content["model"], "width": math.sqrt(keep)}})
            elif method.name != study.DENSE:
                runs.append({"stages": lay_out(method.pruner(keep), *parts, content.get("objective"))})
    return [recipe.parse({**content, **changes}) for changes in runs]


def _of_recipes(name: str, recipes: Sequence[str]) -> Part:
    names = [f"{each}-{sparsity}" for each in recipes for sparsity in ("99", "99.9")]
    return Part(name, lambda: [compose.load(each) for each in names], len(_SEEDS))


PLANS: dict[str, Callable[[], list[Part]]] = {"paper": paper}
"""Plans by name."""
