"""Submissions to RobustBench (https://robustbench.github.io).

    FOLDER/model_info/cifar10/Linf/NAME.json   the entry of the leaderboard
    FOLDER/NAME.py                             the definition, from plain torch, normalisation inside
    FOLDER/NAME.pt                             {"state_dict": ...}, dense, masks multiplied in
    FOLDER/probe.safetensors                   a few images and the logits that the model must give on them
    FOLDER/ISSUE.md, CHECKLIST.md              the text of the issue; what is left to a person

Croce, Andriushchenko, Sehwag, Debenedetti, Flammarion, Chiang, Mittal, Hein: "RobustBench: a standardized adversarial
robustness benchmark", NeurIPS 2021. The leaderboards that our networks fit into are CIFAR-10 and CIFAR-100 under L-inf
at 8/255, measured by AutoAttack on all 10,000 test images.
"""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harp.data.registry import facts
from harp.errors import CheckpointError, DataError, RecipeError
from harp.experiments import run_folder
from harp.experiments.run_folder import Finished
from harp.pruning import masks
from harp.reports.leaderboards.definition import define, source_name
from harp.reports.leaderboards.submission import ERROR, WARNING, Submission, check_free, fresh, paper_of, read_json
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
FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "link": str,
    "name": str,
    "authors": str,
    "additional_data": bool,
    "number_forward_passes": int,
    "dataset": str,
    "venue": str,
    "architecture": str,
    "eps": str,
    "clean_acc": (str, type(None)),
    "reported": (str, type(None)),
    "autoattack_acc": (str, type(None)),
    "footnote": (str, type(None)),
    "unreliable": bool,
}
"""The entry of a model, in the order of RobustBench's files; accuracies are texts in per cent."""

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

    `name` is the model's, like Zhao2023Holistic_R18; title, authors, venue and link are the paper's, by default that
    of the method's class. `additional_data` says whether other images than the data set's were trained on. `footnote`
    stands before what is said of the pruning.
    """
    folder = Path(out)
    check_free(folder)
    if not _NAME.fullmatch(name):
        raise RecipeError(f"name {name!r}: write NameYearFirstword, like Zhao2023Holistic or Zhao2023Holistic_R18")
    found = run_folder.read(run)
    title = title or paper_of(found, "title").title
    authors = authors or ", ".join(paper_of(found, "authors").authors)
    venue = venue or "{0.venue} {0.year}".format(paper_of(found, "venue"))
    link = link or paper_of(found, "link").link
    if not re.fullmatch(r"https?://\S+", link):
        raise RecipeError(f"link {link!r}: give the paper's, like https://arxiv.org/abs/2111.00000")
    known = facts(found.recipe.data.name)
    if found.recipe.data.name not in DATA or known is None:
        raise DataError(f"{run}: trained on {found.data}, RobustBench has {', '.join(DATA)} for networks of this kind")
    part, shape, classes = found.recipe.model, known.shape, known.classes
    module = _module(name)
    made = define(part, f"{name}: {_architecture(found)}, pruned.", module, classes, shape, part.options)
    state = found.state()
    images, logits = _probe(found, classes, shape)
    info = {
        "link": link,
        "name": title,
        "authors": authors,
        "additional_data": additional_data,
        "number_forward_passes": 1,
        "dataset": found.data,
        "venue": venue,
        "architecture": _architecture(found),
        "eps": "8/255",
        **_accuracies(found),
        "footnote": " ".join(text for text in (footnote, _pruned(found)) if text) or None,
        "unreliable": False,
    }
    with fresh(folder) as draft:
        prefixed = state if part.normalize is not None else {f"net.{key}": value for key, value in state.items()}
        save_state(draft / f"{module}.pt", {"state_dict": prefixed})
        files.write_text(draft / f"{module}.py", made.text)
        if made.source is not None:
            files.write_text(draft / f"{source_name(module)}.py", made.source)
        save_tensors(draft / "probe.safetensors", {"images": images, "logits": logits})
        files.write_json(draft / "model_info" / found.data / "Linf" / f"{name}.json", info)
        measured: dict[str, Any] = {"model": name, "clean_n": _n(found, None), "autoattack_n": _n(found, EPSILON)}
        measured["other_threats"] = _other_threats(found)
        files.write_json(draft / "submission.json", {"benchmark": "robustbench", **measured})
        files.write_text(draft / "ISSUE.md", _issue(name, info, measured, ours=made.source is None))
        problems = validate(draft)
        files.write_text(draft / "CHECKLIST.md", _checklist(name, problems))
    return Submission(folder, tuple(problems))


def validate(folder: str | Path) -> list[str]:
    """What is wrong with a prepared folder, from its files alone: lines that begin with `error:` or `warning:`.

    The definition is imported in a process of its own, which can't import HARP, and runs there.
    """
    path = Path(folder)
    try:
        content = read_json(path / "submission.json")
        name = str(content["model"])
        (entry,) = (path / "model_info").rglob("*.json")
        info = read_json(entry)
        problems = [*_wrong_info(info, entry, path, name), *_wrong_numbers(info, content)]
    except CheckpointError as error:
        return [f"{ERROR}{error}"]
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        return [f"{ERROR}{folder} is no submission of ours, or damaged: {files.reason(error)}"]
    missing = [file for file in (f"{_module(name)}.py", f"{_module(name)}.pt") if not (path / file).is_file()]
    if missing:
        return [*problems, f"{ERROR}{missing[0]} is missing"]
    return [*problems, *_wrong_definition(path, _module(name))]


def _module(name: str) -> str:
    """A model's name as that of a Python module and class."""
    return re.sub(r"\W", "_", name)


