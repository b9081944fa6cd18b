"""Assessing a network on the test set: numbers that carry what they depend on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from harp import attacks, checkpoint, data, evaluate, models, recipe
from harp.attacks import Ball
from harp.display import Quiet
from harp.errors import RecipeError

DEFAULT = Ball(8 / 255, "linf")


@dataclass(frozen=True)
class Subject:
    """A network with the data that it is assessed on, and the ball of perturbations that it was made for."""

    model: nn.Module
    data: data.DataSet
    threat: Ball = DEFAULT


def load(target: str, data_name: str | None, data_dir: Path | None, weights: str | None) -> Subject:
    """A subject from a run's folder, or from a model and a data set."""
    folder = Path(target)
    if (folder / "recipe.yaml").is_file():
        made = recipe.load(folder / "recipe.yaml")
        source = data.load(data_name or made.data.name, data_dir, made.data.size)
        file = weights or str(folder / "model.safetensors")
        return Subject(build(made.model, source, file), source, threat(made))
    if folder.is_dir():
        raise RecipeError(f"{target} is no run: there is no recipe.yaml in it (give a folder that `harp run` made)")
    if data_name is None:
        raise RecipeError(f"no data set for {target!r}: add --data (see `harp list data`)")
    source = data.load(data_name, data_dir)
    return Subject(build(recipe.Model(name=target), source, weights), source)


def build(part: recipe.Model, source: data.DataSet, weights: str | Path | None) -> nn.Module:
    """The model of a recipe for a data set, with weights from a file if there is one."""
    shape, classes = source.shape, source.num_classes
    model = models.build(part.name, num_classes=classes, shape=shape, normalize=part.normalize, **part.options)
    if weights is not None:
        checkpoint.load_weights(model, weights)
    return model


def threat(made: recipe.Recipe) -> Ball:
    """The ball that a recipe evaluates in: its objective's, unless the evaluation has an epsilon of its own."""
    trained = made.objective
    usual = trained.get("epsilon", DEFAULT.epsilon)
    epsilon = usual if made.evaluate.epsilon is None else made.evaluate.epsilon
    return Ball(epsilon, trained.get("norm", DEFAULT.norm))


def attack_of(wish: str | Mapping[str, Any], ball: Ball) -> tuple[str, Any]:
    """The name and the attack that a recipe or a flag asks for: by text within a ball, or with options of its own."""
    if isinstance(wish, str):
        return wish, attacks.named(wish, epsilon=ball.epsilon, norm=ball.norm)
    options = {key: value for key, value in wish.items() if key != "name"}
    words = [
        wish["name"],
        *(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items()),
    ]
    return ",".join(words), attacks.ATTACKS[wish["name"]](**options)


def measure(
    model: nn.Module,
    source: data.DataSet,
    name: str,
    attack: Any,
    *,
    examples: int | None,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """One number: the value, its 95 % interval, and all that it depends on beside the network."""
    test = source.test.select(evaluate.subset(len(source.test), examples, seed))
    score = evaluate.accuracy(
        model, test.images, test.labels, attack=attack, seed=seed, num_classes=source.num_classes, progress=progress
    )
    low, high = score.interval(balanced=source.balanced)
    return {
        **score.as_dict(),
        "name": name,
        "measure": "balanced accuracy" if source.balanced else "accuracy",
        "value": score.balanced_accuracy if source.balanced else score.accuracy,
        "low": low,
        "high": high,
        "data": source.name,
        "source": source.source,
        "seed": seed,
    }


def measure_all(
    subject: Subject,
    wishes: Sequence[str],
    epsilon: float | None,
    examples: int | None,
    seed: int,
    display: Quiet,
) -> list[dict[str, Any]]:
    """Natural accuracy, then accuracy under each attack."""
    ball = subject.threat if epsilon is None else Ball(epsilon, subject.threat.norm)
    found = []
    for name, attack in [("natural", None), *(attack_of(wish, ball) for wish in wishes)]:
        with display.counting(f"test {name}", examples or len(subject.data.test)):
            found.append(
                measure(subject.model, subject.data, name, attack, examples=examples, seed=seed, progress=display.count)
            )
    return found
