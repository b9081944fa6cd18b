"""Recipes from a base and a choice: options, short names, what is said of wrong ones, and the listing."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from harp.cli import listing
from harp.errors import RecipeError
from harp.experiments import compose, recipe, study
from harp.experiments.compose import Choice, methods
from harp.system import progress
from support.commands import Harp
from support.paths import ROOT
from support.recipes import PLAIN

SAMPLE = {
    "cifar10/vgg16/harp-pgd-99": ("cifar10/vgg16", Choice(keep="1%")),
    "cifar10/vgg16/harp-pgd-99.9": ("cifar10/vgg16", Choice(keep="0.1%")),
    "cifar10/vgg16/hydra-lamp-pgd-99.9": ("cifar10/vgg16", Choice("hydra", "lamp", "0.1%")),
    "cifar10/resnet18/hydra-boosted-pgd-99": ("cifar10/resnet18", Choice("hydra+boosted")),
    "cifar10/resnet18/harp-erk-pgd-99": ("cifar10/resnet18", Choice(strategy="erk")),
    "cifar10/resnet18/harp-r-pgd-99": ("cifar10/resnet18", Choice("harp-r")),
    "cifar10/resnet18/harp-s2ap-pgd-99": ("cifar10/resnet18", Choice("harp:sharpness=0.01")),
    "cifar10/vgg16/flying-bird-plus-pgd-99": ("cifar10/vgg16", Choice("flying-bird+")),
    "cifar10/vgg16/bcs-p-lamp-pgd-99": ("cifar10/vgg16", Choice("bcs-p", "lamp", "1/100")),
    "cifar10/vgg16/harp-trades-99": ("cifar10/vgg16", Choice(objective="trades")),
    "cifar10/vgg16/harp-natural-99": ("cifar10/vgg16", Choice(objective="natural")),
    "cifar10/vgg16/harp-channels-4x": ("cifar10/vgg16", Choice(keep="25%", channels=True)),
    "svhn/resnet18/harp-mart-99.9": ("svhn/resnet18", Choice(keep="0.1%", objective="mart")),
    "imagenet/resnet50/r-admm-free-90": ("imagenet/resnet50", Choice("r-admm", keep="10%")),
    "tiny-imagenet/vgg16/dnr-pgd-95.2": ("tiny-imagenet/vgg16", Choice("dnr", keep="1/20.63")),
    "tiny-imagenet/small/harp-free-90": ("tiny-imagenet/small", Choice("harp")),
    "fashion/mad-99": ("fashion", Choice("mad")),
    "fashion/lamp-natural-99": ("fashion", Choice("lamp", objective="natural")),
    "fashion/harp-channels-20x": ("fashion", Choice(keep="0.05", channels=True)),
    "digits/harp-99": ("digits", Choice("harp", keep="0.01")),
}


def pruner(made: recipe.Recipe) -> dict[str, Any]:
    return next(stage.pruner for stage in made.stages if "keep" in stage.pruner)


def own_file(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**PLAIN, **changes}))
    return path


@pytest.mark.parametrize("name", SAMPLE)
def test_a_base_and_options_are_the_short_name(name: str) -> None:
    base, choice = SAMPLE[name]
    assert compose.load(base, choice=choice) == compose.load(name)


@pytest.mark.parametrize("base", ["cifar10/vgg16", "fashion"])
def test_every_choice_has_a_name_of_its_own_that_leads_back_to_it(base: str) -> None:
    texts = [*methods(), "hydra+lamp", "mad+erk", "flying-bird++lamp", "harp:sharpness=0.01"]
    choices = [Choice(text, keep=keep, channels=wide) for text in texts for keep, wide in (("2.5%", 0), ("1/8", 1))]
    choices += [Choice("hydra", objective=name) for name in ("pgd", "trades", "mart", "fast", "free", "natural")]
    recipes = [compose.load(base, choice=choice) for choice in choices]
    names = [made.name for made in recipes]
    assert len(set(names)) == len(names)
    folder = base.replace("/", "-")
    assert [compose.load(f"{base}/{name.removeprefix(f'{folder}-')}") for name in names] == recipes


def test_without_a_choice_a_recipe_is_its_file(tmp_path: Path) -> None:
    path = own_file(tmp_path, axes={"budgets": {"99": "1%"}})
    assert compose.load(path) == recipe.parse(PLAIN)
    assert compose.load("fashion", ["seed=3"]).name == "fashion" and compose.load("fashion", ["seed=3"]).seed == 3


def test_a_choice_applies_to_a_users_own_file(tmp_path: Path) -> None:
    path = own_file(tmp_path, units={"ignore": ["conv1"]}, evaluate={"epsilon": 0.1})
    made = compose.load(path, choice=Choice("magnitude", "erk", "3%", "trades"))
    assert made.name == "plain-magnitude-erk-trades-97"
    assert pruner(made) == {"name": "magnitude", "strategy": "erk", "keep": 0.03}
    assert [(stage.name, stage.epochs) for stage in made.stages] == [("pretrain", 2), ("prune", 0), ("finetune", 4)]
    assert made.units.ignore == ["conv1"] and made.evaluate.epsilon == 0.1


def test_options_go_before_a_short_names_and_set_goes_last() -> None:
    made = compose.load("fashion/harp-lamp-99", choice=Choice(keep="5%"))
    assert pruner(made) == {"name": "harp", "initial_strategy": "lamp", "keep": 0.05} and made.name.endswith("-95")
    assert pruner(compose.load("fashion/harp-lamp-99", choice=Choice(strategy="erk")))["initial_strategy"] == "erk"
    assert pruner(compose.load("fashion/harp-lamp-99", choice=Choice("hydra"))) == {"name": "hydra", "keep": 0.01}
    changed = compose.load("fashion", ["stages.prune.pruner.keep=7%", "seed=4"], Choice(keep="5%"))
    assert pruner(changed)["keep"] == 0.07 and changed.seed == 4


def test_another_objective_keeps_the_threat(tmp_path: Path) -> None:
    trades = compose.load("fashion/harp-trades-99")
    assert trades.objective == {"name": "trades", "epsilon": 0.1, "step": 0.025, "steps": 7}
    assert compose.load("fashion", choice=Choice(objective="fast")).objective == {"name": "fast", "epsilon": 0.1}
    natural = compose.load("fashion/harp-natural-99")
    assert natural.objective == {"name": "natural"} and natural.evaluate.epsilon == 0.1
    plain = own_file(tmp_path, objective="natural", evaluate={"epsilon": 0.2})
    assert compose.load(plain, choice=Choice(objective="pgd")).objective == {"name": "pgd", "epsilon": 0.2}
    l2 = own_file(tmp_path, objective={"epsilon": 0.5, "norm": "l2", "clean_statistics": True})
    mart = compose.load(l2, choice=Choice(objective="mart")).objective
    assert mart == {"name": "mart", "epsilon": 0.5, "norm": "l2", "clean_statistics": True}


def test_free_training_takes_a_part_of_the_epochs() -> None:
    free = compose.load("cifar10/vgg16", choice=Choice(objective="free"))
    assert [stage.epochs for stage in free.stages] == [25, 5, 25]
    assert free.objective == {"name": "free", "epsilon": 8 / 255}
    warm = compose.load("svhn/vgg16", choice=Choice(objective="free"))
    assert [stage.epochs for stage in warm.stages] == [10, 25, 5, 25], "natural warm-up replays nothing"
    mad = compose.load("cifar10/vgg16", choice=Choice("mad", objective="free"))
    assert mad.stages[-1].epochs >= 100, "it fine-tunes by MART, which replays nothing"


def test_a_loss_of_the_methods_own_has_the_threat_of_the_recipe(tmp_path: Path) -> None:
    """Also where it is only a default: Free-AT's epsilon is half of what others have."""
    for objective in ("free", {"name": "free", "epsilon": "4/255"}):
        mad = compose.load(own_file(tmp_path, objective=objective), choice=Choice("mad"))
        assert mad.stage_objective(mad.stages[-1]) == {"name": "mart", "epsilon": 4 / 255, "beta": 0.5}


