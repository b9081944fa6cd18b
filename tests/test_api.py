"""The public names: what checkers see is what there is, every name is documented, and its example works."""

import ast
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import harp
from harp.data.dataset import Split
from harp.errors import CheckpointError, RecipeError
from support import cases, finished_run

NEED_A_RUN = {
    "Comparison",
    "LoadedRun",
    "Run",
    "export",
    "load",
    "load_run",
    "push",
}  # their examples take files or minutes
PROTOCOLS = {"Attack", "Criterion", "Locality", "Units"}  # nobody constructs them


def imports_for_checkers() -> dict[str, tuple[str, str]]:
    """Where the TYPE_CHECKING block takes each name from: the module, and what it is called there."""
    tree = ast.parse(Path(harp.__file__).read_text("utf-8"))
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    origins: dict[str, tuple[str, str]] = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            origins |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    return origins


def public() -> dict[str, Any]:
    """Every public function and class; of a public module those that are its own."""
    objects: dict[str, Any] = {}
    for name, home in harp._HOMES.items():
        module, inner = import_module(home), harp._INNER.get(name, name)
        if inner:
            objects[name] = getattr(module, inner)
        else:
            # A module of Python 3.14 has a function `__annotate__`.
            own = inspect.getmembers(module, inspect.isfunction)
            objects |= {
                f"{name}.{n}": o
                for n, o in own
                if o.__module__ == home and n not in ("as_schedule", "from_recipe") and not n.startswith("__")
            }
    return objects


def example_of(name: str) -> str:
    """The code under `Example:` in a docstring."""
    _, found, code = inspect.cleandoc(public()[name].__doc__ or "").partition("\nExample:\n")
    assert found, f"harp.{name} has no example"
    return textwrap.dedent(code)


def test_checkers_see_the_objects_that_are_loaded() -> None:
    origins = imports_for_checkers()
    assert set(origins) == set(harp._HOMES) == set(harp.__all__)
    for name, (home, inner) in origins.items():
        package = import_module(home)
        seen = getattr(package, inner, None) or import_module(f"{home}.{inner}")
        loaded = getattr(harp, name)
        assert loaded is seen, name


def test_names_under_another_name_are_re_exported() -> None:
    source = Path(harp.__file__).read_text("utf-8")
    listed = re.search(r"^    __all__ = (\[.*?\])$", source, re.M | re.S)
    assert listed is not None
    renamed = [name for name, (_, inner) in imports_for_checkers().items() if name != inner]
    assert sorted(renamed) == ast.literal_eval(listed[1])


SCRIPT = """
import harp
import torch
from torch import Tensor, nn

model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
images, labels = torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 0, 1])

def loss(model: nn.Module, x: Tensor, y: Tensor, forward: object = None) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)

class Scaled(harp.Objective):
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: object = None) -> Tensor:
        return 2 * loss(model, x, y)

units: harp.Units = harp.Weights(model)
attack: harp.Attack = harp.AutoAttack()
reveal_type(harp.Harp(units, keep=0.1))
reveal_type(harp.Harp(model, keep="1%"))
reveal_type(harp.Channels(model, images))
reveal_type(harp.fit(model, [(images, labels)], loss, harp.Dense(units), epochs=1))
reveal_type(harp.fit(model, [(images, labels)], Scaled(), harp.Dense(units), epochs=1).masks)
reveal_type(harp.Pgd(epsilon=0.1)(model, images, labels))
reveal_type(harp.accuracy(model, images, labels, attack=attack))
reveal_type(harp.load_run("runs/mine"))
reveal_type(harp.load_run("runs/mine").model)
reveal_type(harp.load_run("runs/mine").recipe)
reveal_type(harp.export(model, "sparse", "out", shape=(3, 2, 2)))
reveal_type(harp.load_data("digits"))
reveal_type(harp.load_recipe("demo"))
reveal_type(harp.build_model("tinynet", num_classes=2, shape=(3, 2, 2)))
reveal_type(harp.load_masks("masks.safetensors"))
reveal_type(harp.launch())
reveal_type(harp.pruning.schedules.steps([0.5]))
reveal_type(harp.Fgsm)
harp.Harp(units, kep=0.1)
harp.Magnitud
"""

REVEALED = [
    "harp.pruning.methods.harp.Harp",
    "harp.pruning.methods.harp.Harp",
    "harp.pruning.channels.units.Channels",
    "harp.training.loop.Fitted",
    "dict[str, torch._tensor.Tensor]",
    "torch._tensor.Tensor",
    "harp.evaluation.score.Score",
    "harp.experiments.run_folder.LoadedRun",
    "torch.nn.modules.module.Module",
    "harp.experiments.recipe.Recipe",
    "dict[str, Any]",
    "harp.data.dataset.DataSet",
    "harp.experiments.recipe.Recipe",
    "torch.nn.modules.module.Module",
    "dict[str, torch._tensor.Tensor]",
    "lightning_fabric.fabric.Fabric",
    "def (float) -> float",
    "def (epsilon: float =, norm: str =, fast: bool =) -> harp.attacks.pgd.Fgsm",
]


