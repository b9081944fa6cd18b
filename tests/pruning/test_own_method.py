"""Methods of other packages: the documented example, installed as its entry point says, and broken ones."""

import logging
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import harp as library
from harp.errors import RecipeError
from harp.experiments import recipe, study
from harp.pruning import allocation
from harp.pruning.methods import PRUNERS, Magnitude
from harp.pruning.methods.table import GROUP
from harp.pruning.units import Weights
from harp.reports import card
from harp.reports.leaderboards import taxonomy
from support import cases, contract, finished_run
from support.commands import FINISHED, RECIPE, Harp, refused, write_recipe
from support.documents import blocks

NAME = "sensitivity"


class Site:
    """A folder on the path that packages are installed in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, package: str, source: str, **methods: str) -> None:
        """What pip leaves of a package with one module and these entry points."""
        module = package.replace("-", "_")
        (self.folder / f"{module}.py").write_text(source)
        facts = self.folder / f"{module}-0.1.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
        lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in methods.items())]
        (facts / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")  # of the processes that `harp compare` starts
    rows, modules = dict(PRUNERS._rows), set(sys.modules)
    monkeypatch.setattr(PRUNERS, "_warned", set())
    yield Site(folder)
    PRUNERS._rows = rows
    for name in set(sys.modules) - modules:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def own(site: Site) -> str:
    """The example of the documentation, installed."""
    (project,) = (tomllib.loads(text) for text in blocks("docs/how-to/add-a-method.md", "toml"))
    ((name, value),) = project["project"]["entry-points"][GROUP].items()
    site.install(project["project"]["name"], blocks("docs/how-to/add-a-method.md", "python")[0], **{name: value})
    assert name == NAME
    return str(name)


@pytest.mark.parametrize("case", cases.CASES)
def test_the_example_keeps_the_contract(own: str, case: str) -> None:
    contract.budget_is_exact_and_model_stays_plain(own, case)
    contract.model_can_be_copied_and_pickled(own, case)
    contract.resumed_equals_uninterrupted(own, case)
    contract.earlier_gradients_do_not_count(own, case)


def test_the_example_learns_which_weights_it_keeps(own: str) -> None:
    model = cases.build("residual")
    units = Weights(model)
    pruner = PRUNERS[own](units, keep=0.1)
    before = pruner.masks()
    fitted = library.fit(model, [cases.batch()], library.Natural(), pruner, epochs=2)
    assert [int(mask.sum()) for mask in fitted.masks.values()] == allocation.erk(units, units.total(0.1))
    assert any(not torch.equal(mask, before[name]) for name, mask in fitted.masks.items())


def test_a_recipe_with_the_example_runs_and_writes_its_card(own: str, harp: Harp, tmp_path: Path) -> None:
    stages = [dict(stage) for stage in RECIPE["stages"]]  # type: ignore[attr-defined]
    stages[1]["pruner"] = {"name": own, "keep": "5%", "strategy": "lamp"}
    code, out, err = harp("run", write_recipe(tmp_path / "own.yaml", stages=stages))
    assert code in FINISHED, err
    (folder,) = Path("runs").glob("tiny-*")
    text = (folder / card.FILE).read_text()
    assert f"card      {folder / card.FILE}" in out
    assert "pruning by sensitivity (keep 0.05, strategy lamp)" in text
    assert "Method: sensitivity, no paper." in text


def test_the_commands_accept_the_example(own: str, harp: Harp, tmp_path: Path) -> None:
    code, out, _ = harp("list", "methods")
    assert code == 0
    assert "sensitivity" in out and "magnitude times gradient" in " ".join(out.split())
    words = ["--data", "digits", "--keep", "10%", "--pretrain", "1", "--prune", "1", "--finetune", "0"]
    small = ["--set", "model.width=4", "--set", "objective.steps=1", "--set", "evaluate.examples=50"]
    code, _, err = harp("prune", "tinynet", "--method", own, "--strategy", "uniform", *words, *small)
    assert code in FINISHED, err
    assert list(Path("runs").glob("sensitivity-tinynet-10-*/model.safetensors"))
    tiny = write_recipe(tmp_path / "tiny.yaml")
    code, out, err = harp("compare", tiny, "--methods", f"{own}+lamp", "--keep", "5%")
    assert code == 0, err
    assert "sensitivity+lamp" in out + err
    refused(harp, "prune", "tinynet", "--method", "sensitive", *words[:4], said="did you mean 'sensitivity'?")


def test_options_are_checked_and_hashed_like_those_of_built_in_methods(own: str) -> None:
    content = finished_run.content(model={"name": "tinynet", "width": 2}, method=own)
    parsed = recipe.parse(content)
    assert parsed.identity(2) != recipe.parse({**content, "seed": 8}).identity(2)
    assert study.method(f"{own}+lamp").options == {"strategy": "lamp"}
    content["stages"][1]["pruner"]["stratgy"] = "lamp"
    with pytest.raises(RecipeError, match="did you mean 'strategy'"):
        recipe.parse(content)


def test_a_method_without_taxonomy_is_not_classified(own: str) -> None:
    entry = taxonomy.entry(recipe.parse(finished_run.content(method=own)), "Own_Doe2024Sensitivity", "https://x.org/1")
    assert entry["Pruning criterion"] == entry["Pruning locality"] == "Not Specified"
    assert entry["Pruning structure"] == "Unstructured (US)"


def test_a_subclass_is_another_method() -> None:
    class Other(PRUNERS["harp-s"]):  # type: ignore[misc]
        pass

    assert Other.title is Other.paper is Other.taxonomy is Other.same_as is None
    assert PRUNERS["harp-s"].same_as == "hydra"


def test_options_without_usable_annotations_are_parsed_by_their_looks(site: Site) -> None:
    source = (
        "from __future__ import annotations\nfrom harp import Magnitude\n"
        "class Own(Magnitude):\n"
        "    def __init__(self, units: NotImported, keep, power=1, **more: object):\n"
        "        super().__init__(units, keep)\n"
        "        self.power = power\n"
    )
    site.install("loose", source, loose="loose:Own")
    content = finished_run.content(method="loose")
    content["stages"][1]["pruner"] |= {"keep": "5%", "power": "1/4"}
    assert recipe.parse(content).stages[1].pruner == {"name": "loose", "keep": 0.05, "power": 0.25}


def test_built_in_methods_do_not_look_at_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(group: str) -> None:
        raise AssertionError(f"entry points of {group} were read")

    monkeypatch.setattr("harp.pruning.methods.table.entry_points", looked)
    assert "harp" in PRUNERS and PRUNERS["magnitude"] is Magnitude
    recipe.parse(finished_run.content())
    study.method("harp:reach=0")
    with pytest.raises(AssertionError, match="were read"):
        PRUNERS.get("other")


def test_a_broken_package_does_not_harm_the_others(own: str, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.install("broken", "raise RuntimeError('never asked for')", broken="broken:Own")
    assert own in PRUNERS
    assert "broken" not in sys.modules and not caplog.records


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("raise RuntimeError('no such\\nthing')", "broken", "RuntimeError: no such thing"),
        ("import sys\nsys.exit(1)", "broken", "SystemExit: 1"),
        ("", "broken", "AttributeError"),
        ("Own = 3", "broken", "broken:Own is no subclass of harp.Pruner"),
        ("class Own: pass", "broken", "broken:Own is no subclass of harp.Pruner"),
        ("from harp import Magnitude as Own", "harp", "HARP has a method of this name"),
        ("from harp import Magnitude as Own", "dense-small", "HARP has a method of this name"),
        ("from harp import Magnitude as Own", "a,b", "a name has letters"),
    ],
)
def test_an_unusable_method_gives_one_warning(
    site: Site, harp: Harp, caplog: pytest.LogCaptureFixture, source: str, name: str, message: str
) -> None:
    kept = dict(PRUNERS.items())
    site.install("broken", source, **{name: "broken:Own"})
    with caplog.at_level(logging.WARNING, "harp"):
        code, out, err = harp("list", "methods")
        harp("list", "methods")
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith(f"method {name!r} of broken is left out: ") and message in line and "\n" not in line
    assert code == 0 and "tandem" in out
    assert err.count("warning") == 1
    assert dict(PRUNERS.items()) == kept


def test_a_name_of_two_packages_is_refused(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for package in ("first", "second"):
        site.install(package, "from harp import Magnitude as Own", twice=f"{package}:Own")
    assert "twice" not in PRUNERS
    (record,) = caplog.records
    assert record.getMessage().startswith("method 'twice' of first, second is left out: several packages")
