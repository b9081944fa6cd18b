"""Recipes as files: what is refused and how, what --set does, and what a result's hash depends on."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harp.errors import RecipeError
from harp.experiments.compose import load
from harp.experiments.recipe import Recipe, number, parse
from support.recipes import PLAIN


def plain(*changes: str) -> Recipe:
    return parse(PLAIN, changes)


def refusal(*changes: str) -> str:
    with pytest.raises(RecipeError) as caught:
        plain(*changes)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# Numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [("8/255", 8 / 255), ("1e-4", 1e-4), ("1%", 0.01), ("0.7%", 0.007), ("0.1 %", 0.001), (" 3 ", 3.0), ("-1e2", -100)],
)
def test_numbers_are_read_from_text(text: str, value: float) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "x", "1/0", "1/", "/2", "1/2/3", "%", "1e", "8 255", True])
def test_text_that_is_no_number_is_an_error(text: Any) -> None:
    with pytest.raises(ValueError, match="is no number"):
        number(text)


@pytest.mark.parametrize("numerator", range(1, 33))
def test_fractions_are_those_of_python(numerator: int) -> None:
    assert number(f"{numerator}/255") == numerator / 255


def test_numbers_everywhere() -> None:
    made = plain(
        "data.holdout=20%",
        "model.normalize=[[1/2], [50%]]",
        "units.minimum={features.0: 10%}",
        "objective.epsilon=8/255",
        "objective.step=1e-2",
        "stages.prune.pruner.keep=1/100",
        "stages.prune.pruner.gamma_step=1e-3",
        "stages.prune.pruner.initial_strategy={features.0: 50%}",
        "stages.prune.optimizer.weight_decay=5e-4",
        "evaluate.attacks=[{name: cw, epsilon: 4/255, kappa: 1e1}]",
        "evaluate.epsilon=2/255",
    )
    assert made.data.holdout == 0.2
    assert made.model.normalize == ([0.5], [0.5])
    assert made.units.minimum == {"features.0": 0.1}
    assert made.objective == {"name": "pgd", "step": 0.01}  # 8/255 is the default
    assert made.stages[1].pruner == {
        "name": "harp",
        "keep": 0.01,
        "gamma_step": 0.001,
        "initial_strategy": {"features.0": 0.5},
    }
    assert made.evaluate.attacks == [{"name": "cw", "epsilon": 4 / 255, "kappa": 10.0}]
    assert made.evaluate.epsilon == 2 / 255


def test_options_of_models() -> None:
    assert plain("model={name: vgg16, width: 1/8}").model.options == {"width": 0.125}
    assert plain("model={name: vgg16, width: 1}").model.options == {}  # the default
    other = plain("model={name: 'mine.py:net', scale: 1/8, act: gelu, depth: 3, size: '7'}")
    assert other.model.options == {"scale": 0.125, "act": "gelu", "depth": 3, "size": "7"}
    assert plain("model=resnet8").model.name == "resnet8"


# What is refused

REFUSED = [
    ("sed=1", "unknown key 'sed': did you mean 'seed'?"),
    ("data.bach=1", "data: unknown key 'bach': did you mean 'batch'?"),
    ("units.ignor=[a]", "units: unknown key 'ignor': did you mean 'ignore'?"),
    ("stages.prune.optimizer.momentun=0", "stages[1].optimizer: unknown key 'momentun': did you mean 'momentum'?"),
    ("stages.prune.epoch=3", "stages[1]: unknown key 'epoch': did you mean 'epochs'?"),
    ("stages.prune.pruner.kep=1", "stages[1].pruner: unknown key 'kep': did you mean 'keep'?"),
    ("stages.prune.pruner.name=hapr", "stages[1].pruner: unknown pruner 'hapr': did you mean 'harp'?"),
    ("stages.prune.pruner.initial_strategy=lmap", "initial_strategy: unknown strategy 'lmap': did you mean 'lamp'?"),
    ("stages.prune.pruner={name: hydra, keep: 1%, strategy: err}", "pruner.strategy: unknown strategy 'err'"),
    ("stages.prune.pruner=harp", "stages[1].pruner.keep: Field required"),
    ("stages.pretrain.objective={name: pgd, stepz: 1}", "stages[0].objective: unknown key 'stepz': did you mean 'step"),
    ("objective.stps=3", "objective: unknown key 'stps': did you mean 'steps'?"),
    ("objective=trade", "objective: unknown objective 'trade': did you mean 'trades'?"),
    ("objective.norm=l3", "objective: norm must be linf or l2, not 'l3'"),
    ("objective.epsilon=-1", "objective: epsilon must be"),
    ("objective.fast=1", "objective.fast: Input should be a valid boolean (got 1)"),
    ("objective.steps=1e1", "objective.steps: Input should be a valid integer (got '1e1')"),
    ("evaluate.attacks=[pgd-20, pgt-20]", "evaluate.attacks[1]: unknown attack 'pgt': did you mean 'pgd'?"),
    ("evaluate.attacks=[fgsm-3]", "evaluate.attacks[0]: the attack 'fgsm-3' does not take"),
    ("evaluate.attacks=[{name: pgd, stps: 3}]", "evaluate.attacks[0]: unknown key 'stps': did you mean 'steps'?"),
    ("evaluate.attacks=[3]", "evaluate.attacks[0]"),
    ("model.name=convet", "model: unknown model 'convet': did you mean 'convnet'?"),
    ("model.widht=3", "model: unknown key 'widht': did you mean 'width'?"),
    ("model.weight=a.pt", "model: unknown key 'weight': did you mean 'weights'?"),
    ("model.shape=[1, 8, 8]", "model: unknown key 'shape'"),
    ("model.width=wide", "model.width: 'wide' is no number"),
    ("stages.prune.pruner.keep=0", "keep 0: give a share above 0"),
    ("stages.prune.pruner.keep=101%", "keep '101%': give a share above 0"),
    ("stages.prune.pruner.keep=.nan", "stages[1].pruner.keep"),
    ("stages.prune.pruner.keep=nan", "stages[1].pruner.keep"),
    ("stages.prune.pruner.keep=true", "keep True is no number"),
    ("stages.prune.pruner.keep=null", "keep None: give a share"),
    ("stages.prune.pruner={name: hydra, keep: 1%, strategy: null}", "stages[1].pruner.strategy"),
    ("stages.prune.pruner={name: mad, keep: 1%, strategy: lmap}", "pruner.strategy: unknown strategy 'lmap'"),
    (
        "stages.prune.pruner={name: mad, keep: 1%, batches: true}",
        "pruner.batches: Input should be a valid integer (got",
    ),
    ("stages.prune.pruner={name: mad, keep: 1%, batches: 2.0}", "pruner.batches: Input should be a valid integer (got"),
    ("stages.prune.pruner={name: anp-vs, keep: 2}", 'did you mean "2%"?'),
    ("stages.prune.epochs=-1", "stages[1].epochs: Input should be greater than or equal to 0 (got -1)"),
    ("stages.prune.epochs=1e2", "stages[1].epochs: Input should be a valid integer (got '1e2')"),
    ("stages.prune.epochs=2.5", "stages[1].epochs: Input should be a valid integer (got 2.5)"),
    ("stages.prune.epochs=true", "stages[1].epochs: Input should be a valid integer (got True)"),
    ("stages.prune.optimizer.lr=fast", "stages[1].optimizer.lr: 'fast' is no number"),
    ("stages.prune.optimizer.lr=0", "stages[1].optimizer.lr: Input should be greater than 0"),
    ("stages.prune.optimizer.name=sdg", "stages[1].optimizer.name: Input should be 'sgd' or 'adamw' (got 'sdg')"),
    ("stages.prune.accumulate=0", "stages[1].accumulate"),
    ("stages.prune.name=pretrain", "stages: names must differ"),
    ("stages.prune.name=a/b", "stages[1].name"),
    ("stages.pretrain.pruner=fixed", "stages[0]: 'fixed' keeps the masks of the stage before it, which has none"),
    ("stages.prune.pruner=dense", "stages[2]: 'fixed' keeps the masks"),
    ("stages=[]", "stages: List should have at least 1 item"),
    ("stages={}", "stages: Input should be a valid list"),
    ("data.holdout=0", "data.holdout: Input should be greater than 0"),
    ("data.holdout=100%", "data: holdout 1: give a share below 1"),
    ("data.holdout=50.5", "data: holdout 50.5: give a share below 1"),
    ("data.augment=maybe", "data.augment: Input should be a valid boolean (got 'maybe')"),
    ("data=fashion", "data: Input should be a valid dictionary"),
    ("seed=2020-01-01", "--set 'seed=2020-01-01' can't be read"),
    ("seed=[1", "--set 'seed=[1' can't be read"),
    ("units={ignore: [], ignore: []}", "'ignore' is there twice"),
    ("stages.prun.epochs=1", "--set 'stages.prun.epochs=1': there is no 'prun' to set"),
    ("stages.3.epochs=1", "--set 'stages.3.epochs=1': there is no '3' to set"),
    ("stages.prune.epochs.x.y=1", "--set 'stages.prune.epochs.x.y=1': there is no 'x' to set"),
    ("seed", "--set 'seed': write it like"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[change for change, _ in REFUSED])
def test_wrong_values_are_refused(change: str, message: str) -> None:
    assert message in refusal(change)


@pytest.mark.parametrize("key", ["data", "model", "stages"])
def test_a_missing_part_is_an_error(key: str) -> None:
    with pytest.raises(RecipeError, match=f"^recipe: {key}: Field required$"):
        parse({name: value for name, value in PLAIN.items() if name != key})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "is no recipe: it must be a mapping"),
        ("", "is no recipe: it must be a mapping"),
        ("a: [1\n", "can't be read"),
        ("a: &a {b: *a}\n", "can't be read"),
        ("[" * 1500, "can't be read"),
        ("seed: 2020-01-01\n", "can't be read"),
        ("seed: 2020-13-41\n", "can't be read"),
        ("seed: 1\nseed: 2\n", "'seed' is there twice"),
        ("data: {name: fashion, pad: 1, pad: 2}\n", "'pad' is there twice"),
        ("!!python/object/apply:os.system ['true']\n", "can't be read"),
        (b"\x80\x02PK\xff\xfe\x00", "can't be read"),
        (b"\x00\x01\x02", "can't be read"),
    ],
)
def test_files_that_are_no_recipes(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(written(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"no recipe file {tmp_path / 'no.yaml'}"):
        load(tmp_path / "no.yaml")
    with pytest.raises(RecipeError, match=f"{tmp_path} is a folder: give a recipe"):
        load(tmp_path)


# --set, precedence, names


def test_set_changes_values() -> None:
    made = plain(
        "stages.prune.epochs=3",
        "stages.0.epochs=4",
        "stages.prune.pruner.keep=0.1%",
        "objective.steps=3",
        "seed=4",
        "data.batch=32",
        "stages.finetune.optimizer.lr=0.01",
        "description=a=b",
    )
    assert [stage.epochs for stage in made.stages] == [4, 3, 2]
    assert made.stages[1].pruner == {"name": "harp", "keep": 0.001}
    assert made.objective == {"name": "pgd", "steps": 3}
    assert (made.seed, made.data.batch, made.description) == (4, 32, "a=b")
    assert made.stages[2].optimizer.lr == 0.01


@pytest.mark.parametrize(
    ("pruner", "expected"),
    [
        ("{name: anp-vs, keep: null}", {"name": "anp-vs"}),
        ("{name: anp-vs, keep: 1%, mask_lr: null}", {"name": "anp-vs", "keep": 0.01, "mask_lr": None}),
        ("{name: mad, keep: 1%, strategy: null, batches: null}", {"name": "mad", "keep": 0.01}),
        (
            "{name: mad, keep: 1%, strategy: lamp, batches: 3}",
            {"name": "mad", "keep": 0.01, "strategy": "lamp", "batches": 3},
        ),
    ],
)
def test_null_is_kept_where_it_is_a_value(pruner: str, expected: dict[str, Any]) -> None:
    made = plain(f"stages.prune.pruner={pruner}")
    assert made.stages[1].pruner == expected
    assert parse(yaml.safe_load(made.to_yaml())) == made


def test_set_opens_a_part_that_is_just_a_name() -> None:
    content = {**PLAIN, "objective": "trades", "model": "convnet"}
    made = parse(content, ["objective.beta=3", "model.width=8"])
    assert made.objective == {"name": "trades", "beta": 3.0}
    assert made.model.options == {"width": 8}


def test_stage_objective_needs_its_name() -> None:
    """The recipe's might be another one than the default: nobody should train by PGD unawares."""
    assert "unknown objective None" in refusal("objective=trades", "stages.prune.objective.steps=3")


