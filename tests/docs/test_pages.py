"""Every Python block and every `harp` command of the documentation runs, page by page, as a reader would run them.

A page runs from top to bottom in a folder with the files that it names (`support/workplace.py`). Blocks of Python that
follow each other share a process; every command has one of its own. What a page takes for granted, such as a `model`,
is in SETUPS. Commands are shortened by more options, from SHORTER. Trainings of minutes run with `-m slow` only.
A block behind `<!-- not run: REASON -->` does not run.
"""

import dataclasses
import glob
import linecache
import re
import shlex
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import fresh, workplace
from support.documents import PAGES
from support.paths import ROOT

# The examples of docstrings run in tests/test_api.py, those for trainers in tests/training/; the benchmarks take hours.
ELSEWHERE = {"docs/reference/python.md", "docs/how-to/trainers.md", "benchmarks/README.md"}


@dataclass
class Block:
    """A code block: its language, its text, and the line that it begins at."""

    language: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text("utf-8")
    found = re.finditer(r"(<!-- not run: [^\n]+ -->\n)?```(\w*)\n(.*?)```", text, re.DOTALL)
    return [Block(b[2], b[3], text[: b.start(3)].count("\n")) for b in found if not b[1]]


def commands(block: Block) -> list[str]:
    """The `harp` commands of a block of the shell."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if re.match(r"(harp|python) ", line)] if block.language in SHELLS else []


SHELLS = ("sh", "console")


# --- What pages take for granted


def small(names: dict[str, Any]) -> None:
    """A small network, its batches and some images; trainings of one epoch."""
    import torch
    from torch import nn

    import harp

    names["model"] = workplace.network()
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(16, 3, 8, 8, generator=generator), torch.arange(16) % 4
    names |= {"images": images, "labels": labels, "batches": [(images, labels)], "loader": [(images, labels)]}
    names |= {"harp": harp, "torch": torch}
    names["your_loss"] = lambda model, x, y: nn.functional.cross_entropy(model(x), y)
    names["attack"] = harp.Pgd(8 / 255, steps=1)
    names["units"] = harp.Weights(names["model"])
    names["masks"] = harp.Magnitude(names["units"], keep=0.1).masks()
    one_epoch(names)


def one_epoch(names: dict[str, Any]) -> None:
    """Trainings end after one epoch."""
    import harp

    fit = harp.fit
    harp.fit = lambda *args, **options: fit(*args, **options | {"epochs": min(options["epochs"], 1)})


def cifar(names: dict[str, Any]) -> None:
    """Batches of CIFAR-10."""
    import torch

    import harp

    names["batches"] = [(torch.rand(4, 3, 32, 32), torch.arange(4))]
    names["images"] = torch.rand(4, 3, 32, 32)
    names["harp"] = harp
    one_epoch(names)


def fashion(names: dict[str, Any]) -> None:
    """Data sets end after 600 training and 100 test images, and trainings after one epoch."""
    import torch
    from torch import nn

    import harp

    load = harp.load_data

    def short(*args: Any, **options: Any) -> Any:
        data = load(*args, **options)
        return dataclasses.replace(data, train=data.train.select(range(600)), test=data.test.select(range(100)))

    harp.load_data = short
    names["loader"] = [(torch.rand(16, 1, 28, 28), torch.arange(16) % 10)]
    names["images"] = torch.rand(4, 3, 32, 32)
    names["your_loss"] = lambda model, x, y: nn.functional.cross_entropy(model(x), y)
    names["torch"] = torch
    one_epoch(names)


def readers(names: dict[str, Any]) -> None:
    """The reader of compact files, copied to where it is used."""
    from harp.engine.format import reader

    Path("reader.py").write_text(Path(reader.__file__).read_text("utf-8"), "utf-8")
    small(names)
    names["harp"].apply_masks(names["model"], names["masks"])


SETUPS = {
    "README.md": small,
    "docs/explanation/engine.md": cifar,
    "docs/how-to/coming-from.md": small,
    "docs/how-to/export.md": cifar,
    "docs/how-to/own-loop.md": fashion,
    "docs/how-to/robust-parent.md": cifar,
    "docs/reference/errors.md": small,
    "docs/reference/format.md": readers,
    "docs/reference/methods.md": small,
}


# --- How commands are shortened

DATA = "data.train=40 data.holdout=20 data.batch=20 evaluate.examples=10 evaluate.attacks=[fgsm]"
ONE_EPOCH = "stages.pretrain.epochs=1 stages.prune.epochs=1 stages.finetune.epochs=1"
PRUNED = "stages.prune.epochs=1 stages.finetune.epochs=1"


def changes(*values: str) -> list[str]:
    return [f"--set={value}" for value in " ".join(values).split()]


SHORTER: dict[str, list[str]] = {
    "harp demo": changes(DATA, ONE_EPOCH, "model.width=4"),
    "harp run cifar10": changes(DATA, ONE_EPOCH, "model.width=0.1", "objective.steps=1"),
    "harp run": changes(DATA, ONE_EPOCH, "model.width=4"),
    "harp prune resnet18 --data cifar10 --data-dir data --weights": changes(DATA, PRUNED, "objective.steps=1"),
    "harp prune resnet18": changes(DATA, ONE_EPOCH, "model.width=0.125", "objective.steps=1"),
    "harp prune my_net.py:make --data cifar10": changes(DATA, PRUNED, "objective.steps=1"),
    "harp prune zoo:": changes(DATA, PRUNED),
    "harp prune": changes(DATA, ONE_EPOCH),
    "harp compare": [*changes(DATA, ONE_EPOCH, "model.width=4"), "--seeds=0", "--keep=10%"],
    "harp estimate": ["--steps=5"],
    "harp evaluate": ["--examples=10"],
    "harp export": ["--examples=10"],
    "harp": [],
}
# Attacks of thousands of steps, and trainings.
LONG = re.compile(
    r"harp (demo|run (?!mine.yaml --set stages.prune.pruner.kep)|compare|estimate)|harp prune resnet18"
    r"|harp export .*--check|harp evaluate (resnet18|.*(autoattack|aa-lite|--full|network\.|--devices))"
)
# Checks find something in networks that nobody trained.
ENDS = {"harp evaluate": {0, 1}, "harp run mine.yaml --set stages.prune.pruner.kep": {2}}


def shortened(line: str, folder: Path) -> list[str]:
    """The words after `harp` as the shell gives them, and more options."""
    words = [re.sub("^~", str(folder), word) for word in shlex.split(line, comments=True)]
    matches = [sorted(glob.glob(word, root_dir=folder)) if re.search("[*?]", word) else [] for word in words]
    words = [path for word, found in zip(words, matches, strict=True) for path in (found or [word])]
    prefix = max((prefix for prefix in SHORTER if line.startswith(prefix)), key=len)
    return [*words[1:], *SHORTER[prefix]]


def run_command(line: str) -> None:
    if line.startswith("python "):
        runpy_file(shlex.split(line)[1])
    else:
        fresh.command(shortened(line, Path.cwd()))


def runpy_file(name: str) -> None:
    import runpy

    runpy.run_path(name, run_name="__main__")


def run_python(page: str, found: list[Block]) -> None:
    """Run blocks one after the other; a traceback names the lines of the page."""
    names: dict[str, Any] = {"__name__": "__main__"}
    SETUPS.get(page, lambda names: None)(names)
    linecache.cache[page] = (0, None, (ROOT / page).read_text("utf-8").splitlines(keepends=True), page)
    try:
        for block in found:
            if not workplace.save_if_named(block.text, Path()):
                exec(compile("\n" * block.line + block.text, page, "exec"), names)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def run_page(page: str, folder: Path, *, long: bool) -> None:
    """From top to bottom."""
    waiting: list[Block] = []

    def flush() -> None:
        if waiting:
            code, output = fresh.run(run_python, folder, page, waiting)
            assert code == 0, output
            waiting.clear()

    for block in blocks(page):
        if block.language == "python":
            waiting.append(block)
        for line in commands(block):
            flush()
            if LONG.match(line) and not long:
                continue
            if LONG.match(line):
                code, output = fresh.run_long(folder, shortened(line, folder))
            else:
                code, output = fresh.run(run_command, folder, line)
            expected = next((codes for prefix, codes in ENDS.items() if line.startswith(prefix)), {0, 3})
            assert code in expected, f"{page}: {line}\nexit code {code}\n{output}"
    flush()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("prepared") / "workplace"
    folder.mkdir()
    workplace.make(folder)
    yield folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    workplace.copy(prepared, tmp_path / "workplace")
    return tmp_path / "workplace"


NAMES = [name for name in (str(page.relative_to(ROOT)) for page in PAGES) if name not in ELSEWHERE]
LINES = {name: [line for block in blocks(name) for line in commands(block)] for name in NAMES}
RUNNABLE = [
    name
    for name in NAMES
    if any(block.language == "python" for block in blocks(name)) or any(not LONG.match(line) for line in LINES[name])
]


@pytest.mark.parametrize("page", RUNNABLE)
def test_what_is_quick_on_a_page_runs(page: str, folder: Path) -> None:
    run_page(page, folder, long=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [name for name in NAMES if any(LONG.match(line) for line in LINES[name])])
def test_the_whole_page_runs(page: str, folder: Path) -> None:
    run_page(page, folder, long=True)
