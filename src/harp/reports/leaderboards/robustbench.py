"""Submissions to RobustBench (https://robustbench.github.io).

    FOLDER/model_info/cifar10/Linf/NAME.json   the entry of the leaderboard
    FOLDER/NAME.py                             the definition, from plain torch, normalisation inside
    FOLDER/NAME.pt                             {"state_dict": ...}, dense, masks multiplied in
    FOLDER/probe.safetensors                   a few images and the logits that the model must give for them
    FOLDER/ISSUE.md, CHECKLIST.md              the text of the issue; what is left to do by hand

Croce, Andriushchenko, Sehwag, Debenedetti, Flammarion, Chiang, Mittal, Hein: "RobustBench: a standardized adversarial
robustness benchmark", NeurIPS 2021. The leaderboards that our networks fit into are CIFAR-10 and CIFAR-100 under L-inf
at 8/255, measured by AutoAttack on all 10,000 test images.
"""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from harp.data.registry import facts
from harp.errors import DataError, RecipeError
from harp.experiments import run_folder
from harp.experiments.run_folder import Finished
from harp.pruning import masks
from harp.reports import templating
from harp.reports.leaderboards.definition import define, source_name
from harp.reports.leaderboards.submission import (
    ERROR,
    WARNING,
    Submission,
    check_free,
    checked,
    fresh,
    paper_of,
    read_json,
)
from harp.system import files
from harp.system.tensors import save_state, save_tensors

EPSILON = 8 / 255
TESTED = 10_000
DATA = ("cifar10", "cifar100")
ARCHITECTURES = {
    "vgg16": "VGG-16",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "wrn-28-4": "WideResNet-28-4",
    "wrn-28-10": "WideResNet-28-10",
    "vgg8": "VGG-8",
    "resnet8": "ResNet-8",
    "convnet": "plain CNN",
    "tinynet": "strided CNN",
}


class Entry(BaseModel):
    """The entry of a model, in the order of RobustBench's files; accuracies are texts in per cent."""

    model_config = ConfigDict(strict=True, extra="forbid")

    link: str
    name: str = Field(min_length=1)
    authors: str = Field(min_length=1)
    additional_data: bool
    number_forward_passes: int
    dataset: Literal["cifar10", "cifar100"]
    venue: str = Field(min_length=1)
    architecture: str
    eps: Literal["8/255"]
    clean_acc: str | None
    reported: str | None
    autoattack_acc: str | None
    footnote: str | None
    unreliable: bool


_NAME = re.compile(r"[^\W\d_][\w-]*\d{4}[\w-]+")
_TOLERANCE = 1e-4  # of the largest logit: other machines add in another order


