"""Imports go one way. Each line may import from the lines above it, and nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import harp

SOURCE = Path(harp.__file__).parent
LAYERS = [
    {"errors", "seeds", "display", "confidence"},
    {
        "files",
        "processes",
        "normalize",
        "loaders",
        "readers",
        "modes",
        "schedules",
        "standings",
        "energy",
        "chance_level",
    },
    {"seal", "plain", "finite"},
    {"compact", "streaming"},
    {"sparse"},
    {"frozen"},
    {"checkpoint", "split", "models"},
    {"states"},
    {"keeper", "metrics", "masks", "sources", "cost", "prunable"},
    {"units", "readable", "sharding", "data", "attacks", "parallel", "picture", "summary"},
    {"apportion", "channels", "free", "launchers"},
    {"paths", "allocate", "kfac", "batches", "objectives", "standardised", "answers", "doctor", "artefact"},
    {"pruners", "assault"},
    {"training", "recipe", "survey", "pipeline", "evaluate"},
    {"assess", "folders", "compacting", "presets", "study", "finished", "suspicion", "contradictions", "corruptions"},
    {"run", "catalogue", "narrow", "audit", "report", "submit", "card", "shrink", "export"},
    {"compare", "deployed", "bench"},
    {"estimate"},
    {"cli"},
    {"__main__"},
]


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports, by their first name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module if "." in node.module else f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("harp.")}
    return found - {"__version__"}


def test_every_module_has_its_layer_and_imports_downwards() -> None:
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        assert module in level, f"{module} has no layer: give it one in LAYERS"
        others = imported(path) - {module}
        wrong += [f"{module} -> {other}" for other in others if level[other] >= level[module]]
    assert not wrong, "imports against the arrows: " + ", ".join(sorted(set(wrong)))


def test_pruning_methods_do_not_know_each_others_files_except_what_they_build_on() -> None:
    base = {"harp.pruners.base"}
    builds_on = {
        "harp": {"harp.pruners.hydra"},
        "tandem": {"harp.pruners.harp"},
        "hydra": {"harp.pruners.s2ap"},
        "anp": {"harp.pruners.beta_bernoulli"},
    }
    for path in (SOURCE / "pruners").glob("*.py"):
        if path.stem not in ("__init__", "base"):
            tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            others = {
                n.module for n in tree if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("harp.pruners")
            }
            assert others <= base | builds_on.get(path.stem, set()), path.name


def test_public_names_are_sorted_and_all_there() -> None:
    assert harp.__all__ == sorted(harp.__all__)
    for name in harp.__all__:
        first = getattr(harp, name)
        assert getattr(harp, name) is first, "a submodule must not shadow a public name"


def test_help_does_not_load_torch() -> None:
    code = "import sys; import harp.cli; sys.exit('torch' in sys.modules or 'lightning_fabric' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
