"""The folder of a run: its name, and the one reader of what a finished run left in it.

RUN/recipe.yaml summary.json model.safetensors masks.safetensors
RUN/places.json                            where its data and its model's file are on this machine
RUN/evaluation/*.json                      results of `harp evaluate`
RUN/export/*.evaluation/deployed-*.json    results of `harp evaluate` on exported files
RUN/../stages/<name>/stage.json            unless the run was moved away from its stages

A missing or damaged file gives the same error in every command.
"""

import copy
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from harp import models
from harp.data import registry
from harp.data.registry import DATASETS, DataSet, facts
from harp.data.streaming.images import Streamed
from harp.errors import CheckpointError, DataError, ModelError, RecipeError, RunFolderError
from harp.experiments import artefact, recipe
from harp.experiments.places import Places
from harp.experiments.recipe import Recipe, Stage
from harp.experiments.records import KINDS, Record, StageFile, Summary
from harp.pruning import masks
from harp.pruning.channels import Cut
from harp.pruning.masks import Masks
from harp.system import files, hub
from harp.system.notebook import html_table
from harp.system.progress import Quiet
from harp.system.tensors import load_tensors

logger = logging.getLogger("harp")

_FINISH = "`harp run` its recipe again to finish it"
_REWRITE = "`harp run` its recipe again writes it anew"
_RETRAIN = "delete the stage's folder and `harp run` the recipe again"
_MEASURE = "delete it to measure again"


def contents(made: Recipe, source: DataSet) -> list[str]:
    """Hashes of what a recipe's results depend on beside its text: the data and the files that it reads."""
    read_files = [made.model.weights, models.source_file(made.model.name)]
    return [source.fingerprint(), *(_hash(Path(file)) for file in read_files if file is not None)]


def computed_in(hashes: Sequence[str], precision: str) -> list[str]:
    """The same with the precision of the computation, which a recipe may leave to the machine."""
    return list(hashes) if precision == "32-true" else [*hashes, precision]


def name(made: Recipe, hashes: Sequence[str]) -> str:
    """The name of a run's folder."""
    return f"{made.name}-{made.identity(len(made.stages), *hashes)}"


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def facts_of(source: DataSet) -> dict[str, Any]:
    """What a run notes of its data: image shape, names of the classes, and what tells whether it is the same later."""
    streamed = isinstance(source.test.images, Streamed)
    return {
        "shape": list(source.shape),
        "classes": list(source.classes),
        "drawn": source.drawn,
        "fingerprint": source.fingerprint(),
        "streamed": streamed,  # the fingerprint of streamed images is another one
    }


def load_data(
    folder: Path,
    data_dir: Path | None = None,
    name: str | None = None,
    *,
    made: Recipe | None = None,
    display: Quiet | None = None,
) -> DataSet:
    """The data of a run, finished or not, from where it was; or other data, of a name.

    `made` is the run's recipe if it was read before.
    """
    made = recipe_of(folder) if made is None else made
    path = folder / "summary.json"
    known = files.read_json(path).get("data") if path.is_file() else None
    known = known if isinstance(known, dict) else {}
    other = name is not None and name != made.data.name
    size = known["shape"][1] if other and known and registry.find(str(name), data_dir).resizes else None
    source = Places.read(folder).load(made, data_dir, name, size, display)
    if not other and known:
        _check_same(folder, source, known)
    return source


def _check_same(folder: Path, source: DataSet, known: Mapping[str, Any]) -> None:
    """Tell data that has changed since a run: test images that were drawn from all of it are others now."""
    now = facts_of(source)
    if now["streamed"] != known.get("streamed") or now["fingerprint"] == known.get("fingerprint"):
        return
    if source.drawn:
        raise DataError(
            f"{folder}: its data has changed, and with it the test images, which were drawn from all images: put it "
            "back, or name a test set of its own by --data"
        )
    logger.warning("%s: the data is not what it was when this run was made", folder)


@dataclass(frozen=True)
class StageFolder:
    """The folder of a stage and the content of its `stage.json`; None if the run was moved away from its stages."""

    folder: Path
    facts: Mapping[str, Any] | None


@dataclass(frozen=True)
class Network:
    """The network of a run, rebuilt."""

    architecture: nn.Module  # before any cut, not trained
    model: nn.Module  # the trained network, in eval mode
    shape: tuple[int, int, int]  # of an image
    cut: Cut | None  # the channels that the run cut out of the architecture
    masks: Masks  # the kept weights; empty if channels were cut out