def prepare(
    run: str | Path,
    out: str | Path,
    *,
    name: str,
    title: str | None = None,
    authors: str | None = None,
    venue: str | None = None,
    link: str | None = None,
    additional_data: bool = False,
    footnote: str | None = None,
) -> Submission:
    """Write the folder of a submission of one finished run; `problems` says what is still missing.

    `name` is that of the model, like Zhao2023Holistic_R18; title, authors, venue and link are those of the paper, by
    default of the method's class. `additional_data` says whether the model was trained on images that are not of the
    data set. `footnote` stands before what is said of the pruning.
    """
    folder = Path(out)
    check_free(folder)
    if not _NAME.fullmatch(name):
        raise RecipeError(f"name {name!r}: write NameYearFirstword, like Zhao2023Holistic or Zhao2023Holistic_R18")
    finished = run_folder.read(run)
    title = title or paper_of(finished, "title").title
    authors = authors or ", ".join(paper_of(finished, "authors").authors)
    venue = venue or "{0.venue} {0.year}".format(paper_of(finished, "venue"))
    link = link or paper_of(finished, "link").link
    if not re.fullmatch(r"https?://\S+", link):
        raise RecipeError(f"link {link!r}: give the paper's, like https://arxiv.org/abs/2111.00000")
    known = facts(finished.recipe.data.name)
    if finished.recipe.data.name not in DATA or known is None:
        raise DataError(
            f"{run}: trained on {finished.data}, RobustBench has {', '.join(DATA)} for networks of this kind"
        )
    part, module = finished.places.model_of(finished.recipe), _module(name)
    architecture = ", ".join(
        [ARCHITECTURES.get(part.name, part.name.rpartition(":")[2]), *(f"{k} {v}" for k, v in part.options.items())]
    )
    definition = define(part, f"{name}: {architecture}, pruned.", module, known.classes, known.shape, part.options)
    state = finished.state() if part.normalize is not None else {f"net.{key}": v for key, v in finished.state().items()}
    images, logits = _probe(finished, known.classes, known.shape)
    clean, clean_n = _accuracy(finished, "natural", None)
    robust, robust_n = _accuracy(finished, "autoattack", EPSILON)
    info = {
        "link": link,
        "name": title,
        "authors": authors,
        "additional_data": additional_data,
        "number_forward_passes": 1,
        "dataset": finished.data,
        "venue": venue,
        "architecture": architecture,
        "eps": "8/255",
        "clean_acc": clean,
        "reported": robust,
        "autoattack_acc": robust,
        "footnote": " ".join(text for text in (footnote, _pruned(finished)) if text) or None,
        "unreliable": False,
    }
    measured = {"model": name, "clean_n": clean_n, "autoattack_n": robust_n, "other_threats": _other_threats(finished)}
    with fresh(folder) as draft:
        save_state(draft / f"{module}.pt", {"state_dict": state})
        files.write_text(draft / f"{module}.py", definition.text)
        if definition.source is not None:
            files.write_text(draft / f"{source_name(module)}.py", definition.source)
        save_tensors(draft / "probe.safetensors", {"images": images, "logits": logits})
        files.write_json(draft / "model_info" / finished.data / "Linf" / f"{name}.json", info)
        files.write_json(draft / "submission.json", {"benchmark": "robustbench", **measured})
        values = {"name": name, "module": module, "info": info, "images": robust_n, "ours": definition.source is None}
        files.write_text(draft / "ISSUE.md", templating.render("robustbench_issue.md", **values))
        problems = validate(draft)
        checklist = templating.render("robustbench_checklist.md", module=module, problems=problems)
        files.write_text(draft / "CHECKLIST.md", checklist)
    return Submission(folder, tuple(problems))


def validate(folder: str | Path) -> list[str]:
    """What is wrong with a prepared folder, from its files alone: lines that begin with `error:` or `warning:`.

    The definition is imported in a process of its own, which can't import HARP, and runs there.
    """
    return checked(Path(folder), _problems)


