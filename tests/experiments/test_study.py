"""Studies: what is compared, read from files and flags; what makes no sense is one line."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from harp.data import registry
from harp.errors import BudgetError, RecipeError
from harp.experiments import dense_baseline, recipe, study
from harp.experiments.study import Method, method, split_methods
from harp.pruning.methods import PRUNERS
from support.commands import RECIPE

STUDY = {"recipe": RECIPE, "methods": ["harp", "hydra+lamp"], "keep": ["5%", 0.2], "seeds": [3, 1]}


def test_a_study_from_its_content() -> None:
    planned = study.parse({**STUDY, "name": "small", "description": "two methods"})
    assert (planned.name, planned.description, planned.recipe.name) == ("small", "two methods", "tiny")
    assert planned.keep == (0.2, 0.05) and planned.seeds == (3, 1)
    assert planned.methods == (Method("harp", "harp"), Method("hydra+lamp", "hydra", {"strategy": "lamp"}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("harp", Method("harp", "harp")),
        ("harp+erk", Method("harp+erk", "harp", {"initial_strategy": "erk"})),
        (
            "harp+lamp:gamma_step=0.1,quota_lr=1e-2",
            Method(
                "harp+lamp:gamma_step=0.1,quota_lr=1e-2",
                "harp",
                {"initial_strategy": "lamp", "gamma_step": 0.1, "quota_lr": 0.01},
            ),
        ),
        ({"name": "hydra", "strategy": "erk"}, Method("hydra", "hydra", {"strategy": "erk"})),
        ({"label": "mine", "name": "hydra+lamp"}, Method("mine", "hydra", {"strategy": "lamp"})),
        ("dense-small", Method("dense-small", "dense-small")),
        ("dense", Method("dense", "dense")),
    ],
    ids=str,
)
def test_a_method_is_read_from_text_or_a_mapping(value: Any, expected: Method) -> None:
    assert method(value) == expected


def test_options_of_single_budgets() -> None:
    made = method({"name": "hydra+lamp", "label": "mine", "sharpness": 0.1, "at": {"1%": {"sharpness": "0.2"}}})
    assert made.pruner(0.01) == {"name": "hydra", "strategy": "lamp", "sharpness": 0.2, "keep": 0.01}
    assert made.pruner(0.02) == {"name": "hydra", "strategy": "lamp", "sharpness": 0.1, "keep": 0.02}


HARP = {"name": "harp", "keep": 0.05, "gamma_step": 0.01, "initial_rate": 0.2}


@pytest.mark.parametrize(
    ("value", "base", "options"),
    [
        ("harp", HARP, {"gamma_step": 0.01, "initial_rate": 0.2}),
        ("harp-r", HARP, {"gamma_step": 0.01, "initial_rate": 0.2}),
        ("harp+lamp", HARP, {"gamma_step": 0.01, "initial_rate": 0.2, "initial_strategy": "lamp"}),
        ("harp:gamma_step=1", HARP, {"gamma_step": 1.0, "initial_rate": 0.2}),
        ("harp:gamma_step=null", HARP, {"initial_rate": 0.2}),  # the method's default, said aloud
        ("harp-s", HARP, {}),
        ("hydra", HARP, {}),
        ("tandem", HARP, {}),
        ("harp", {"name": "harp-r", "gamma_step": 0.01}, {}),
        ("harp", {"name": "hydra", "strategy": "erk", "sharpness": 0.1}, {"sharpness": 0.1}),
        ("tandem", {"name": "hydra", "strategy": "erk", "sharpness": 0.1}, {"sharpness": 0.1}),
        ("tandem", {"name": "tandem", "strategy": "erk"}, {"strategy": "erk"}),
        ("magnitude", {}, {}),
    ],
    ids=str,
)
def test_options_of_the_recipes_pruner_hold_for_its_class_and_subclasses(
    value: str, base: dict[str, Any], options: dict[str, Any]
) -> None:
    assert method(value, base).options == options


def test_a_studys_methods_take_over_what_the_recipe_sets() -> None:
    stages = [{**stage} for stage in RECIPE["stages"]]  # type: ignore[attr-defined]
    (prunes,) = (stage for stage in stages if "keep" in stage["pruner"])
    prunes["pruner"] = {"name": "harp", "keep": "5%", "gamma_step": 0.5}
    one = {"name": "harp", "label": "mine", "at": {"20%": {"quota_lr": 0.1}, "5%": {"gamma_step": None}}}
    planned = study.parse({**STUDY, "recipe": {**RECIPE, "stages": stages}, "methods": ["harp", "hydra", one]})
    pruners = [each.pruner(0.2) for each in planned.methods]
    assert [pruner.get("gamma_step") for pruner in pruners] == [0.5, None, 0.5] and pruners[2]["quota_lr"] == 0.1
    assert planned.methods[2].pruner(0.05) == {"name": "harp", "keep": 0.05}


def test_every_pruner_can_be_named() -> None:
    for name in PRUNERS:
        if name != "fixed":
            assert method(name).name == name


def test_commas_between_methods_and_between_options() -> None:
    text = "harp:gamma_step=0.1,quota_lr=0.2, hydra+lamp,magnitude:strategy=erk,dense-small"
    assert split_methods(text) == [
        "harp:gamma_step=0.1,quota_lr=0.2",
        "hydra+lamp",
        "magnitude:strategy=erk",
        "dense-small",
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("harb", "unknown method 'harb': did you mean 'harp'?"),
        ("fixed", "unknown method 'fixed'"),
        ("", "unknown method ''"),
        ("harp:gama_step=1", "did you mean 'gamma_step'?"),
        ("harp:gamma_step", "NAME:option=value"),
        ("harp:gamma_step=", "NAME:option=value"),
        ("harp:gamma_step=much", "method 'harp:gamma_step=much': gamma_step: 'much' is no number"),
        ("hydra+lam", "unknown strategy 'lam': did you mean 'lamp'?"),
        ("hydra+lamp:strategy=erk", "has its strategy twice"),
        ("harp-s+lamp", "harp-s takes no strategy"),
        ("harp:keep=1%", "keep is not an option of a method"),
        ({"name": "harp", "keep": "1%"}, "keep is a key of the study"),
        ("dense-small:width=3", "dense-small has no options"),
        ("dense+lamp", "dense takes no strategy"),
        ({"name": "dense", "at": {"1%": {"width": 3}}}, "dense has no options"),
        ({"label": "x"}, "write it like"),
        ({"name": "harp", "at": "1%"}, "at is '1%': give options by budget"),
        ({"name": "harp", "at": {"1%": {"gama": 1}}}, "unknown key 'gama'"),
        ({"name": "harp", "at": {"none": {}}}, "'none' is no number"),
        (7, "write it like"),
    ],
    ids=str,
)
def test_wrong_methods_are_refused(value: Any, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        method(value)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": ["harp"]}, "unknown key 'method': did you mean 'methods'?"),
        ({"methods": []}, "no methods to compare"),
        ({"methods": "harp"}, "methods is 'harp': give a list"),
        ({"methods": ["harp", "harp"]}, "methods: harp is there twice"),
        ({"keep": ["1%", 0.01]}, "keep: 0.01 is there twice"),
        ({"keep": ["110%"]}, "above 0 and at most 1"),
        ({"keep": [True]}, "no number"),
        ({"keep": ["few"]}, "'few' is no number"),
        ({"seeds": [0, "0"]}, "seeds: 0 is there twice"),
        ({"seeds": [0.5]}, "seed 0.5: give a whole number"),
        ({"recipe": 3}, "recipe is 3"),
        ({"recipe": "digits/harb-99"}, "did you mean 'digits/harp-99'?"),
        ({"recipe": {**RECIPE, "stagse": []}}, "did you mean 'stages'?"),
        ({"name": "a/b"}, "write it like 'a-b'"),
        ({"protocol": "papers"}, "unknown protocol 'papers': did you mean 'paper'?"),
        ({"rank_by": "pdg-10"}, "study: rank_by: unknown attack 'pdg': did you mean 'pgd'?"),
        ({"rank_by": "pgd-ten"}, "study: rank_by: "),
        ({"rank_by": {"name": "pgd", "steps": -1}}, "study: rank_by: "),
        ({"rank_by": 3}, "study: rank_by: "),
        ({"rank_by": "natural"}, "study: rank_by: unknown attack 'natural'"),
    ],
    ids=str,
)
def test_wrong_studies_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        study.parse({**STUDY, **change})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_attack_that_ranks_and_the_protocol() -> None:
    plain = study.parse(STUDY)
    assert (plain.rank_by, plain.protocol) == ("pgd-2", "equal") and plain.recipe == recipe.parse(RECIPE)
    several = {**RECIPE, "evaluate": {"attacks": ["fgsm", "pgd-10", "cw"]}}
    planned = study.parse({**STUDY, "recipe": several, "rank_by": "pgd-10", "protocol": "paper"})
    assert (planned.rank_by, planned.protocol) == ("pgd-10", "paper")
    assert planned.recipe.evaluate.attacks == ["fgsm", "pgd-10", "cw"]
    added = study.parse({**STUDY, "recipe": several, "rank_by": {"name": "pgd", "steps": 5}})
    assert added.recipe.evaluate.attacks == ["fgsm", "pgd-10", "cw", {"name": "pgd", "steps": 5}]
    empty = study.parse({**STUDY, "recipe": {**RECIPE, "evaluate": {"attacks": []}}, "rank_by": "autoattack"})
    assert empty.recipe.evaluate.attacks == ["autoattack"]
    flags = study.load("digits", rank_by="fgsm", protocol="paper")
    assert (flags.rank_by, flags.protocol) == ("fgsm", "paper")


def test_a_recipe_beside_the_study_is_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "sub" / "s.yaml").write_text(yaml.safe_dump({**STUDY, "recipe": "mine.yaml"}))
    monkeypatch.chdir(tmp_path)
    planned = study.load("sub/s.yaml", changes=["seed=9"])
    assert planned.name == "s" and planned.recipe.name == "tiny" and planned.recipe.seed == 9


def test_flags_override_and_a_recipe_alone_will_do() -> None:
    planned = study.load("digits/harp-99", methods="hydra,magnitude")
    assert planned.name == "digits-harp-99" and planned.keep == (0.01,) and planned.seeds == (0,)
    planned = study.load("digits", methods="harp:gamma_step=0.1,hydra", keep="10%,1/50", seeds="4,5")
    assert [one.name for one in planned.methods] == ["harp", "hydra"]
    assert planned.keep == (0.1, 0.02) and planned.seeds == (4, 5)
    with pytest.raises(RecipeError, match="no methods to compare"):
        study.load("digits/harp-99")
    with pytest.raises(RecipeError, match="did you mean 'digits'"):
        study.load("digit")


@pytest.mark.parametrize("name", study.shipped())
def test_shipped_studies_are_whole(name: str) -> None:
    planned = study.load(name)
    assert planned.description and len(planned.methods) > 1 and planned.seeds
    large, kind = name.startswith("cifar10/"), name.rpartition("/")[2]
    assert planned.rank_by == ("pgd-20" if not large else "autoattack" if kind == "rivals" else "pgd-10")
    assert planned.protocol == ("paper" if large and kind in ("rivals", "strategies") else "equal")
    assert planned.recipe.evaluate.attacks.count(planned.rank_by) == 1


@pytest.mark.parametrize("model", ["tinynet", "convnet", "resnet8"])
@pytest.mark.parametrize("keep", [0.5, 0.1, 0.03])
def test_a_small_dense_network_is_as_large_as_the_budget_allows(model: str, keep: float) -> None:
    digits = registry.load("digits", None)
    made = recipe.parse({**RECIPE, "model": {"name": model}})
    total = round(
        keep * dense_baseline.size(made, digits, 16 if model == "tinynet" else 32 if model == "convnet" else 1)
    )
    width = dense_baseline.width(made, digits, total)
    assert (
        dense_baseline.size(made, digits, width)
        <= total
        < dense_baseline.size(made, digits, width + 1 / dense_baseline.STEPS)
    )
    # Steps below 1 / STEPS are no other networks: half a channel of the widest layer is more than that.
    fine = [dense_baseline.size(made, digits, width + part / dense_baseline.STEPS / 8) for part in range(9)]
    assert len({count for count in fine if count > total}) == 1


def test_budgets_below_the_narrowest_network_and_models_without_width(tmp_path: Path) -> None:
    digits = registry.load("digits", None)
    with pytest.raises(BudgetError, match="at its narrowest, above 20"):
        dense_baseline.width(recipe.parse(RECIPE), digits, 20)
    source = tmp_path / "mine.py"
    source.write_text(
        "from torch import nn\ndef net(num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
        "def same(num_classes, width=1): return net(num_classes)\n"
    )
    with pytest.raises(RecipeError, match="no option 'width'"):
        dense_baseline.width(recipe.parse({**RECIPE, "model": f"{source}:net"}), digits, 20)
    with pytest.raises(RecipeError, match="does not grow"):
        dense_baseline.width(recipe.parse({**RECIPE, "model": f"{source}:same"}), digits, 1000)