@dataclass(frozen=True)
class Finished:
    """A finished run: the content of its files, checked."""

    folder: Path
    content: Mapping[str, Any]  # of recipe.yaml
    summary: Mapping[str, Any]
    stages: tuple[StageFolder, ...]
    evaluation: Mapping[Path, Mapping[str, Any]]  # results of `harp evaluate`
    deployed: Mapping[Path, Mapping[str, Any]]  # and on exported files

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe; an error if another version wrote it and this one does not know all its keys."""
        return _parsed(self.folder, self.content)

    def result(self, name: str) -> Mapping[str, Any]:
        """A result of the run's own evaluation."""
        for result in self.summary["results"]:
            if result["name"] == name:
                return dict(result)
        raise RunFolderError(self.folder / "summary.json", f"has no result of {name!r}", _REWRITE)

    @cached_property
    def own(self) -> list[Mapping[str, Any]]:
        """Later results of this network on its own data, without those of other weights or other data."""
        data, network = self.summary["results"][0].get("data"), self.summary.get("network")
        return [  # a result that names no data or network is taken for one of this run
            result
            for result in self.evaluation.values()
            if result.get("data") in (data, None) and (network is None or result.get("network") in (network, None))
        ]

    @property
    def results(self) -> list[Mapping[str, Any]]:
        """All accuracies of the finished network: the run's own, then the later ones."""
        return [*self.summary["results"], *self.of_kind("accuracy")]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """Later results of one kind."""
        return [result for result in self.own if result.get("kind") == kind]

    @property
    def warnings(self) -> list[str]:
        """The warnings of the run, a sentence each; older runs have none."""
        return list(self.summary.get("warnings", ()))

    @property
    def pruning(self) -> Stage | None:
        """The last stage that prunes; None for a dense run."""
        return next((stage for stage in reversed(self.recipe.stages) if stage.prunes), None)

    @property
    def size(self) -> int:
        """The budget's count (weights, FLOPs, ...) of the whole network."""
        return int(budget_of(self.summary)["size"])

    @property
    def kept(self) -> int:
        """The part of it that is kept."""
        return int(budget_of(self.summary)["kept"])

    @property
    def unit(self) -> str:
        """What the budget counts, in words."""
        return str(budget_of(self.summary)["unit"])

    @property
    def data(self) -> str:
        """The name of the data set; of a file its name without the folder."""
        return Path(self.recipe.data.name).name

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.summary["results"][0]["totals"])

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; numbers where no names are known."""
        recorded = [result["classes"] for result in (self.noted, *self.own) if result.get("classes")]
        names = getattr(DATASETS.get(self.recipe.data.name), "classes", ()) or (recorded[0] if recorded else ())
        return tuple(map(str, names if len(names) == self.classes else range(self.classes)))

    @property
    def noted(self) -> Mapping[str, Any]:
        """What the run noted of its data; nothing in older runs."""
        noted = self.summary.get("data")
        return noted if isinstance(noted, dict) else {}

    @cached_property
    def places(self) -> Places:
        """Where its files were."""
        return Places.read(self.folder)

    def load_data(self, data_dir: Path | None = None, name: str | None = None) -> DataSet:
        """Its data, from where it was, or other data of a name."""
        return load_data(self.folder, data_dir, name, made=self.recipe)

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """The shape of an image (channels, height, width), if the data set or a recorded example says it."""
        if self.noted.get("shape"):
            channels, height, width = self.noted["shape"]
            return int(channels), int(height), int(width)
        known, size = facts(self.recipe.data.name), self.recipe.data.size
        if known is not None:
            return known.shape if size is None else (known.shape[0], size, size)
        shapes = [result["shape"] for result in self.of_kind("examples") if len(result.get("shape", ())) == 3]
        return (int(shapes[0][0]), int(shapes[0][1]), int(shapes[0][2])) if shapes else None

    def network(self, shape: tuple[int, int, int] | None = None, classes: int | None = None) -> Network:
        """The network, rebuilt for its own images or for another shape and number of classes."""
        shape = shape or self.shape
        if shape is None:
            raise RecipeError(f"{self.folder} does not say the shape of its images: add --shape, like 3x32x32")
        architecture = self.places.model_of(self.recipe).build(classes or self.classes, shape).eval()
        model, cut = copy.deepcopy(architecture), artefact.cut_of(self.folder)
        artefact.load(self.folder, model)
        path = self.folder / "masks.safetensors"
        return Network(architecture, model, shape, cut, masks.load(path) if cut is None and path.is_file() else {})

    def state(self) -> dict[str, Tensor]:
        """The tensors of the network in the shapes before any cut, zero outside the masks."""
        tensors = artefact.widened(self.folder, load_tensors(self.folder / "model.safetensors")[0])
        for name, mask in masks.load(self.folder / "masks.safetensors").items() if self.pruning else ():
            if name not in tensors or tensors[name].shape != mask.shape:
                raise CheckpointError(f"{self.folder}: the masks have {name!r}, the model has no such weight")
            tensors[name] = tensors[name].masked_fill(~mask, 0.0)
        if (broken := _not_finite(tensors)) is not None:
            raise CheckpointError(f"{self.folder}: {broken!r} holds NaN or infinity, the training has diverged")
        return tensors


@dataclass(frozen=True)
class LoadedRun:
    """The network of a finished run with what the run says of it: `harp.load_run` makes one.

    Arguments:
        model: the network in eval mode. Weights outside its masks are zero; channels that the run cut out are gone.
        masks: the kept weights of each pruned parameter; empty for a dense network and for one with channels cut out.
        cut: what was cut out; None if nothing was.
        shape: channels, height and width of an image.
        dense_bytes: the size of all tensors before pruning.
        finished: everything else that was read from the folder, such as later measurements.

    Example:
        run = harp.load_run("runs/mine-0123456789ab")
        logits = run.model(images)
        print(run.recipe.name, run.summary["results"])
    """

    model: nn.Module
    masks: Masks
    cut: Cut | None
    shape: tuple[int, int, int]
    dense_bytes: int
    finished: Finished

    def __repr__(self) -> str:
        budget = budget_of(self.summary)
        tests = ", ".join(f"{result['name']} {result['value']:.1%}" for result in self.summary["results"])
        return f"LoadedRun({self.folder}: {budget['kept']:,} of {budget['size']:,} {budget['unit']}, {tests})"

    def _repr_html_(self) -> str:
        warnings = " ".join(self.finished.warnings)
        return results_table(self.folder.name, self.summary.get("dense", ()), self.finished.results, warnings)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.finished.folder

    @property
    def recipe(self) -> Recipe:
        """The recipe that was run."""
        return self.finished.recipe

    @property
    def summary(self) -> Mapping[str, Any]:
        """What `summary.json` holds: results, layers, budget, cost, warnings."""
        return self.finished.summary

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.finished.class_names


def load_run(folder: str | Path, *, data_dir: str | Path | None = None) -> LoadedRun:
    """Load the network of a finished run: in eval mode, masks applied and pruned channels cut out.

    Arguments:
        folder: what `harp run` wrote, or `hf:OWNER/NAME`, what `harp push` wrote to a hub.
        data_dir: where data sets are. It is read only if nothing else says the shape of the images.

    Example:
        run = harp.load_run("runs/mine-0123456789ab")
        logits = run.model(images)
    """
    run = read(place(folder))
    shape = run.shape
    if shape is None:
        shape = run.load_data(None if data_dir is None else Path(data_dir)).shape
    return network_of(run, shape)


def place(target: str | Path) -> Path:
    """The folder of a run; that of a network on a hub is fetched."""
    return models.fetched(str(target)) if hub.is_name(str(target)) else Path(target)


def network_of(run: Finished, shape: tuple[int, int, int]) -> LoadedRun:
    """The network of a run for images of a shape."""
    network = run.network(shape)
    masks.apply(network.model, network.masks)
    if (name := _not_finite(network.model.state_dict())) is not None:
        raise ModelError(f"{run.folder}: {name!r} holds NaN or infinity, the training has diverged")
    return LoadedRun(
        network.model.eval(), network.masks, network.cut, network.shape, size_of(network.architecture), run
    )


def _not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that holds NaN or infinity."""
    return next((name for name, x in tensors.items() if x.is_floating_point() and not x.isfinite().all()), None)