def _architecture(found: Finished) -> str:
    part = found.recipe.model
    words = ARCHITECTURES.get(part.name, part.name.rpartition(":")[2])
    options = ", ".join(f"{key} {value}" for key, value in part.options.items())
    return f"{words}, {options}" if options else words


def _pruned(found: Finished) -> str:
    stage = found.pruning
    if stage is None:
        return ""
    text = f"Compressed model: {found.kept:,} of {found.size:,} {found.unit} kept ({found.kept / found.size:.3%})"
    if found.recipe.units.kind != "channels":
        return f"{text}."
    kept, size = (sum(int(layer[key]) for layer in found.summary["layers"]) for key in ("kept", "size"))
    return f"{text}, {kept:,} of {size:,} channels; those that were cut out are zero in the checkpoint."


def _accuracies(found: Finished) -> dict[str, str | None]:
    clean, attacked = run_folder.named(found, "natural"), run_folder.named(found, "autoattack", EPSILON)
    texts = [None if r is None else f"{100 * _share(r):.2f}" for r in (clean, attacked)]
    return {"clean_acc": texts[0], "reported": texts[1], "autoattack_acc": texts[1]}


def _share(result: Mapping[str, Any]) -> float:
    right, n = run_folder.plain_correct(result)
    return right / n


def _n(found: Finished, epsilon: float | None) -> int | None:
    result = run_folder.named(found, "natural" if epsilon is None else "autoattack", epsilon)
    return None if result is None else run_folder.plain_correct(result)[1]


def _other_threats(found: Finished) -> list[str]:
    """AutoAttack in other balls than the leaderboard's: worth a word, since those numbers don't count there."""
    attacks = [r["attack"] for r in found.results if r["name"] == "autoattack" and r.get("attack")]
    others = [(str(a.get("norm", "linf")), float(a["epsilon"])) for a in attacks if "epsilon" in a]
    return sorted({f"{n} {e:.5g}" for n, e in others if n != "linf" or abs(e - EPSILON) > 1e-6})