def test_default_then_file_then_set(tmp_path: Path) -> None:
    content = {key: value for key, value in PLAIN.items() if key != "name"}
    path = written(tmp_path, yaml.safe_dump(content))
    assert (load(path).seed, load(path).name) == (0, "mine")
    path = written(tmp_path, yaml.safe_dump({**content, "seed": 1, "name": "other"}))
    assert (load(path).seed, load(path).name) == (1, "other")
    assert load(path, ["seed=2"]).seed == 2
    assert load(path, ["seed=2", "seed=3", "name=last"]).seed == 3


def test_set_leaves_the_content_alone() -> None:
    before = copy.deepcopy(PLAIN)
    plain("stages.prune.pruner.keep=5%", "units.ignore=[a]")
    assert before == PLAIN


def test_every_use_of_a_yaml_anchor_is_a_copy(tmp_path: Path) -> None:
    """What an anchor shares is shared in writing only."""
    text = """
    data: {name: fashion}
    model: convnet
    stages:
      - {name: a, pruner: dense, epochs: 1, optimizer: &o {lr: 0.1, momentum: 0}}
      - {name: b, pruner: dense, epochs: 1, optimizer: *o}
      - {name: c, pruner: dense, epochs: 1, optimizer: {<<: *o, lr: 0.2}}
    """
    made = load(written(tmp_path, text), ["stages.b.optimizer.lr=0.3"])
    assert [stage.optimizer.lr for stage in made.stages] == [0.1, 0.3, 0.2]
    assert [stage.optimizer.momentum for stage in made.stages] == [0, 0, 0]