def _problems(folder: Path) -> list[str]:
    content = read_json(folder / "submission.json")
    name = str(content["model"])
    (path,) = (folder / "model_info").rglob("*.json")
    info, place = read_json(path), path.relative_to(folder).as_posix()
    problems = []
    try:
        entry = Entry.model_validate(info)
    except ValidationError as error:
        problems += [f"{ERROR}{place}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    else:
        if place != f"model_info/{entry.dataset}/Linf/{name}.json":
            problems.append(f"{ERROR}{place}: expected model_info/{entry.dataset}/Linf/{name}.json")
        problems += _wrong_numbers(entry, content)
    missing = [file for file in (f"{_module(name)}.py", f"{_module(name)}.pt") if not (folder / file).is_file()]
    if missing:
        return [*problems, f"{ERROR}{missing[0]} is missing"]
    return [*problems, *_wrong_definition(folder, _module(name))]


def _module(name: str) -> str:
    """A model's name as that of a Python module and class."""
    return re.sub(r"\W", "_", name)


def _pruned(finished: Finished) -> str:
    if finished.pruning is None:
        return ""
    kept, size = finished.kept, finished.size
    text = f"Compressed model: {kept:,} of {size:,} {finished.unit} kept ({kept / size:.3%})"
    if finished.recipe.units.kind != "channels":
        return f"{text}."
    kept, size = (sum(int(layer[key]) for layer in finished.summary["layers"]) for key in ("kept", "size"))
    return f"{text}, {kept:,} of {size:,} channels; those that were cut out are zero in the checkpoint."


def _accuracy(finished: Finished, name: str, epsilon: float | None) -> tuple[str | None, int | None]:
    """An accuracy in per cent, and the number of images."""
    result = run_folder.named(finished, name, epsilon)
    if result is None:
        return None, None
    right, n = run_folder.plain_correct(result)
    return f"{100 * right / n:.2f}", n


def _other_threats(finished: Finished) -> list[str]:
    """Other threat models that AutoAttack was run for: their numbers don't count on the leaderboard."""
    attacks = [r["attack"] for r in finished.results if r["name"] == "autoattack" and r.get("attack")]
    threats = [(str(attack.get("norm", "linf")), float(attack["epsilon"])) for attack in attacks if "epsilon" in attack]
    return sorted({f"{n} {e:.5g}" for n, e in threats if n != "linf" or abs(e - EPSILON) > 1e-6})


def _probe(finished: Finished, classes: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """A few images, and the logits of the run's own network."""
    with torch.random.fork_rng(devices=[]):
        network = finished.network(shape, classes)
    masks.apply(network.model, network.masks)
    images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return images, network.model(images)


def _wrong_numbers(entry: Entry, content: Mapping[str, Any]) -> list[str]:
    problems = []
    claims = (
        ("clean accuracy", entry.clean_acc, content["clean_n"]),
        ("AutoAttack at 8/255, L-inf,", entry.autoattack_acc, content["autoattack_n"]),
    )
    for title, value, n in claims:
        if value is None:
            others = content["other_threats"] if title != "clean accuracy" else []
            seen = f"; there are results for another threat model, {', '.join(others)}" if others else ""
            problems.append(f"{ERROR}no {title} was measured (`harp evaluate` the run, then prepare again){seen}")
        elif not 0 <= float(value) <= 100:
            problems.append(f"{ERROR}{title} is {value}, in per cent")
        elif n != TESTED:
            problems.append(f"{WARNING}{title} on {n:,} images, RobustBench takes all {TESTED:,} of the test set")
    clean, robust = entry.clean_acc, entry.autoattack_acc
    same = content["clean_n"] == content["autoattack_n"]
    if same and clean is not None and robust is not None and float(robust) > float(clean):
        problems.append(f"{ERROR}the accuracy under AutoAttack is above the clean one")
    return problems


_CHECK = """
import sys
sys.modules["harp"] = None
sys.path.insert(0, sys.argv[1])
import importlib
defined = importlib.import_module(sys.argv[2])
import torch
from safetensors.torch import load_file
torch.set_num_threads(1)
model = defined.load(f"{sys.argv[1]}/{sys.argv[2]}.pt")
probe = load_file(f"{sys.argv[1]}/probe.safetensors")
with torch.no_grad():
    difference = (model(probe["images"]) - probe["logits"]).abs().max()
print("difference", float(difference / probe["logits"].abs().max().clamp_min(1e-12)))
"""


def _wrong_definition(folder: Path, module: str) -> list[str]:
    """Import the definition where there is no HARP, load the checkpoint strictly and compare the logits."""
    command = [sys.executable, "-I", "-B", "-c", _CHECK, str(folder.absolute()), module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{ERROR}{module}.py can't be run: {files.reason(error)}"]
    match = re.search(r"^difference (\S+)$", done.stdout, re.MULTILINE)
    if done.returncode or match is None:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1][:200]
        return [f"{ERROR}{module}.py does not give the model without HARP: {last}"]
    if not float(match[1]) <= _TOLERANCE:
        return [f"{ERROR}{module}.py gives other logits than the run's network (off by {float(match[1]):.1e})"]
    return []