def _probe(found: Finished, classes: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """A few images, and what the run's own network answers."""
    with torch.random.fork_rng(devices=[]):
        network = found.network(shape, classes)
    masks.apply(network.model, network.masks)
    images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return images, network.model(images)


def _wrong_info(info: Mapping[str, Any], entry: Path, folder: Path, name: str) -> list[str]:
    where = entry.relative_to(folder).as_posix()
    if where != f"model_info/{info.get('dataset')}/Linf/{name}.json" or info.get("dataset") not in DATA:
        return [f"{ERROR}{where}: expected model_info/DATA/Linf/{name}.json for one of {', '.join(DATA)}"]
    for field, kind in FIELDS.items():
        if field not in info:
            return [f"{ERROR}{where}: {field!r} is missing"]
        if not isinstance(info[field], kind) or (kind is int and isinstance(info[field], bool)):
            return [f"{ERROR}{where}: {field!r} is {info[field]!r}"]
    extra = [field for field in info if field not in FIELDS]
    if extra:
        return [f"{ERROR}{where}: RobustBench knows no {extra[0]!r}"]
    problems = [f"{ERROR}{where}: {field!r} is empty" for field in ("name", "authors", "venue") if not info[field]]
    if info["eps"] != "8/255":
        problems.append(f"{ERROR}{where}: eps is {info['eps']!r}, the leaderboard's is 8/255 in L-inf")
    return problems


def _wrong_numbers(info: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    problems = []
    names = {
        "clean_acc": ("clean_n", "clean accuracy"),
        "autoattack_acc": ("autoattack_n", "AutoAttack at 8/255, L-inf,"),
    }
    for field, (count, words) in names.items():
        value, n = info[field], content[count]
        if value is None:
            others = content["other_threats"] if field == "autoattack_acc" else []
            seen = f"; what there is, is at {', '.join(others)}, another threat model" if others else ""
            problems.append(f"{ERROR}no {words} was measured (`harp evaluate` the run, then prepare again){seen}")
        elif not 0 <= float(value) <= 100:
            problems.append(f"{ERROR}{words} is {value}, in per cent")
        elif n != TESTED:
            problems.append(f"{WARNING}{words} on {n:,} images, RobustBench takes all {TESTED:,} of the test set")
    both = [info[field] for field in names]
    if None not in both and content["clean_n"] == content["autoattack_n"] and float(both[1]) > float(both[0]):
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
        return [f"{ERROR}{module}.py can't be tried out: {files.reason(error)}"]
    found = re.search(r"^difference (\S+)$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1][:200]
        return [f"{ERROR}{module}.py does not give the model without HARP: {last}"]
    if not float(found[1]) <= _TOLERANCE:
        return [f"{ERROR}{module}.py gives other logits than the run's network (off by {float(found[1]):.1e})"]
    return []


def _issue(name: str, info: Mapping[str, Any], measured: Mapping[str, Any], *, ours: bool) -> str:
    """The text of the issue, in the order of RobustBench's template."""
    n = measured["autoattack_n"]
    method = "not measured" if n is None else f"AutoAttack (standard), L-inf, eps = 8/255, {n:,} test images"
    lines = [
        f"# [New Model] {name}",
        "",
        "# Paper Information",
        "",
        f"- **Paper Title**: {info['name']}",
        f"- **Paper URL**: {info['link']}",
        f"- **Paper authors**: {info['authors']}",
        "",
        "# Leaderboard Claim(s)",
        "",
        "## Model 1",
        "",
        f"- **Architecture**: {info['architecture']}",
        f"- **Dataset**: {info['dataset']}",
        "- **Threat Model**: Linf",
        f"- **eps**: {info['eps']}",
        f"- **Clean accuracy**: {info['clean_acc'] or 'not measured'}",
        f"- **Robust accuracy**: {info['autoattack_acc'] or 'not measured'}",
        f"- **Additional data**: {str(info['additional_data']).lower()}",
        f"- **Evaluation method**: {method}",
        "- **Checkpoint and code**: (put the link here)",
        "",
        f"Note: {info['footnote'] or 'none'}",
        "",
        "# Model Zoo:",
        "",
        "- [ ] I want to add my models to the Model Zoo (check if true)",
        f"- [{'x' if not ours else ' '}] I use an architecture that is **not** included among those of RobustBench "
        f"(check if true); `{_module(name)}.py` defines it",
        "- [ ] I agree to release my model(s) under MIT license (check if true) **OR**",
        "- [ ] I want my models to be released under a custom license, located here: (put the link here)",
        "",
    ]
    return "\n".join(lines)


def _checklist(name: str, problems: Sequence[str]) -> str:
    """What is left to a person."""
    todo = [
        f"Put `{_module(name)}.pt` where it can be downloaded, and its link into `ISSUE.md`.",
        "Decide on the licence and tick its box in `ISSUE.md`.",
        "RobustBench wants gradients that are not zero in general, a deterministic forward pass and no optimisation in "
        "it: our own networks are such; look at yours.",
        "Open an issue with the text of `ISSUE.md`: https://github.com/RobustBench/robustbench/issues/new/choose",
    ]
    lines = ["# What is left to do", "", *(f"- [ ] {each}" for each in todo), ""]
    return "\n".join([*lines, "## Problems found", "", *(f"- {line}" for line in problems or ["none"]), ""])
