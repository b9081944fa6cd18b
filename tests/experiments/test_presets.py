"""`harp prune --method NAME`: every method from a few flags, on a real data set."""

from pathlib import Path
from typing import Any

import pytest

from harp.errors import RecipeError
from harp.experiments import presets, run_folder
from harp.experiments.recipe import parse
from harp.experiments.run import Run
from harp.pruning.masks import kept
from harp.pruning.methods import PRUNERS
from harp.system.distributed import fabric

METHODS = sorted(set(PRUNERS) - {"dense", "fixed"})
FLAGS: dict[str, Any] = {"objective": "pgd", "epsilon": None, "weights": None, "batch": 256, "seed": 0, "ignore": []}
SHORT = ["model.width=4", "objective.steps=1", "data.holdout=100", "evaluate.examples=50", "evaluate.attacks=[fgsm]"]


def content(method: str, **flags: Any) -> dict[str, Any]:
    return presets.recipe(
        "tinynet", "digits", "5%", **{"method": method, "strategy": None, "epochs": (1, 1, 1), **FLAGS, **flags}
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_prunes_from_flags(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    run = Run(parse(content(method), SHORT), tmp_path, fabric=fabric.launch(accelerator="cpu"))
    outcome = run.execute()
    assert outcome.masks is not None and kept(outcome.masks) == run.total
    assert [result["name"] for result in outcome.results] == ["natural", "fgsm"]
    # One epoch each of pre-training, pruning and fine-tuning, as was told; a one-shot method needs none for pruning.
    one_shot = PRUNERS[method].passes == 0
    assert sum(stage.epochs for stage in run.recipe.stages) == 3 - one_shot


@pytest.mark.parametrize(
    ("protocol", "method", "lengths"),
    [
        ("given", "harp", [6, 3, 4]),
        ("given", "lamp", [6, 0, 4]),
        ("given", "mad", [6, 1, 4]),
        ("given", "bcs-p", [13]),
        ("equal", "harp", [6, 3, 4]),
        ("equal", "lamp", [6, 0, 7]),
        ("equal", "mad", [6, 1, 6]),
        ("equal", "bcs-p", [13]),
        ("paper", "lamp", [6, 0, 4]),
    ],
)
def test_stages_are_as_long_as_the_flags_say(protocol: str, method: str, lengths: list[int]) -> None:
    """Only the protocol `equal` makes fine-tuning longer than was told."""
    stages = content(method, epochs=(6, 3, 4), protocol=protocol)["stages"]
    assert [stage["epochs"] for stage in stages] == lengths


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(RecipeError, match="unknown protocol 'fair': one of given, equal, paper"):
        content("harp", protocol="fair")


def test_a_checkpoint_of_robustbench_takes_the_place_of_pre_training(tmp_path: Path) -> None:
    file = tmp_path / "wong.pt"
    file.touch()
    model = f"robustbench:Wong2020Fast:{file}"
    flags = {"method": "harp", "strategy": None, "epochs": (None, None, None), **FLAGS}
    made = parse(presets.recipe(model, "cifar10", "1%", **flags))
    assert made.name == "harp-Wong2020Fast-1"
    assert [stage.name for stage in made.stages] == ["prune", "finetune"]
    assert (made.model.name, made.model.weights) == ("preact-resnet18", str(file))
    assert made.model.options == {"final_norm": False, "activated": False}
    assert made.model.normalize == ([0.4914, 0.4822, 0.4465], [0.2471, 0.2435, 0.2616])
    with pytest.raises(RecipeError, match="has weights of its own"):
        presets.recipe(model, "cifar10", "1%", **{**flags, "weights": "mine.pt"})
    with pytest.raises(RecipeError, match="give none"):
        parse({**made.model_dump(exclude_defaults=True), "model": {"name": model, "width": 0.5}})


def test_own_weights_take_the_place_of_pre_training() -> None:
    for method, names in (("harp", ["prune", "finetune"]), ("bcs-p", ["train"]), ("lamp", ["prune", "finetune"])):
        stages = content(method, weights="mine.safetensors")["stages"]
        assert [stage["name"] for stage in stages] == names
        assert sum(stage["epochs"] for stage in stages) == 2 - (method == "lamp")


def test_free_training_takes_a_part_of_the_epochs() -> None:
    """An epoch of four replays stands for four; lengths that are given stay."""

    def lengths(method: str, *given: int | None, data: str = "cifar10", objective: str = "free") -> list[int]:
        flags = {**FLAGS, "objective": objective, "epochs": given or (None, None, None)}
        content = presets.recipe("tinynet", data, "5%", method=method, strategy=None, **flags)
        return [stage["epochs"] for stage in content["stages"]]

    assert lengths("harp", objective="pgd") == [100, 20, 100]
    assert lengths("harp") == [25, 5, 25]
    assert lengths("harp", data="fashion") == [5, 3, 5]
    assert lengths("harp", 8, None, 100) == [8, 5, 100]
    assert lengths("bcs-p") == [55]
    assert lengths("mad")[-1] >= 100, "it fine-tunes by MART, which replays nothing"


def test_mad_fine_tunes_by_its_own_loss_where_there_is_an_attack() -> None:
    *_, last = content("mad", epsilon="0.2")["stages"]
    assert last["objective"] == {"epsilon": "0.2", "step": 0.05, "name": "mart", "beta": 0.5}
    assert "objective" not in content("mad", objective="natural")["stages"][-1]


@pytest.mark.parametrize("method", ["harp", "magnitude"])
def test_channels_are_pruned_from_flags(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    made = parse(content(method, channels=True, budget="macs", multiple=2), [*SHORT, "model.width=8"])
    assert made.units.kind == "channels" and made.units.budget == "macs" and made.name.startswith(f"{method}-channels")
    run = Run(made, tmp_path, fabric=fabric.launch(accelerator="cpu"))
    outcome = run.execute()
    assert run.cut is not None
    told = run_folder.read(outcome.folder)
    assert told.unit == "MACs" and told.kept <= run.total < 0.06 * told.size
    counts = [(layer["kept"], layer["size"]) for layer in told.summary["layers"]]
    assert all(kept % 2 == 0 or kept == size for kept, size in counts)


def test_units_without_a_meaning_are_refused_in_one_line() -> None:
    with pytest.raises(RecipeError, match="multiple has no meaning for weights"):
        parse(content("harp", multiple=8))
    with pytest.raises(RecipeError, match="unknown budget of weights 'flops'"):
        parse(content("harp", budget="flops"))
    assert parse(content("harp", budget="macs")).units.budget == "macs"
    assert "kind" not in content("harp")["units"]


def test_unknown_methods_and_strategies_are_refused_in_one_line() -> None:
    with pytest.raises(RecipeError, match="unknown method 'harpp': did you mean 'harp'"):
        content("harpp")
    with pytest.raises(RecipeError, match="lamp takes no strategy"):
        content("lamp", strategy="erk")
    with pytest.raises(RecipeError, match="unknown strategy 'lam': did you mean 'lamp'"):
        content("hydra", strategy="lam")


def test_a_method_is_written_as_in_a_study() -> None:
    (pruner,) = (stage["pruner"] for stage in content("hydra+lamp:sharpness=0.1")["stages"] if stage["name"] == "prune")
    assert pruner == {"name": "hydra", "strategy": "lamp", "sharpness": 0.1, "keep": "5%"}


def test_what_is_included_is_part_of_the_recipe_only_if_it_is_given() -> None:
    assert content("harp", include=[]) == content("harp")
    assert "include" not in content("harp")["units"]
    assert content("harp", include=["position"])["units"]["include"] == ["position"]
