"""The public function that exports a network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from harp.deploy.export import source, write
from harp.errors import RecipeError
from harp.experiments.run_folder import LoadedRun
from harp.system import hub
from harp.system.progress import Quiet


def export(
    network: LoadedRun | nn.Module | str | Path,
    to: str | Sequence[str],
    folder: str | Path | None = None,
    *,
    values: str = "f16",
    dense: bool = False,
    check: bool = False,
    examples: int | None = None,
    data_dir: str | Path | None = None,
    shape: tuple[int, int, int] | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Export a network to files, each checked in a fresh process, as `harp export` does.

    Returns the manifest, which is also written to `manifest.json` beside the files.

    Arguments:
        network: a run's folder, the result of `harp.load_run`, or a model.
        to: one or several of "sparse", "onnx", "torch-export" and, for a run, "safetensors".
        folder: where the files go; by default `export` in the run's folder. A model needs one.
        values: how the sparse file stores kept weights: "f16", "f32" or "int8".
        dense: keep channels that change no answer, in ONNX and torch-export.
        check: measure the accuracy with the weights in every coding; this needs the run's data set.
        examples: number of test images for `check`; by default as many as the run used.
        data_dir: where data sets are.
        shape: channels, height and width of an image; for a model only, which needs it.
        classes: the names of the classes, for a model only; by default numbers.

    Example:
        harp.export("runs/mine-0123456789ab", to=["sparse", "onnx"])
        harp.export(model, "sparse", "exported", shape=(3, 32, 32))
    """
    names = [to] if isinstance(to, str) else list(to)
    directory = None if data_dir is None else Path(data_dir)
    if isinstance(network, nn.Module):
        if folder is None or shape is None:
            raise RecipeError("a model has no folder and no shape of its own: give `folder` and `shape`")
        if check or "safetensors" in names:
            raise RecipeError("a model can't be measured or rebuilt without its code: harp.save_model writes its state")
        exported, target = source.of_module(network, shape, classes), Path(folder)
    else:
        if shape is not None or classes is not None:
            raise RecipeError("`shape` and `classes` are for models: a run has its own")
        if isinstance(network, LoadedRun):
            data = source.data_of(network.finished, directory, Quiet(), needed=check)
            exported, home = source.of_run(network, data), network.folder
        else:
            if hub.is_name(str(network)) and folder is None:
                raise RecipeError(f"{network} has no folder here: give `folder`")
            exported = source.of_target(str(network), None, directory, None, Quiet(), needs_data=check)
            home = Path(network)
        target = home / "export" if folder is None else Path(folder)
    return write.export(exported, target, names, values=values, dense=dense, check=check, examples=examples)
