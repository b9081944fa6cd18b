"""Write the files of an export. They are put in place only after all of them passed the check in a fresh process.

FOLDER/network.harp  network.onnx  network.safetensors  network.pt2    the requested formats
FOLDER/manifest.json                                                   describes them, written last
"""

import datetime
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import harp
from harp.deploy import fresh_process
from harp.deploy.export import formats
from harp.deploy.export.formats import FORMATS
from harp.deploy.export.source import ACCURACY_KEYS, Source
from harp.engine.capture.capture import Captured, capture
from harp.errors import CheckpointError, DataError, ModelError, RecipeError
from harp.evaluation import accuracy
from harp.experiments import build
from harp.models.weights import fingerprint
from harp.system import files
from harp.system.nearest import unknown
from harp.system.progress import Quiet

MANIFEST = "manifest.json"
_VERSION = 1
_ATTACK = "pgd-20"  # that measures the robust accuracy of codings

BOUND = 1e-5
"""The largest allowed error, relative to the largest logit: another order of summation stays below it."""


def export(
    source: Source,
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
    formats.check(to)
    if values not in formats.CODINGS:
        raise RecipeError(unknown("coding of values", values, formats.CODINGS))
    _make_folder(folder)
    images, facts = source.images(), _facts(source)

    @cache
    def captured() -> Captured:
        display.note("capturing the network's graph")
        return capture(source.model, images[:4])

    @cache
    def without_dead_channels() -> tuple[nn.Module, str]:
        try:
            return source.without_dead_channels()
        except ModelError as error:
            display.note(f"all channels are kept: {error}")
            return source.model, ""

    if check:
        if examples is None and source.run is not None:
            examples = source.run.recipe.evaluate.examples
        facts["codings"] = _coding_accuracies(captured(), source, examples, display)
    entries: dict[str, Any] = {}
    with ExitStack() as stack:
        for name in dict.fromkeys(to):
            file, writer = FORMATS[name].file, FORMATS[name].write
            display.note(f"writing and checking {file}")
            path = stack.enter_context(files.atomic(folder / file))
            if writer is None:
                entry = _write_sparse(path, source, captured(), images, facts, values)
            else:
                keep_all = dense or name == "safetensors"
                model, removed = (source.model, "") if keep_all else without_dead_channels()
                entry = writer(path, model, images)
                entry["check"] = check_file(name, path, source, images, _logits(source.model, images))
                entry |= {"removed": removed} if removed else {}
            size = path.stat().st_size
            ratio = round(source.dense_bytes / size, 2)
            entries[file] = {"format": name, "bytes": size, "sha256": _sha256(path), "ratio": ratio, **entry}
    manifest = {**facts, "dense_bytes": source.dense_bytes, "files": entries}
    _merge_with_previous(folder, manifest, display)
    return manifest


def check_file(form: str, path: Path, source: Source, images: Tensor, expected: Tensor) -> dict[str, Any]:
    """Compare a file's logits, computed in a fresh process, with the expected ones.

    Raises `ModelError` if they differ by more than the bound.
    """
    # One image alone and the others in one batch: the result must not depend on the batch size.
    batches = [part.numpy() for part in (images[:1], images[1:])]
    runtime, threads = FORMATS[form].runtime, torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        opened = _description(Path(folder), path, source) if runtime == "state_dict" else path
        logits, measured = fresh_process.predict(runtime, opened, batches, threads)
    wanted = expected.double().numpy()
    if logits.shape != wanted.shape:
        raise ModelError(f"the logits of the {form} file are of shape {logits.shape}, not {wanted.shape}")
    error = float(np.abs(logits.astype(np.float64) - wanted).max() / max(float(np.abs(wanted).max()), 1e-30))
    if not error <= BOUND:
        gap = f"differ from the network's by {error:.1e} of the largest, {BOUND:.0e} is allowed"
        raise ModelError(f"the logits of the {form} file {gap}; nothing was written")
    changed = int((logits.argmax(1) != wanted.argmax(1)).sum())
    return {"images": len(images), "error": error, "bound": BOUND, "changed": changed, "torch": measured["torch"]}


def _description(folder: Path, weights: Path, source: Source) -> Path:
    """A file that says how to build the network around its plain weights."""
    description = {
        "model": source.architecture.model_dump(exclude={"weights"}),
        "classes": len(source.classes),
        "shape": list(source.shape),
        "cut": None if source.cut is None else source.cut.as_dict(),
        "weights": str(weights.absolute()),
    }
    files.write_json(folder / "network.json", description)
    return folder / "network.json"


def _write_sparse(
    path: Path, source: Source, captured: Captured, images: Tensor, facts: dict[str, Any], values: str
) -> dict[str, Any]:
    top = {key: facts[key] for key in ("architecture", "input_shape", "classes")}
    rest = {key: value for key, value in facts.items() if key not in top}
    content = formats.packed(captured, source, {**top, "manifest": rest}, values)
    path.write_bytes(content)
    stored = formats.unpacked(captured.graph, content)
    # Parts that torch computes may need float32; everything else is compared with float64.
    needs_torch = captured.graph.needs_torch
    exact = _logits(stored, images) if needs_torch else _logits(stored.double(), images.double())
    original = _logits(source.model, images)
    return {
        "values": values,
        "deviation": float((exact - original).abs().max() / original.abs().max().clamp_min(1e-30)),
        "deviating_classes": int((exact.argmax(1) != original.argmax(1)).sum()),
        "needs_torch": needs_torch,
        "check": check_file("sparse", path, source, images, exact),
    }


@torch.no_grad()
def _logits(model: nn.Module, images: Tensor) -> Tensor:
    logits: Tensor = model(images)
    return logits.double()


def _coding_accuracies(
    captured: Captured, source: Source, examples: int | None, display: Quiet
) -> list[dict[str, Any]]:
    """Natural and robust accuracy of the network in every coding, measured like the run's evaluation."""
    if source.data is None:
        raise DataError("the accuracy of codings is measured on a data set: this network has none")
    results = []
    attack, size = build.attack_of(_ATTACK, source.threat)[1], len(source.data.test)
    ball = {"epsilon": source.threat.epsilon, "norm": source.threat.norm}
    for values in formats.CODINGS:
        network = formats.unpacked(captured.graph, formats.packed(captured, source, {}, values))
        for name, chosen, threat in (("natural", None, {}), (_ATTACK, attack, ball)):
            with display.counting(f"{values}, {name}", min(examples or size, size)):
                result, _ = accuracy.measure(
                    network, source.data, name, chosen, examples=examples, seed=source.seed, progress=display.count
                )
            results.append({"values": values, **{key: result[key] for key in ACCURACY_KEYS}, **threat})
    return results


def _facts(source: Source) -> dict[str, Any]:
    """The manifest without the files."""
    run = source.run
    provenance: dict[str, Any] = {
        "run" if run is not None else "model": source.name,
        "recipe": None if run is None else run.summary.get("recipe"),
        "network": fingerprint(source.model),
        "harp": harp.__version__,
        "torch": str(torch.__version__),
        "date": _date(),
    }
    return {"manifest": _VERSION, **source.facts(), "provenance": provenance}


def _merge_with_previous(folder: Path, manifest: dict[str, Any], display: Quiet) -> None:
    """Write the manifest, with what an earlier export of the same network left; remove files of another network."""
    try:
        previous = json.loads((folder / MANIFEST).read_text("utf-8"))
        network = previous["provenance"]["network"]
        unchanged = {
            name: entry
            for name, entry in previous["files"].items()
            if Path(name).name == name and (folder / name).is_file() and _sha256(folder / name) == entry["sha256"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none, or it is not ours
        previous, network, unchanged = {}, None, {}
    stale: list[str] = []
    if network == manifest["provenance"]["network"]:
        manifest["files"] = {**unchanged, **manifest["files"]}
        if unchanged and "codings" in previous:
            manifest.setdefault("codings", previous["codings"])
    elif isinstance(network, str):  # beside the new manifest they would look like this network's
        stale = [name for name in unchanged if name not in manifest["files"]]
    files.write_json(folder / MANIFEST, manifest)
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    if stale:
        display.note(f"removed {', '.join(stale)}: of another network, exported to {folder} before")


def _sha256(path: Path) -> str:
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
