"""What the documentation shows works: its Python blocks run, its commands exist, its links lead somewhere."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import harp
from harp import allocate, cli
from harp.masks import kept
from harp.pruners import PRUNERS
from harp.units import Weights
from tests import cases

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")]
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_library_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = blocks("docs/library.md", "python")[0].replace('"fashion"', '"digits"').replace("epochs=6", "epochs=1")
    scope: dict[str, object] = {}
    exec(compile(example.replace("500", "200"), "docs/library.md", "exec"), scope)
    assert (tmp_path / "model.safetensors").stat().st_size > 1000
    assert kept(scope["pruner"].masks()) == scope["units"].total(0.01)


def test_the_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("README.md", "python")
    example = example.replace("epochs=20", "epochs=1").replace("epochs=100", "epochs=1").replace("0.01)", "0.1)")
    scope = {"model": cases.build("conv"), "batches": [cases.batch(seed=seed) for seed in range(3)]}
    exec(compile(example, "README.md", "exec"), scope)
    assert (tmp_path / "model.safetensors").exists()


def test_the_two_lines_run() -> None:
    example = blocks("docs/library.md", "python")[1].replace("range(20)", "range(2)").replace("keep=0.01", "keep=0.1")
    model = cases.build("conv")
    scope = {"torch": torch, "model": model, "loader": [cases.batch(seed=seed) for seed in range(3)]}
    scope["your_loss"] = lambda model, x, y: nn.functional.cross_entropy(model(x), y)
    exec(compile("import harp\n" + example, "docs/library.md", "exec"), scope)
    assert kept(scope["masks"]) == Weights(model).total(0.1)


def test_every_method_has_its_row() -> None:
    for page in ("docs/methods.md", "docs/recipes.md"):
        first_cells = re.findall(r"^\|(.*?)\|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert set(PRUNERS) <= set(re.findall("`(.+?)`", "".join(first_cells))), page


def test_the_crippled_attack_can_be_shown() -> None:
    example = blocks("docs/methods.md", "python")[0].replace("epochs=20", "epochs=1")
    scope = {"model": cases.build("conv"), "batches": [cases.batch(seed=seed) for seed in range(3)]}
    scope["images"], scope["labels"] = cases.batch(seed=9)
    exec(compile(example, "docs/methods.md", "exec"), scope)
    assert scope["claimed"].n == scope["honest"].n == len(scope["labels"])


def test_the_added_method_runs() -> None:
    scope: dict[str, type] = {}
    exec(compile(blocks("docs/methods.md", "python")[1], "docs/methods.md", "exec"), scope)
    model = cases.build("residual")
    units = Weights(model)
    pruner = scope["Sensitivity"](units, keep=0.1)
    before = pruner.masks()
    fitted = harp.fit(model, [cases.batch()], harp.Natural(), pruner, epochs=2)
    counts = [int(mask.sum()) for mask in fitted.masks.values()]
    assert counts == allocate.erk(units, units.total(0.1))
    assert any(not torch.equal(mask, before[name]) for name, mask in fitted.masks.items())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_its_options_exist(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = re.findall(r"```(?:sh|shell|bash)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for line in "\n".join(shell).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] != ["harp"]:
            continue
        monkeypatch.setattr(sys, "argv", [*words[:2], "--help"])
        with pytest.raises(SystemExit):
            cli.main()
        helped = capsys.readouterr().out
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in helped, f"{line}: {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
