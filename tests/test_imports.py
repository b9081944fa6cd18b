"""The rooms of the house: which packages there are, and what each may import.

Run as a script it prints what every public name loads: `python tests/test_imports.py`.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import harp

SOURCE = Path(harp.__file__).parent

# A package imports only from packages before it.
PACKAGES = (
    "errors",
    "system",
    "models",
    "data",
    "engine",
    "attacks",
    "pruning",
    "training",
    "evaluation",
    "experiments",
    "reports",
    "deploy",
    "cli",
)


def module_of(path: Path) -> str:
    """The dotted name of a file, without the leading `harp`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in SOURCE.rglob("*.py")}


def imports(path: Path, *, lazy: bool = True) -> Iterator[tuple[str, str | None]]:
    """The modules of this package that a file imports, each with the name taken from it; `lazy`: in functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if lazy else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("harp."):
                    yield alias.name.removeprefix("harp."), None
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "harp":
            module = (node.module or "").removeprefix("harp").removeprefix(".")
            for alias in node.names:
                full = f"{module}.{alias.name}".removeprefix(".")
                if full in FILES:
                    yield full, None
                elif module:
                    yield module, alias.name


def inner() -> Iterator[tuple[str, Path]]:
    """All modules but those of the package itself."""
    return ((name, path) for name, path in FILES.items() if name not in ("", "__main__"))


def test_the_folder_holds_these_packages_and_nothing_else() -> None:
    entries = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.name != "__pycache__"}
    assert entries == {*PACKAGES, "__init__", "__main__", "py.typed"}
    assert len(PACKAGES) == 13


def test_a_package_imports_only_from_those_before_it() -> None:
    wrong = set()
    for name, path in inner():
        package = name.split(".")[0]
        for module, _ in imports(path):
            other = module.split(".")[0]
            if other != package and PACKAGES.index(other) > PACKAGES.index(package):
                wrong.add(f"{name} -> {module}")
    assert not wrong, "imports against the order: " + ", ".join(sorted(wrong))


def test_what_others_import_of_a_package_is_named_by_it() -> None:
    """Every step of the way from the package to the module or the name is in the `__all__` of the step before."""
    wrong = set()
    for name, path in inner():
        for module, taken in imports(path):
            if module.split(".")[0] == name.split(".")[0] or module == "errors":
                continue
            parts = module.split(".")
            for depth in range(1, len(parts)):
                if parts[depth] not in import_module("harp." + ".".join(parts[:depth])).__all__:
                    wrong.add(f"{name} -> {module}")
            if taken and FILES[module].name == "__init__.py" and taken not in import_module(f"harp.{module}").__all__:
                wrong.add(f"{name} -> {module}.{taken}")
            if taken and taken.startswith("_") and not taken.startswith("__"):
                wrong.add(f"{name} -> {module}.{taken}")
    assert not wrong, "not offered by the package: " + ", ".join(sorted(wrong))


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_what_a_package_names_is_there(package: str) -> None:
    for name, path in FILES.items():
        if name.split(".")[0] == package and path.name == "__init__.py":
            module = import_module(f"harp.{name}")
            for offered in getattr(module, "__all__", []):
                assert f"{name}.{offered}" in FILES or hasattr(module, offered), f"harp.{name}.{offered}"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {name: {module for module, _ in imports(path, lazy=False)} - {name} for name, path in inner()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, "a circle: " + " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_pruning_methods_do_not_know_each_others_files_except_what_they_build_on() -> None:
    builds_on = {
        "harp": {"hydra"},
        "tandem": {"harp"},
        "hydra": {"s2ap"},
        "anp": {"beta_bernoulli", "_standardised"},
        "mad": {"_kfac"},
    }
    for path in (SOURCE / "pruning" / "methods").glob("*.py"):
        if path.stem in ("__init__", "base"):
            continue
        prefix = "pruning.methods."
        others = {module.removeprefix(prefix) for module, _ in imports(path) if module.startswith(prefix)}
        assert others <= {"base", *builds_on.get(path.stem, ())}, path.name


def loaded(code: str) -> set[str]:
    """The modules of this package that a fresh process has loaded after some code."""
    show = "import sys; print(*(m for m in sys.modules if m == 'harp' or m.startswith('harp.')))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{show}"], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", ["Weights", "Harp", "apply_masks"])
def test_units_and_methods_load_neither_the_engine_nor_channels(name: str) -> None:
    others = ("harp.engine", "harp.pruning.channels")
    assert not {module for module in loaded(f"import harp; harp.{name}") if module.startswith(others)}


def test_the_loop_knows_no_objective_and_no_reader_of_data() -> None:
    modules = {module for module, _ in imports(FILES["training.loop"])}
    assert not modules & {"training.objectives", "training.free_at", "data.registry"}
    assert not any(module.startswith(("data.formats", "data.datasets", "data.streaming")) for module in modules)


def test_public_names_are_sorted_and_all_there() -> None:
    assert harp.__all__ == sorted(harp.__all__)
    for name in harp.__all__:
        first = getattr(harp, name)
        assert getattr(harp, name) is first, "a submodule must not shadow a public name"


def test_help_does_not_load_torch() -> None:
    code = "import sys; import harp.cli; sys.exit('torch' in sys.modules or 'lightning_fabric' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    for public in ("Weights", "Harp", "fit", "Pgd", "load"):
        modules = loaded(f"import harp; harp.{public}")
        lines = sum(len(FILES[m.removeprefix("harp").removeprefix(".")].read_text().splitlines()) for m in modules)
        print(f"harp.{public}: {len(modules)} modules, {lines} lines")
