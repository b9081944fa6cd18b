"""The scripts of the project as modules, and repositories for them to look at."""

import os
import subprocess
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from support.paths import ROOT


def load_script(name: str) -> ModuleType:
    """The files have no extension, which a plain import needs."""
    loader = SourceFileLoader(f"scripts_{name}", str(ROOT / "scripts" / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def git(root: Path, *words: str) -> None:
    """Without the settings of the user, and without the variables of a hook, which name another repository."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CONFIG_GLOBAL"] = os.devnull
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, env=environment)
