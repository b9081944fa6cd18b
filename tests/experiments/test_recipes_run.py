"""Every experiment of the snapshot: its parts fit its real model, and it trains."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from harp import models
from harp.data.dataset import DataSet, Split
from harp.experiments import build, compose, recipe, study
from harp.experiments.compare import Comparison
from harp.experiments.run import Run
from harp.pruning import methods as pruners
from harp.pruning import schedules
from harp.pruning.channels import Channels
from harp.pruning.units import Units, Weights
from harp.system.distributed import fabric as engine
from harp.training import objectives
from support.recipes_snapshot import snapshot

SHAPES = {"cifar10": (3, 32, 32), "svhn": (3, 32, 32), "fashion": (1, 28, 28), "digits": (1, 8, 8)}
SHAPES |= {
    "imagenet": (3, 32, 32),
    "tiny-imagenet": (3, 32, 32),
}  # smaller than they are, as no layer's size depends on it
NAMES = sorted(snapshot()["recipes"])
SHORT = ("data.batch=8", "data.holdout=4", "evaluate.attacks=[]", "objective.steps=1")


def noise(name: str, data_dir: object = None, size: object = None, **loading: object) -> DataSet:
    """A stand-in for a data set: two batches of eight, four images held out, four to test."""
    generator = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        images = torch.rand((count, *SHAPES[name]), generator=generator)
        return Split(images, torch.arange(count) % 10)

    balanced, flip = name == "svhn", name != "digits"
    return DataSet(name, split(20), split(4), tuple("0123456789"), balanced, flip, "noise", False)


@functools.cache
def real(model: str, width: float | None, shape: tuple[int, int, int], kind: str) -> Units:
    torch.manual_seed(0)
    net = models.build(model, num_classes=10, shape=shape, **({} if width is None else {"width": width}))
    return Weights(net) if kind == "weights" else Channels(net, torch.rand(1, *shape))


def distinct_pruners() -> list[Any]:
    """Every (model, data, pruner) that some recipe has, once: what is shared need not be checked again."""
    cases = {}
    for name in NAMES:
        made = compose.load(name)
        for stage in made.stages:
            if stage.pruner["name"] != "fixed":
                network = (made.model.name, made.model.options.get("width"), SHAPES[made.data.name])
                case = (*network, made.units.kind, stage.pruner)
                cases["-".join(map(str, (*case[:4], *stage.pruner.values())))] = case
    # At the real size a budget more says little about a method: VGG16 gets the one, ResNet18 the other.
    spare = {
        ("vgg16", 0.01),
        ("resnet18", 0.001),
        ("vgg16", 0.5),
        ("vgg16", 0.1),
        ("resnet18", 0.25),
        ("resnet18", 0.05),
    }
    marks = {key: [pytest.mark.slow] * ((case[0], case[4].get("keep")) in spare) for key, case in cases.items()}
    return [pytest.param(*case, id=key, marks=marks[key]) for key, case in cases.items()]


def runnable() -> list[Any]:
    """Every recipe; those that differ from another one in a network or a number only are run by who has the time."""
    spare = ("svhn/resnet18/", "cifar10/resnet18/", "imagenet/resnet50/hydra-", "tiny-imagenet/vgg16/")
    ends = ("99.9", "20x", "2x", "free-90")

    def is_spare(name: str) -> bool:
        rival = name.startswith("cifar10/vgg16/") and "/harp-" not in name  # its method is tried by fashion's recipe
        return rival or name.startswith(spare) or name.endswith(ends)

    return [pytest.param(name, marks=[pytest.mark.slow] * is_spare(name)) for name in NAMES]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all recipes: stages that they share are trained once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def fabric() -> Any:
    return engine.launch("32-true", "cpu")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("cifar10/", "svhn/"))])
def test_settings_of_the_paper(name: str) -> None:
    made = compose.load(name)
    warm_up = 10 if made.data.name == "svhn" else 0
    assert sum(stage.epochs for stage in made.stages if stage.pruner["name"] != "dense") == (
        220 if method(made).from_scratch else 120
    )
    assert [(s.name, s.epochs) for s in made.stages] == layout(method(made), made, warm_up)
    rates = {"warmup": 0.1, "pretrain": 0.1, "prune": 0.1, "finetune": 0.01, "train": 0.1}
    for stage in made.stages:
        settings = stage.optimizer
        assert settings.lr == rates[stage.name]
        assert (settings.name, settings.momentum, settings.weight_decay) == ("sgd", 0.9, 5e-4)
        assert settings.schedule == {"name": "cosine"}
    pruner = pruning(made).pruner
    kept = {"99.9": 0.001, "99": 0.01, "2x": 0.5, "4x": 0.25, "10x": 0.1, "20x": 0.05}
    assert pruner["keep"] == kept[name.rpartition("-")[2]]
    step = {"weights": 0.01, "channels": 0.02}[made.units.kind]
    assert pruner.get("gamma_step") == (step if pruner["name"] in ("harp", "harp-r") else None)
    assert pruner.get("published", False) == (pruner["name"] in ("harp", "harp-r"))
    assert pruner.get("initial_rate") == (1.0 if made.units.kind == "channels" else None)
    assert (made.data.batch, made.data.holdout, made.data.augment) == (128, 5000, True)
    assert (made.evaluate.attacks, made.evaluate.examples) == (["fgsm", "pgd-10", "pgd-20", "cw"], None)
    assert build.threat(made).epsilon == 8 / 255
    if made.objective["name"] != "natural":
        objective = objectives.made(made.stage_objective(pruning(made)))
        assert (objective.epsilon, objective.step, objective.steps) == (8 / 255, 2 / 255, 10)
        assert getattr(objective, "beta", None) == {"pgd": None, "trades": 6, "mart": 5}[made.objective["name"]]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("imagenet/")])
def test_settings_of_the_papers_large_scale(name: str) -> None:
    made = compose.load(name)
    assert (made.data.batch, made.data.size, made.data.crop, made.data.augment) == (256, 224, "resized", True)
    assert made.model.name == "resnet50" and made.model.normalize is not None
    assert [(s.name, s.epochs) for s in made.stages] == [("pretrain", 23), ("prune", 5), ("finetune", 25)]
    for stage, rate in zip(made.stages, (0.1, 0.1, 0.01), strict=True):
        objective = objectives.made(made.stage_objective(stage))
        assert (objective.epsilon, objective.replays, objective.step) == (4 / 255, 4, None)
        assert objective.fresh == (stage.name != "pretrain")
        settings = stage.optimizer
        assert (settings.lr, settings.momentum, settings.weight_decay) == (rate, 0.9, 1e-4)
    factor = schedules.from_recipe(made.stages[0].optimizer.schedule)
    assert [round(factor(epoch / 23), 9) for epoch in (0, 7.99, 8, 15.99, 16)] == [1, 1, 0.1, 0.1, 0.01]
    assert pruning(made).pruner.get("gamma_step") == (0.1 if "/harp-" in name else None)
    assert pruning(made).pruner.get("published", False) == ("/harp-" in name)
    assert build.threat(made).epsilon == 4 / 255
    attack = build.attack_of("pgd-10", build.threat(made))[1]
    assert attack.step == 1 / 255


def test_small_recipes_have_harp_as_it_is_by_default() -> None:
    small = ("fashion/", "digits/", "demo", "tiny-imagenet/small/")
    by_the_letter = {name for name in NAMES if pruning(compose.load(name)).pruner.get("published")}
    assert by_the_letter == {
        name for name in NAMES if "/harp-" in name and "/harp-s-" not in name and not name.startswith(small)
    }


@pytest.mark.parametrize("network", ["vgg16", "resnet18"])
def test_studies_compare_the_methods_of_their_recipes(
    network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HARP of a study is the HARP of `harp run`: what the recipe sets for its pruner holds in the study too."""
    monkeypatch.setattr("harp.data.registry.load", noise)

    def pruners_of(name: str, keep: float) -> dict[str, dict[str, Any]]:
        methods = "harp,hydra" if name == "channels" else None
        planned = study.load(f"cifar10/{network}/{name}", methods=methods, seeds="1", changes=["model.width=0.25"])
        entries = Comparison(planned, tmp_path).entries
        return {entry.method: pruning(entry.recipe).pruner for entry in entries if entry.keep == keep}

    def own(name: str) -> dict[str, Any]:
        return pruning(compose.load(f"cifar10/{network}/{name}")).pruner

    ablation = pruners_of("ablation", 0.01)
    assert ablation["harp"] == own("harp-pgd-99") and ablation["harp"]["gamma_step"] == 0.01
    assert ablation["harp-r"] == own("harp-r-pgd-99") and ablation["harp-s"] == own("harp-s-pgd-99")
    starts = pruners_of("initialisation", 0.001)
    assert starts == {
        "harp": own("harp-pgd-99.9"),
        "harp+erk": own("harp-erk-pgd-99.9"),
        "harp+lamp": own("harp-lamp-pgd-99.9"),
    }
    channels = pruners_of("channels", 0.25)
    assert channels["harp"] == own("harp-channels-4x") and channels["harp"]["initial_rate"] == 1.0
    assert channels["hydra"] == {"name": "hydra", "keep": 0.25}