def test_a_users_script_is_checked_by_real_types(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(SCRIPT)
    kept = getattr(request.config, "cache", None)  # there is none under -p no:cacheprovider
    cache = kept.mkdir("mypy") if kept else tmp_path / "mypy"  # the second time is quick
    paths = os.pathsep.join(filter(None, [str(Path(harp.__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", str(cache), "script.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert [text.replace("builtins.", "").rstrip("?*") for text in revealed] == REVEALED, done.stdout + done.stderr
    errors = [line.partition("error: ")[2] for line in done.stdout.splitlines() if "error: " in line]
    assert len(errors) == 2, done.stdout
    assert 'Unexpected keyword argument "kep" for "Harp"' in errors[0]
    assert 'Module has no attribute "Magnitud"' in errors[1]


@pytest.mark.parametrize("name", sorted(public()))
def test_every_parameter_is_documented(name: str) -> None:
    described = public()[name].__doc__ or ""
    parameters = [] if name in PROTOCOLS else list(_signature(public()[name]))
    missing = [each for each in parameters if not re.search(rf"(^ +|, ){each}(, \w+)*: ", described, re.M)]
    assert not missing, f"harp.{name} does not say what {', '.join(missing)} is"


def _signature(thing: Any) -> list[str]:
    try:
        return list(inspect.signature(thing).parameters)
    except ValueError:  # an exception's
        return []


@pytest.mark.parametrize("name", sorted(public()))
def test_every_example_works(name: str, tmp_path: Path) -> None:
    code = compile(example_of(name), f"<example of harp.{name}>", "exec")
    if name in NEED_A_RUN:
        return
    model, images, labels = cases.build("conv"), torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    split = Split(torch.cat([images] * 2), torch.cat([labels] * 2))
    given = {"harp": harp, "torch": torch, "pathlib": pathlib, "folder": tmp_path, "model": model, "split": split}
    given |= {"images": images, "labels": labels, "units": harp.Weights(model), "batches": harp.Batches(split, 8)}
    exec(code, given)


@pytest.mark.parametrize("kind", ["weights", "channels"])
def test_a_run_is_loaded_as_it_was_saved(tmp_path: Path, kind: str) -> None:
    content = finished_run.content(
        data="fashion", model={"name": "tinynet", "width": 6}, keep=0.3, method="magnitude", units={"kind": kind}
    )
    expected = finished_run.make(tmp_path, content, results=[finished_run.score("natural", 80, 100)])
    run = harp.load_run(tmp_path)
    images = torch.rand(3, 1, 28, 28)
    with torch.no_grad():
        assert torch.equal(run.model(images), expected(images))
    assert not run.model.training
    assert (run.folder, run.recipe.name, run.shape) == (tmp_path, "made", (1, 28, 28))
    assert run.summary["results"][0]["value"] == 0.8
    assert len(run.classes) == 10
    assert (run.cut is None, bool(run.masks)) == ((True, True) if kind == "weights" else (False, False))
    whole = harp.build_model("tinynet", num_classes=10, shape=(1, 28, 28), width=6)
    tensors = [*whole.parameters(), *whole.buffers()]
    assert run.dense_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for name, mask in run.masks.items():
        assert not run.model.get_parameter(name)[~mask].any()


def test_weights_outside_the_masks_are_zero_whatever_the_file_holds(tmp_path: Path) -> None:
    content = finished_run.content(data="fashion", model={"name": "tinynet", "width": 6}, keep=0.3)
    model = finished_run.make(tmp_path, content)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    harp.save_model(tmp_path / "model.safetensors", model)
    run = harp.load_run(tmp_path)
    for name, mask in run.masks.items():
        assert not run.model.get_parameter(name)[~mask].any()
        assert run.model.get_parameter(name)[mask].all()


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises((RecipeError, CheckpointError), match="recipe"):
        harp.load_run(tmp_path)


def test_a_run_is_exported_by_its_folder_or_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    content = finished_run.content(data="fashion", model={"name": "tinynet", "width": 6}, keep=0.1)
    model = finished_run.make(tmp_path / "run", content)
    manifest = harp.export(tmp_path / "run", "sparse", values="f32")
    assert manifest["files"]["network.harp"]["check"]["images"] == 64, "noise and images of the test set"
    images = torch.rand(3, 1, 28, 28)
    network = harp.load(tmp_path / "run" / "export" / "network.harp")
    torch.testing.assert_close(network(images), model(images).detach(), rtol=1e-4, atol=1e-4)

    again = harp.export(harp.load_run(tmp_path / "run"), ["sparse"], tmp_path / "other", values="f32")
    assert again["files"] == manifest["files"]
    assert (tmp_path / "other" / "network.harp").is_file()


def test_a_model_is_exported_without_a_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    harp.apply_masks(model, harp.Magnitude(harp.Weights(model), keep=0.5).masks())
    manifest = harp.export(model, "sparse", tmp_path, shape=(3, 2, 2), classes=["a", "b", "c"], values="f32")
    assert manifest["classes"] == ["a", "b", "c"] and manifest["budget"]["kept"] == 18
    assert model.training, "the model is left in its mode"
    images = torch.rand(5, 3, 2, 2)
    torch.testing.assert_close(harp.load(tmp_path / "network.harp")(images), model(images).detach())
    for options in ({"to": "safetensors"}, {"to": "sparse", "check": True}, {"to": "sparse", "shape": None}):
        with pytest.raises(RecipeError):
            harp.export(model, **{"folder": tmp_path, "shape": (3, 2, 2), **options})
    with pytest.raises(RecipeError, match="2 names of classes, but the model has 3 logits"):
        harp.export(model, "sparse", tmp_path, shape=(3, 2, 2), classes=["a", "b"])


def test_options_of_models_are_refused_for_runs(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a run has its own"):
        harp.export(tmp_path, "sparse", shape=(3, 2, 2))


def test_the_import_of_published_model_cards_works() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from harp import artefact; print(callable(artefact.load))"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