# A recipe written is the recipe read

shares = st.floats(1e-6, 1, exclude_min=True)
numbers = st.floats(0, 1e6)
radii = st.floats(0, 1, exclude_max=True)  # of a ball in linf
names = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/\\."), min_size=1, max_size=8)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def options(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def part(name: str, needed: dict[str, Any] | None = None, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"name": st.just(name), **(needed or {})}, optional=fields)


rates = st.one_of(st.sampled_from(["uniform", "erk", "lamp"]), st.dictionaries(texts, numbers, max_size=2))
keep = {"keep": shares}
threat = {"epsilon": radii, "step": radii, "steps": st.integers(0, 99), "norm": st.sampled_from(["linf", "l2"])}
objectives = st.one_of(
    st.just("natural"),
    part("pgd", clean_statistics=st.booleans(), **threat),
    part("trades", beta=numbers, **threat),
    part("mart", fast=st.booleans(), **threat),
)
pruners = st.one_of(
    st.just("dense"),
    part("magnitude", keep, strategy=rates),
    part("hydra", keep, strategy=rates),
    part("harp", keep, initial_strategy=rates, gamma_step=st.none() | shares, initial_rate=shares),
)
optimizers = options(
    name=st.sampled_from(["sgd", "adamw"]),
    lr=shares,
    momentum=numbers,
    weight_decay=numbers,
    schedule=st.sampled_from(["cosine", "constant"]),
)
stages = st.fixed_dictionaries(
    {"name": names, "pruner": pruners, "epochs": st.integers(0, 999)},
    optional={"objective": objectives, "optimizer": optimizers, "accumulate": st.integers(1, 9)},
)
recipes = st.fixed_dictionaries(
    {
        "name": names,
        "data": st.fixed_dictionaries(
            {"name": st.just("digits")},
            optional={
                "holdout": shares.filter(lambda share: share < 1) | st.integers(2, 9999),
                "augment": st.booleans(),
            },
        ),
        "model": st.one_of(
            st.sampled_from(["convnet", "vgg16", "mine.py:net"]),
            part("resnet18", width=shares, weights=st.none() | texts),
            part("timm:any", scale=st.one_of(numbers, st.booleans(), texts, st.lists(st.integers(), max_size=2))),
        ),
        "stages": st.lists(stages, min_size=1, max_size=3, unique_by=lambda stage: stage["name"]),
    },
    optional={
        "description": texts,
        "seed": st.integers(),
        "units": options(ignore=st.lists(texts, max_size=2), minimum=st.dictionaries(texts, numbers, max_size=2)),
        "objective": objectives,
        "evaluate": options(
            attacks=st.lists(st.sampled_from(["fgsm", "pgd-7x2", "cw"]) | part("pgd", epsilon=radii), max_size=3),
            examples=st.none() | st.integers(1, 99),
        ),
        "precision": st.sampled_from(["auto", "32-true"]),
    },
)