def pruning(made: recipe.Recipe) -> recipe.Stage:
    """The stage that names the budget."""
    return next(stage for stage in made.stages if "keep" in stage.pruner)


def budget(units: Units, part: dict[str, Any]) -> int:
    """The integer that a pruner must meet; BCS-P's paper cuts where the others round."""
    keep = part.get("keep", 1.0)
    return int(keep * units.size) if part["name"] == "bcs-p" else units.total(keep)


def method(made: recipe.Recipe) -> type[pruners.Pruner]:
    return pruners.PRUNERS[pruning(made).pruner["name"]]


def layout(kind: type[pruners.Pruner], made: recipe.Recipe, warm_up: int) -> list[tuple[str, int]]:
    """The stages that a method should have, with their epochs."""
    before = [("warmup", 10)] * (warm_up > 0) + [("pretrain", 100)]
    if kind.from_scratch:
        reads = pruning(made).pruner.get("strategy") in ("lamp", "global")
        return (before if reads else []) + [("train", 220)]
    passes = 20 if kind.passes is None else kind.passes
    return [*before, ("prune", passes), ("finetune", 120 - passes)]


def test_pre_training_is_shared() -> None:
    """By all recipes of the same data, model and objective, whatever they prune by; and by no others."""
    groups: dict[str, set[tuple[str, str, str]]] = {}
    for name in NAMES:
        made = compose.load(name)
        dense = sum(stage.pruner["name"] == "dense" for stage in made.stages)
        kind = (made.data.name, made.model.name, made.objective["name"])
        if dense:  # sparse training from scratch has no use for it
            groups.setdefault(made.identity(dense), set()).add(kind)
    assert all(len(kinds) == 1 for kinds in groups.values())
    # The paper's, natural ones, fashion's objectives, digits, demo, ImageNet, Tiny-ImageNet large and small.
    assert len(groups) == 2 * 2 * 3 + 2 + 4 + 1 + 1 + 1 + 2
    whole = [made.identity(len(made.stages)) for made in map(compose.load, NAMES)]
    # HARP-S is HYDRA under another name, and shares all of its stages.
    assert len(set(whole)) == len(NAMES) - sum("harp-s-" in name for name in NAMES)