def size_of(model: nn.Module) -> int:
    """The bytes of all tensors of a model, each counted once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def read(folder: str | Path, *, weights: bool = True) -> Finished:
    """Read the folder of a finished run; the network has to be there too, unless `weights` are not needed."""
    path = Path(folder)
    content = content_of(path)
    network = ["model.safetensors", *(["masks.safetensors"] if any(map(_is_pruned, content["stages"])) else [])]
    for file in ("summary.json", *(network if weights else [])):
        if not (path / file).is_file():
            raise RunFolderError(path, f"is not finished: there is no {file} in it", _FINISH)
    summary = _checked(Summary, path / "summary.json", _REWRITE)
    folders = [path.parent / "stages" / re.split(r"[/\\]", stage)[-1] for stage in summary.get("stages", ())]
    stages = tuple(StageFolder(at, stage_facts(at) if (at / "stage.json").is_file() else None) for at in folders)
    later, deployed = path.glob("evaluation/*.json"), path.glob("export/*.evaluation/deployed-*.json")
    measured = ({file: _checked(None, file, _MEASURE) for file in sorted(paths)} for paths in (later, deployed))
    return Finished(path, content, summary, stages, *measured)


def recipe_of(folder: str | Path) -> Recipe:
    """The recipe of a run that need not be finished."""
    return _parsed(Path(folder), content_of(Path(folder)))


def stage_facts(folder: Path) -> dict[str, Any]:
    """The content of a finished stage's `stage.json`."""
    return _checked(StageFile, folder / "stage.json", _RETRAIN)