@given(recipes)
@settings(max_examples=150, deadline=None)
def test_a_recipe_is_the_same_after_writing_and_reading(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]
) -> None:
    made = parse(content)
    path = tmp_path_factory.getbasetemp() / "again.yaml"
    path.write_text(made.to_yaml(), encoding="utf-8")
    again = load(path)
    assert again == made
    assert again.to_yaml() == made.to_yaml()
    assert [again.identity(n) for n in range(5)] == [made.identity(n) for n in range(5)]


# Hashes


def test_hash_is_known() -> None:
    """Results on disk are found by it: if it changes, every finished stage is trained again."""
    assert plain().identity(3, "data") == "6f9ccdb9aa81"


@pytest.mark.parametrize(
    "change",
    [
        "name=other",
        "description=other",
        "evaluate.attacks=[fgsm]",
        "evaluate.epsilon=1/255",
        "evaluate.examples=10",
        "stages.prune.name=other",
        "model.weights=elsewhere.pt",  # its content is hashed, not its path
        # Defaults
        "seed=0",
        "data.batch=128",
        "data.holdout=10%",
        "model.width=32",
        "objective=pgd",
        "objective.epsilon=8/255",
        "objective.steps=10",
        "stages.prune.objective=pgd",
        "stages.prune.optimizer.momentum=0.9",
        "stages.prune.optimizer.weight_decay=5e-4",
        "stages.prune.pruner.keep=0.01",
        "stages.prune.pruner.initial_rate=null",
        "stages.prune.pruner.gamma_step=null",
        "stages.prune.select=best",
        "units.ignore=[]",
        "precision=auto",
    ],
)
def test_changes_that_do_not_affect_a_result_keep_the_hash(change: str) -> None:
    assert plain(change).identity(3, "data") == plain().identity(3, "data")


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ("seed=1", 0),
        ("data.name=digits", 0),
        ("data.batch=64", 0),
        ("data.holdout=500", 0),
        ("data.augment=false", 0),
        ("data.pad=2", 0),
        ("model.name=tinynet", 0),
        ("model.width=8", 0),
        ("model.normalize=[[0.5], [0.5]]", 0),
        ("precision=bf16-mixed", 0),
        ("objective=trades", 1),
        ("objective.steps=7", 1),
        ("stages.pretrain.epochs=3", 1),
        ("stages.pretrain.optimizer.lr=0.2", 1),
        ("stages.pretrain.optimizer.name=adamw", 1),
        ("stages.pretrain.objective=natural", 1),
        ("stages.pretrain.accumulate=2", 1),
        ("stages.pretrain.select=last", 1),
        ("units.ignore=[features.0]", 2),
        ("units.minimum={features.0: 1%}", 2),
        ("stages.prune.pruner.keep=0.1%", 2),
        ("stages.prune.pruner.gamma_step=0.01", 2),
        ("stages.prune.pruner.name=harp-r", 2),
        ("stages.prune.optimizer.schedule=constant", 2),
        ("stages.prune.epochs=0", 2),
        ("stages.finetune.epochs=3", 3),
        ("stages.finetune.objective=mart", 3),
    ],
)
def test_hash_changes_from_the_stage_on_that_a_change_touches(change: str, first: int) -> None:
    old, new = plain(), plain(change)
    differs = [old.identity(n, "data") != new.identity(n, "data") for n in range(4)]
    assert differs == [n >= first for n in range(4)]


def test_hash_of_contents_and_length() -> None:
    made = plain()
    assert len({made.identity(n, *contents) for n in range(4) for contents in [(), ("a",), ("b",), ("a", "b")]}) == 16


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        plain().seed = 3  # type: ignore[misc]