def test_warm_up_is_shared_by_objectives() -> None:
    hashes = {compose.load(f"svhn/vgg16/harp-{objective}-99").identity(1) for objective in ("pgd", "trades", "mart")}
    assert len(hashes) == 1


@pytest.mark.parametrize(("model", "width", "shape", "kind", "part"), distinct_pruners())
def test_pruner_fits_the_real_model(
    model: str, width: float | None, shape: tuple[int, int, int], kind: str, part: dict[str, Any]
) -> None:
    """It can be made on the network of real size, and its answer meets the budget: to the weight, or by a channel."""
    units, options = real(model, width, shape, kind), dict(part)
    pruner = pruners.PRUNERS[options.pop("name")](units, **options)
    meets(units.spent(pruner.masks()), budget(units, part), kind)


def meets(spent: int, total: int, kind: str) -> None:
    """Channels are coarse: no more than the budget, and of it nearly all."""
    assert spent == total if kind == "weights" else 0.97 * total < spent <= total


@pytest.mark.parametrize("name", NAMES)
def test_objectives_and_attacks_can_be_made(name: str) -> None:
    made = compose.load(name)
    assert set(made.model.options) <= {"width"}  # so that the network above is the recipe's
    for stage in made.stages:
        objective = objectives.made(made.stage_objective(stage))
        assert callable(objective.begin() if hasattr(objective, "begin") else objective)
    assert all(callable(build.attack_of(wish, build.threat(made))[1]) for wish in made.evaluate.attacks)


@pytest.mark.parametrize("name", runnable())
def test_recipe_runs(name: str, root: Path, fabric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harp.data.registry.load", noise)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # dozens of small files, none worth the wait
    whole = compose.load(name)
    changes = [f"stages.{n}.epochs=1" for n, stage in enumerate(whole.stages) if stage.epochs > 0]
    width = "0.125" if whole.model.name in ("vgg16", "resnet18", "resnet50") else "4"
    short = [
        change for change in SHORT if whole.objective["name"] not in ("natural", "free") or "objective" not in change
    ]
    short += ["data.crop=pad"] * (whole.data.crop != "pad")  # noise has no larger pictures to cut from
    # A hundredth of so narrow a network of fifty layers has gradients beyond any number.
    short += ["stages.prune.pruner.keep=30%"] * (whole.model.name == "resnet50")
    # Following the channels of each tiny network takes longer than training it.
    plain = [f"stages.{n}.compact=false" for n, stage in enumerate(whole.stages) if stage.pruner["name"] == "fixed"]
    made = compose.load(name, [*short, *changes, *plain, f"model.width={width}"])
    run = Run(made, root, fabric=fabric)
    outcome = run.execute()
    assert outcome.masks is not None
    assert run.total == budget(run.units, pruning(made).pruner)
    meets(run.units.spent(outcome.masks), run.total, made.units.kind)
    assert (outcome.folder / "slim.json").exists() == (made.units.kind == "channels")
    assert [result["name"] for result in outcome.results] == ["natural"]
    histories = run.histories()
    assert [len(histories[stage.name]) for stage in made.stages] == [stage.epochs for stage in made.stages]
    assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())
    assert compose.load(outcome.folder / "recipe.yaml") == made