def content_of(folder: Path) -> dict[str, Any]:
    """The content of a run's recipe."""
    path, remedy = folder / "recipe.yaml", "give a folder that `harp run` made"
    if not folder.is_dir():
        raise RunFolderError(folder, "is no run: there is no such folder", remedy)
    if not path.is_file():
        raise RunFolderError(folder, "is no run: there is no recipe.yaml in it", remedy)
    try:
        content = recipe.read(path, "it")
    except RecipeError as error:
        raise RunFolderError(path, f"is damaged: {error}", _REWRITE) from error
    if not isinstance(content, dict) or not isinstance(content.get("stages"), list):
        raise RunFolderError(path, "is no recipe of a run: it has no list of stages", _REWRITE)
    return content


def _parsed(folder: Path, content: Mapping[str, Any]) -> Recipe:
    try:
        return recipe.parse({"name": "recipe", **content})
    except RecipeError as error:
        raise RunFolderError(folder / "recipe.yaml", f"can't be used: {error}", _REWRITE) from error


def _is_pruned(stage: object) -> bool:
    pruner = stage.get("pruner") if isinstance(stage, dict) else None
    return (pruner.get("name") if isinstance(pruner, dict) else pruner) != "dense"


def _checked(kind: type[Record] | None, path: Path, remedy: str) -> dict[str, Any]:
    """The content of a JSON file, checked against a record; without a kind, against that of its key `kind`."""
    try:
        content = files.read_json(path)
        (kind or KINDS.get(str(content.get("kind")), Record)).model_validate(content)
    except CheckpointError as error:
        raise RunFolderError(path, str(error).removeprefix(f"{path} "), remedy) from error
    except ValidationError as error:
        first = error.errors()[0]
        where, what = ".".join(str(step) for step in first["loc"]), first["msg"].removeprefix("Value error, ")
        raise RunFolderError(path, f"is damaged: {where}: {what}, not {first['input']!r:.60}", remedy) from error
    return content


def budget_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The budget of a run: what it counts, of which units, and how much is kept. Older runs count weights."""
    weights = {key: sum(layer[key] for layer in summary["layers"]) for key in ("size", "kept")}
    return {"kind": "weights", "unit": "weights", **weights, **(summary.get("budget") or {})}


def results_table(
    title: str, dense: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], note: str = ""
) -> str:
    """The accuracies of a run, before and after pruning, as a table for a notebook."""
    before = {result["name"]: f"{result['value']:.1%}" for result in dense}
    rows = [
        [
            r["name"],
            before.get(r["name"], "–"),
            f"{r['value']:.1%}",
            f"{r['low']:.1%} – {r['high']:.1%}",
            f"{sum(r['totals']):,}",
        ]
        for r in results
    ]
    return html_table(title, ("test", "before", "after", "95 % interval", "images"), rows, note)


def plain_correct(result: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of correctly classified images and of all images, without weights for classes."""
    return sum(result["correct"]), sum(result["totals"])


def named(run: Finished, name: str, epsilon: float | None = None) -> Mapping[str, Any] | None:
    """The result of an attack at an epsilon in L-inf, or without an attack; of several the one on the most images."""
    results = [result for result in run.results if _fits(result, name, epsilon)]
    return max(results, key=lambda result: plain_correct(result)[1]) if results else None


def _fits(result: Mapping[str, Any], name: str, epsilon: float | None) -> bool:
    attack = result.get("attack") or {}
    if epsilon is None:
        return not attack and result["name"] == name
    same = re.split("[,@]", str(result["name"]))[0] == name or str(attack.get("type", "")).lower() == name
    return same and attack.get("norm", "linf") == "linf" and abs(attack.get("epsilon", -1) - epsilon) < 1e-6
