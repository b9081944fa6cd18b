"""Writes a network's files: each is written aside, checked in a fresh process, and put in place when all are well.

FOLDER/network.harp  network.onnx  network.safetensors  network.pt2    what was asked for
FOLDER/manifest.json                                                   what they are, written last
"""

import datetime
import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import harp
from harp import checkpoint, files
from harp.display import Quiet
from harp.errors import CheckpointError, ModelError, RecipeError
from harp.export import codings, formats
from harp.export.asking import Checked, ask
from harp.export.subject import Subject
from harp.sparse.capture import Captured, capture

MANIFEST = "manifest.json"
_VERSION = 1


def export(
    subject: Subject,
    folder: Path,
    to: Sequence[str],
    *,
    values: str = "f16",
    dense: bool = False,
    check: bool = False,
    examples: int | None = None,
    display: Quiet | None = None,
) -> dict[str, Any]:
    """Write the files of a network and their manifest, and give the manifest.

    `values` is the coding of kept weights in the sparse file. `dense` keeps the channels that change no answer in ONNX
    and programs. `check` measures the accuracies in every coding on so many `examples` of the test set.
    """
    display = display or Quiet()
    names = list(dict.fromkeys(to))
    formats.check(names)
    if values not in codings.CODINGS:
        raise RecipeError(f"--values {values}: choose from {', '.join(codings.CODINGS)}")
    _make_folder(folder)
    images = subject.images()
    captured = None
    if "sparse" in names or check:
        display.note("capturing the network's graph")
        captured = capture(subject.model, images[:4])
    facts = _facts(subject)
    if check:
        assert captured is not None
        count = subject.examples if examples is None else examples
        facts["codings"] = codings.accuracies(captured, subject, count, display)
    made: dict[str, Any] = {}
    small = _Small(subject, display)
    with ExitStack() as stack:
        for name in names:
            display.note(f"writing and checking {formats.FORMATS[name].file}")
            path = stack.enter_context(files.atomic(folder / formats.FORMATS[name].file))
            if name == "sparse":
                assert captured is not None
                entry = _write_sparse(path, subject, captured, images, facts, values)
            else:
                model, removed = (subject.model, "") if dense or name == "safetensors" else small.network()
                entry = _write_plain(name, path, subject, images, model)
                entry |= {"removed": removed} if removed else {}
            content = path.read_bytes()
            made[formats.FORMATS[name].file] = {
                "format": name,
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                "ratio": round(subject.dense_bytes / len(content), 2),
                **entry,
            }
    manifest = {**facts, "dense_bytes": subject.dense_bytes, "files": made}
    for key, value in _earlier(folder, manifest).items():
        manifest[key] = {**value, **manifest[key]} if key == "files" else manifest.get(key, value)
    others = _of_another(folder, manifest)
    files.write_json(folder / MANIFEST, manifest)
    for path in others:
        path.unlink(missing_ok=True)
    if others:
        gone = ", ".join(path.name for path in others)
        display.note(f"removed {gone}: of another network, exported to {folder} before")
    return manifest


class _Small:
    """The network without the channels that change no answer, made when it is first wanted."""

    def __init__(self, subject: Subject, display: Quiet) -> None:
        self.subject, self.display = subject, display
        self._found: tuple[nn.Module, str] | None = None

    def network(self) -> tuple[nn.Module, str]:
        """The network and what went, in words; the whole network where its channels can't be followed."""
        if self._found is None:
            try:
                self._found = self.subject.small()
            except ModelError as error:
                self.display.note(f"all channels are kept: {error}")
                self._found = self.subject.model, ""
        return self._found


def _write_sparse(
    path: Path, subject: Subject, captured: Captured, images: Tensor, facts: dict[str, Any], values: str
) -> dict[str, Any]:
    top = {key: facts[key] for key in ("architecture", "input_shape", "classes")}
    rest = {key: value for key, value in facts.items() if key not in top}
    content = codings.packed(captured, subject, {**top, "manifest": rest}, values)
    path.write_bytes(content)
    twin = codings.twin(captured.graph, content)
    # What torch computes may be tied to single precision; all else is held against twice the digits.
    exact = _logits(twin, images) if captured.graph.needs_torch else _logits(twin.double(), images.double())
    checked = ask("sparse", path, images, exact, {})
    original = _logits(subject.model, images)
    deviation = float((exact - original).abs().max() / original.abs().max().clamp_min(1e-30))
    moved = int((exact.argmax(1) != original.argmax(1)).sum())
    own = {
        "values": values,
        "deviation": deviation,
        "deviating_classes": moved,
        "needs_torch": captured.graph.needs_torch,
    }
    return {**own, "check": checked.as_dict()}


def _write_plain(name: str, path: Path, subject: Subject, images: Tensor, model: nn.Module) -> dict[str, Any]:
    more = formats.WRITERS[name](path, model, images)
    about = {
        "name": subject.part.name,
        "options": subject.part.options,
        "normalize": subject.part.normalize,
        "classes": len(subject.classes),
        "shape": list(subject.shape),
        "cut": None if subject.cut is None else subject.cut.as_dict(),
    }
    checked: Checked = ask(name, path, images, _logits(subject.model, images), about if name == "safetensors" else {})
    return {**more, "check": checked.as_dict()}


@torch.no_grad()
def _logits(model: nn.Module, images: Tensor) -> Tensor:
    logits: Tensor = model(images)
    return logits.double()


def _facts(subject: Subject) -> dict[str, Any]:
    """The manifest without the files."""
    run = subject.run
    provenance: dict[str, Any] = {
        "run" if run is not None else "model": subject.name,
        "recipe": None if run is None else run.summary.get("recipe"),
        "network": checkpoint.fingerprint(subject.model),
        "harp": harp.__version__,
        "torch": str(torch.__version__),
        "date": _date(),
    }
    return {"manifest": _VERSION, **subject.facts(), "provenance": provenance}


def _earlier(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What an earlier export of the same network left: files that are still what they were, accuracies."""
    told, kept = _told(folder)
    if not kept or told["provenance"]["network"] != manifest["provenance"]["network"]:
        return {}
    return {"files": kept} | ({"codings": told["codings"]} if "codings" in told else {})


def _of_another(folder: Path, manifest: dict[str, Any]) -> list[Path]:
    """Files that an earlier export of another network left: beside the new manifest they would seem to be its own."""
    told, left = _told(folder)
    if not left or told["provenance"]["network"] == manifest["provenance"]["network"]:
        return []
    return [folder / name for name in left if name not in manifest["files"]]


def _told(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest that is there, and of its files those that are still what it says."""
    try:
        told = json.loads((folder / MANIFEST).read_text("utf-8"))
        assert isinstance(told["provenance"]["network"], str)
        return told, {
            name: entry
            for name, entry in told["files"].items()
            if Path(name).name == name and (folder / name).is_file() and _digest(folder / name) == entry["sha256"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):  # none, or not one of ours
        return {}, {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _date() -> str:
    """Now, or what SOURCE_DATE_EPOCH says: for files that are the same whenever they are made."""
    told = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        seconds = time.time() if told is None else int(told)
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError) as error:
        raise RecipeError(f"SOURCE_DATE_EPOCH={told}: it must be a number of seconds since 1970") from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"can't write to {folder}: {files.reason(error)}") from error
    if not os.access(folder, os.W_OK):
        raise CheckpointError(f"can't write to {folder}: permission denied")