def test_options_of_the_bases_pruner_hold_for_methods_of_its_class_only() -> None:
    assert pruner(compose.load("svhn/vgg16/harp-r-99"))["published"] is True
    assert pruner(compose.load("svhn/vgg16/tandem-99")) == {"name": "tandem", "keep": 0.01}
    channels = pruner(compose.load("svhn/vgg16/harp-channels-4x"))
    assert (channels["gamma_step"], channels["initial_rate"], channels["published"]) == (0.02, 1.0, True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fashion/harp99", "no recipe file fashion/harp99, and unknown recipe 'fashion/harp99': did you mean"),
        ("fashion/harb-99", "did you mean 'fashion/harp-99'?"),
        ("fashion/harb-97.5", "did you mean 'fashion/harp-97.5'?"),
        ("cifar10/vgg16/hidra-lamp-pgd-99.9", "did you mean 'cifar10/vgg16/hydra-lamp-pgd-99.9'?"),
        ("cifar10/vgg16/hydra-lamb-pgd-99", "did you mean 'cifar10/vgg16/hydra-lamp-pgd-99'?"),
        ("cifar10/vgg16/harp-tardes-99", "did you mean 'cifar10/vgg16/harp-trades-99'?"),
        ("cifar10/vgg19", "unknown recipe 'cifar10/vgg19': did you mean 'cifar10/vgg16'?"),
        ("cifar10/vgg16/", "unknown recipe"),
        ("fashion/harp-lamp-erk-99", "unknown recipe"),
        ("fashion/harp-100", "unknown recipe"),
        ("fashion/harp-channels-0.5x", "keep 2 is more than 100 %"),
        ("fashion/lamp-erk-99", "lamp takes no strategy"),
        ("imagenet/resnet50/harp-pgd-90", "imagenet-resnet50 has the epochs of free"),
        ("", "unknown recipe ''"),
    ],
)
def test_names_that_are_no_recipes(name: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        compose.load(name)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (Choice("harb"), "unknown method 'harb': did you mean 'harp'?"),
        (Choice("dense"), "unknown method 'dense'"),
        (Choice("hydra", "lam"), "unknown strategy 'lam': did you mean 'lamp'?"),
        (Choice("hydra+lamp", "erk"), "has its strategy twice"),
        (Choice("harp-s", "erk"), "harp-s takes no strategy"),
        (Choice("harp:reech=1"), "unknown key 'reech': did you mean 'reach'?"),
        (Choice("harp:keep=1%"), "keep is not an option of a method"),
        (Choice(keep="little"), "keep 'little' is no number"),
        (Choice(keep="150%"), "keep '150%': give a share above 0 and at most 1"),
        (Choice(objective="trade"), "unknown objective 'trade': did you mean 'trades'?"),
        (Choice(channels=True), "--keep 25%"),
    ],
    ids=str,
)
def test_wrong_choices_are_refused(choice: Choice, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        compose.load("fashion", choice=choice)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_a_choice_does_not_fit_are_refused(tmp_path: Path) -> None:
    pretrain, prune, finetune = PLAIN["stages"]
    one = own_file(tmp_path, stages=[{**prune, "pruner": {"name": "dnr", "keep": "1%"}}])
    with pytest.raises(RecipeError, match="the stages' pruners are dnr"):
        compose.load(one, choice=Choice("harp"))
    at_once = own_file(tmp_path, stages=[pretrain, {**prune, "epochs": 0}, finetune])
    with pytest.raises(RecipeError, match=r"hydra learns what to prune, but .* has 0 epochs"):
        compose.load(at_once, choice=Choice("hydra"))
    for axes, said in (
        ({"budget": {}}, r"recipe: axes: unknown key 'budget': did you mean 'budgets'"),
        ({"budgets": {"99": "200%"}}, r"recipe: axes\.budgets\.99: .*less than or equal to 1"),
    ):
        with pytest.raises(RecipeError, match=said):
            compose.load(own_file(tmp_path, axes=axes))


def test_studies_take_bases_and_choices() -> None:
    base = study.load("fashion", methods="harp")
    assert (base.name, base.keep, base.recipe) == ("fashion", (0.01,), compose.load("fashion"))
    other = study.load("fashion/ablation", choice=Choice(objective="trades"))
    assert other.recipe.objective == compose.load("fashion/harp-trades-99").objective
    channels = study.load("fashion", methods="harp", keep="25%,10%", choice=Choice(channels=True))
    assert channels.recipe.units.kind == "channels" and channels.keep == (0.25, 0.1)
    with pytest.raises(RecipeError, match="did you mean 'fashion/ablation'"):
        study.load("fashion/abaltion")


def test_the_shipped_files_are_few_and_short() -> None:
    files = [*compose.SHIPPED.rglob("*.yaml"), *study.SHIPPED.rglob("*.yaml")]
    assert len(files) <= 30
    assert all(path.read_text("utf-8").count("\n") < 40 for path in files)


def test_the_listing_fits_a_screen(harp: Harp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "Console", lambda **options: Console(**options, force_terminal=True, width=80))
    code, out, _ = harp("list", "recipes")
    assert code == 0 and len(out.splitlines()) <= 40
    assert all(f"--{option}" in out for option in ("method", "strategy", "keep", "objective", "channels"))
    assert all(name in out for name in compose.shipped())
    code, out, _ = harp("list", "recipes", "svhn")
    assert "svhn/vgg16" in out and "cifar10" not in out


def test_the_short_names_of_the_documentation() -> None:
    page = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| `(\S+) (--[^`]+)` \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for short, base, options in rows:
        words = options.replace("--channels", "--channels 1").removeprefix("--").split(" --")
        chosen = Choice(**dict(word.split() for word in words))
        assert compose.load(short) == compose.load(base, choice=chosen), short


@pytest.mark.parametrize("base", sorted(compose.shipped()))
def test_the_examples_of_the_listing_are_recipes(base: str) -> None:
    examples = dict(listing.recipe_options(base))
    words = examples["example"].split()
    given = {word.removeprefix("--"): words[place + 1] for place, word in enumerate(words) if word.startswith("--")}
    chosen = compose.load(words[2], choice=Choice(**given))  # type: ignore[arg-type]
    assert compose.load(examples["in one word"].split()[2].rstrip(",")) == chosen
    assert compose.load(examples["channels"].split()[2].rstrip(",")).units.kind == "channels"
