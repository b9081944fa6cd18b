"""Write the files of an export. They are put in place only after all of them passed the check in a fresh process.

FOLDER/network.harp  network.onnx  network.safetensors  network.pt2    the requested formats
FOLDER/manifest.json                                                   describes them, written last
"""

import datetime
import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import harp
from harp.deploy.export import codings, formats
from harp.deploy.export.check import Checked, ask
from harp.deploy.export.source import Subject
from harp.engine.capture.capture import Captured, capture
from harp.errors import CheckpointError, ModelError, RecipeError
from harp.models.weights import fingerprint
from harp.system import files
from harp.system.progress import Quiet

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
    """Write the files of a network and their manifest, and return the manifest.

    `values` is the coding of kept weights in the sparse file. `dense` keeps the channels that do not change the logits
    in ONNX files and programs. `check` measures the accuracy in every coding, on `examples` test images.
    """
    display = display or Quiet()
    names = list(dict.fromkeys(to))
    formats.check(names)
    if values not in codings.CODINGS:
        raise RecipeError(f"--values {values}: choose from {', '.join(codings.CODINGS)}")
    _make_folder(folder)
    images = subject.images()
    variants = _Variants(subject, images, display)
    facts = _facts(subject)
    if check:
        count = subject.examples if examples is None else examples
        facts["codings"] = codings.accuracies(variants.captured, subject, count, display)
    entries: dict[str, Any] = {}
    with ExitStack() as stack:
        for name in names:
            display.note(f"writing and checking {formats.FORMATS[name].file}")
            path = stack.enter_context(files.atomic(folder / formats.FORMATS[name].file))
            if name == "sparse":
                entry = _write_sparse(path, subject, variants.captured, images, facts, values)
            else:
                model, removed = (subject.model, "") if dense or name == "safetensors" else variants.small
                entry = _write_plain(name, path, subject, images, model)
                entry |= {"removed": removed} if removed else {}
            content = path.read_bytes()
            entries[formats.FORMATS[name].file] = {
                "format": name,
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                "ratio": round(subject.dense_bytes / len(content), 2),
                **entry,
            }
    manifest = {**facts, "dense_bytes": subject.dense_bytes, "files": entries}
    for key, value in _earlier(folder, manifest).items():
        manifest[key] = {**value, **manifest[key]} if key == "files" else manifest.get(key, value)
    stale = _stale(folder, manifest)
    files.write_json(folder / MANIFEST, manifest)
    for path in stale:
        path.unlink(missing_ok=True)
    if stale:
        removed_names = ", ".join(path.name for path in stale)
        display.note(f"removed {removed_names}: of another network, exported to {folder} before")
    return manifest


class _Variants:
    """The forms of the network that formats need, each made when it is first needed."""

    def __init__(self, subject: Subject, images: Tensor, display: Quiet) -> None:
        self.subject, self.images, self.display = subject, images, display

    @cached_property
    def captured(self) -> Captured:
        """The network's graph."""
        self.display.note("capturing the network's graph")
        return capture(self.subject.model, self.images[:4])

    @cached_property
    def small(self) -> tuple[nn.Module, str]:
        """The network without the channels that do not change its logits, and a text that says what was removed.

        The whole network if its channels can't be traced.
        """
        try:
            return self.subject.small()
        except ModelError as error:
            self.display.note(f"all channels are kept: {error}")
            return self.subject.model, ""


def _write_sparse(
    path: Path, subject: Subject, captured: Captured, images: Tensor, facts: dict[str, Any], values: str
) -> dict[str, Any]:
    top = {key: facts[key] for key in ("architecture", "input_shape", "classes")}
    rest = {key: value for key, value in facts.items() if key not in top}
    content = codings.packed(captured, subject, {**top, "manifest": rest}, values)
    path.write_bytes(content)
    twin = codings.twin(captured.graph, content)
    # Parts that torch computes may need float32; everything else is compared with float64.
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
        "network": fingerprint(subject.model),
        "harp": harp.__version__,
        "torch": str(torch.__version__),
        "date": _date(),
    }
    return {"manifest": _VERSION, **subject.facts(), "provenance": provenance}


def _earlier(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an earlier export of the same network: its unchanged files and its accuracies."""
    previous, kept = _previous_manifest(folder)
    if not kept or previous["provenance"]["network"] != manifest["provenance"]["network"]:
        return {}
    return {"files": kept} | ({"codings": previous["codings"]} if "codings" in previous else {})


def _stale(folder: Path, manifest: dict[str, Any]) -> list[Path]:
    """Files of an earlier export of another network: beside the new manifest they would look like this network's."""
    previous, kept = _previous_manifest(folder)
    if not kept or previous["provenance"]["network"] == manifest["provenance"]["network"]:
        return []
    return [folder / name for name in kept if name not in manifest["files"]]


def _previous_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest in the folder, and the entries of its files that are unchanged; both empty if it is not valid."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if not isinstance(manifest["provenance"]["network"], str):
            raise CheckpointError(f"{folder / MANIFEST} does not name its network")
        return manifest, {
            name: entry
            for name, entry in manifest["files"].items()
            if Path(name).name == name and (folder / name).is_file() and _digest(folder / name) == entry["sha256"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):  # missing, or not ours
        return {}, {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _date() -> str:
    """The current time, or SOURCE_DATE_EPOCH for reproducible files."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        seconds = time.time() if epoch is None else int(epoch)
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError) as error:
        raise RecipeError(f"SOURCE_DATE_EPOCH={epoch}: it must be a number of seconds since 1970") from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"can't write to {folder}: {files.reason(error)}") from error
    if not os.access(folder, os.W_OK):
        raise CheckpointError(f"can't write to {folder}: permission denied")
