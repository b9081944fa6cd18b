"""Reading runs for a report: what `harp run` left in a folder, what was measured later, and nothing else.

Whatever is not as it should be is one line of error. Paths of the machine that a run was made on are taken out here,
so nothing that is made of a `Run` can show them.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from harp import checkpoint, files, masks
from harp.errors import CheckpointError, RecipeError

_PICTURES = ("image", "attacked")  # keys of base64 text, which may look like a path
_PATH = re.compile(r"(?<![\w.:/\\])(?:file://|~|[A-Za-z]:)?[/\\][\w.@+\-]+(?:[/\\][\w.@+\-]+)+")
_WHOLE = re.compile(r"^(?:file://)?(?:~|[A-Za-z]:)?[/\\][^;]*[/\\][^;]*$")
_BINS, _FEW_BINS, _MANY = 32, 16, 200  # bins of a histogram: fewer where there are not many weights


class _Record(BaseModel):
    """Known keys are checked, others are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)


class Part(_Record):
    """An attack of an ensemble: how many images it got, and how many it fooled."""

    attack: str
    words: str = ""
    tried: int
    fooled: int
    left: int
    seconds: float | None = None


class Accuracy(_Record):
    """A measured accuracy."""

    name: str
    value: float
    low: float
    high: float
    n: int = Field(gt=0)
    measure: str = "accuracy"
    attack: dict[str, Any] | None = None
    correct: list[int] = []
    totals: list[int] = []
    seed: int | None = None
    versions: dict[str, Any] = {}
    data: str = ""
    classes: list[str] = []
    parts: list[Part] = []
    during: float | None = None

    @property
    def epsilon(self) -> float | None:
        """The size of the perturbations; None without an attack."""
        value = (self.attack or {}).get("epsilon")
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def key(self) -> tuple[str, float | None, str]:
        """What makes two numbers comparable: the attack's name, its epsilon and its norm."""
        return self.name, self.epsilon, str((self.attack or {}).get("norm", ""))


class CurvePoint(_Record):
    """Accuracy at one epsilon."""

    epsilon: float
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


class Curve(_Record):
    """Accuracy over epsilon."""

    attack: str
    norm: str
    points: list[CurvePoint]
    n: int | None = None


class Distances(_Record):
    """The least perturbation that breaks each image; None where none did."""

    attack: str
    norm: str
    median: float | None = None
    values: list[float | None]
    n: int | None = None


class Finding(_Record):
    """A check and how it ended."""

    check: str
    verdict: Literal["good", "look", "bad"]
    text: str


class Checks(_Record):
    """Checks for false robustness."""

    findings: list[Finding]
    n: int | None = None


class CorruptionRow(_Record):
    """Accuracy under one corruption."""

    corruption: str
    severity: int
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


class Corruptions(_Record):
    """Accuracy under common corruptions."""

    rows: list[CorruptionRow]
    mean: float | None = None
    n: int | None = None


class Flip(_Record):
    """An image that the dense and the pruned network see differently."""

    index: int
    label: int
    dense: int
    pruned: int


class Flips(_Record):
    """What pruning changed, image by image."""

    n: int
    both_right: int
    lost: int
    won: int
    both_wrong: int
    changed: int
    examples: list[Flip] = []
    classes: list[str] = []


class Example(_Record):
    """An image before and after an attack."""

    index: int
    label: int
    before: int
    after: int
    image: str
    attacked: str


class Examples(_Record):
    """Attacked images."""

    attack: str
    epsilon: float | None = None
    shape: tuple[int, int, int]
    items: list[Example]
    classes: list[str] = []
    n: int | None = None


class File(_Record):
    """A file that a network was deployed as."""

    file: str
    format: str = ""
    sha256: str
    bytes: int = Field(ge=0)
    runtime: dict[str, Any] = {}


class Agreement(_Record):
    """How many clean predictions of a file are those of a network in torch, and how far its logits are off."""

    other: str = Field(alias="with")
    twin: bool = True
    n: int = Field(gt=0)
    agree: int
    difference: float
    relative: float


class Twin(_Record):
    """The network that gradients were taken from."""

    words: str


class Trial(_Record):
    """An accuracy in torch and as deployed; `how` the second one was measured."""

    name: str
    how: str
    torch: Accuracy | None = None
    deployed: Accuracy


class Deployed(_Record):
    """What a deployed file was found to do."""

    artefact: File
    twin: Twin | None = None
    n: int = Field(gt=0)
    agreement: list[Agreement] = []
    tests: list[Trial] = Field(min_length=1)
    checks: list[Finding] = []


class CostLayer(_Record):
    """The multiplications of one image with a layer's weights, before and after pruning."""

    name: str
    macs: int = Field(ge=0)
    macs_kept: int = Field(ge=0)


class Cost(_Record):
    """What the network costs to run and to keep."""

    macs: int | None = None
    macs_kept: int | None = None
    parameters: int | None = None
    parameters_kept: int | None = None
    bytes_dense: int | None = None
    bytes_sparse: int | None = None
    layers: list[CostLayer] = []


class Energy(_Record):
    """What a stage used up."""

    kwh: float
    co2_g: float | None = None
    by: str = ""


class Layer(_Record):
    """A layer and what was kept of it."""

    name: str
    size: int = Field(gt=0)
    kept: int = Field(ge=0)


class Budget(_Record):
    """What was pruned, what the budget counts of it, and how much is kept."""

    kind: str = "weights"
    unit: str = "weights"
    size: int = Field(gt=0)
    kept: int = Field(ge=0)


class Summary(_Record):
    """`summary.json`."""

    recipe: str
    name: str
    source: str = ""
    stages: list[str] = []
    results: list[Accuracy]
    dense: list[Accuracy] = []
    layers: list[Layer] = Field(min_length=1)
    cost: Cost | None = None
    budget: Budget | None = None


class StageFile(_Record):
    """`stage.json`."""

    stage: str
    epochs: int
    chosen_epoch: int | None = None
    seconds: float | None = None
    history: list[dict[str, Any]] = []
    energy: Energy | None = None


_KINDS: dict[str, type[_Record]] = {
    "accuracy": Accuracy,
    "curve": Curve,
    "distances": Distances,
    "checks": Checks,
    "corruptions": Corruptions,
    "flips": Flips,
    "examples": Examples,
    "deployed": Deployed,
}
_PASSED_OVER = {"radius"}  # the single points of a curve, which has them all
Kind = TypeVar("Kind", bound=_Record)


@dataclass(frozen=True)
class Stage:
    """A stage of a run: its folder's name, which tells stages that runs share, and its file, if it is there."""

    folder: str
    file: StageFile | None


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    recipe: dict[str, Any]
    summary: Summary
    stages: list[Stage]
    found: list[_Record]
    unknown: list[str]  # files of the evaluation that this version can't show

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.summary.name

    @property
    def seed(self) -> int:
        """The seed that all its random numbers came from."""
        value = self.recipe.get("seed", 0)
        return value if isinstance(value, int) else 0

    @property
    def size(self) -> int:
        """What the budget counts of the whole network."""
        return self.budget.size

    @property
    def kept(self) -> int:
        """What is left of that."""
        return self.budget.kept

    @property
    def budget(self) -> Budget:
        """The budget; a run that says nothing of it counts weights."""
        layers = self.summary.layers
        size, kept = sum(layer.size for layer in layers), sum(layer.kept for layer in layers)
        return self.summary.budget or Budget(size=size, kept=kept)

    @property
    def kind(self) -> str:
        """What was pruned: weights or channels."""
        return self.budget.kind

    @property
    def unit(self) -> str:
        """What the budget counts, in words that tell channels from weights."""
        both = self.kind == "channels" and self.budget.unit == "MACs"
        return f"{self.budget.unit} (channels)" if both else self.budget.unit

    def of(self, kind: type[Kind]) -> list[Kind]:
        """What the evaluation found of a kind; if the same was measured several times, that of most images, or last."""
        best: dict[tuple[object, ...], Kind] = {}
        for record in self.found:
            if isinstance(record, kind):
                name = tuple(str(getattr(record, key, "")) for key in ("name", "attack", "norm", "epsilon"))
                if name not in best or (getattr(record, "n", 0) or 0) >= (getattr(best[name], "n", 0) or 0):
                    best[name] = record
        return list(best.values())

    @property
    def results(self) -> list[Accuracy]:
        """All accuracies: of numbers that were measured the same way, the one of more images."""
        best: dict[Any, Accuracy] = {}
        for result in [*self.summary.results, *self.of(Accuracy)]:
            if result.key not in best or result.n >= best[result.key].n:
                best[result.key] = result
        return list(best.values())

    @property
    def deployed(self) -> list[Deployed]:
        """What was found of each file, by name: of a file that was replaced, what was found of the last one.

        Several evaluations of a file are one: of numbers that were measured the same way, the one of more images.
        """
        by_file: dict[str, list[Deployed]] = {}
        for record in self.found:
            if isinstance(record, Deployed):
                by_file.setdefault(record.artefact.file, []).append(record)
        merged = []
        for records in by_file.values():
            last = records[-1]
            tests: dict[Any, Trial] = {}
            for test in (
                test for each in records if each.artefact.sha256 == last.artefact.sha256 for test in each.tests
            ):
                key, now = test.deployed.key, test.deployed
                old = tests[key].deployed if key in tests else None
                # Of two worst cases the one of more attacks, or stronger ones, is the lower.
                lower = old is not None and (test.how != "union" or now.value <= old.value)
                if old is None or now.n > old.n or (now.n == old.n and lower):
                    tests[key] = test
            merged.append(last.model_copy(update={"tests": list(tests.values())}))
        return merged

    @property
    def data(self) -> str:
        """The name of the data set."""
        part = self.recipe.get("data")
        return str(part.get("name", "")) if isinstance(part, dict) else str(part or "")

    @property
    def classes(self) -> list[str]:
        """The names of the classes, where some file has them."""
        known = [
            *(one.classes for one in self.of(Accuracy)),
            *(one.classes for one in self.of(Flips)),
            *(one.classes for one in self.of(Examples)),
        ]
        return next((names for names in known if names), [])


def read(folders: Sequence[Path]) -> list[Run]:
    """The runs of the folders, each once."""
    if not folders:
        raise RecipeError("there is no run to report on: give folders that `harp run` made")
    once = dict.fromkeys(Path(folder).resolve() for folder in folders)
    return [_read_run(folder) for folder in once]


def _read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise RecipeError(f"{folder} is no run: there is no such folder (give one that `harp run` made)")
    if not (folder / "recipe.yaml").is_file():
        raise RecipeError(f"{folder} is no run: there is no recipe.yaml in it (give a folder that `harp run` made)")
    if not (folder / "summary.json").is_file():
        raise RecipeError(f"{folder} is not finished: there is no summary.json in it (`harp run` goes on with it)")
    summary = _checked(Summary, _json(folder / "summary.json"), folder / "summary.json")
    for layer in summary.layers:
        if layer.kept > layer.size:
            raise RecipeError(f"{folder / 'summary.json'}: layer {layer.name!r} keeps {layer.kept} of {layer.size}")
    if summary.budget is not None and summary.budget.kept > summary.budget.size:
        spent = f"{summary.budget.kept} of {summary.budget.size}"
        raise RecipeError(f"{folder / 'summary.json'}: the budget says that {spent} {summary.budget.unit} are kept")
    stages = []
    for name in (re.split(r"[/\\]", stage)[-1] for stage in summary.stages):
        path = folder.parent / "stages" / name / "stage.json"
        stages.append(Stage(name, _checked(StageFile, _json(path), path) if path.is_file() else None))
    found, unknown = [], []
    paths = [*(folder / "evaluation").glob("*.json"), *(folder / "export").glob("*.evaluation/deployed-*.json")]
    for path in sorted(paths, key=lambda file: (file.stat().st_mtime_ns, file.name)):
        content = _json(path)
        kind = content.get("kind")
        if kind in _KINDS:
            found.append(_checked(_KINDS[kind], content, path))
        elif kind not in _PASSED_OVER:
            unknown.append(path.name)
    return Run(folder, _recipe(folder / "recipe.yaml"), summary, stages, found, unknown)


def _recipe(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} can't be read: {files.reason(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("stages"), list):
        raise RecipeError(f"{path} is no recipe of a run: it has no list of stages")
    plain: dict[str, Any] = without_paths(content)
    return plain


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path} can't be read as JSON: {files.reason(error)}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    plain: dict[str, Any] = without_paths(content)
    return plain


def _checked(kind: type[Kind], content: dict[str, Any], path: Path) -> Kind:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise RecipeError(f"{path}: {where}: {first['msg'].lower()}, not {first['input']!r:.60}") from error


def without_paths(value: Any) -> Any:
    """Plain data without the folders of a machine: of an absolute path its last part is left."""
    if isinstance(value, dict):
        return {key: item if key in _PICTURES else without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    pieces = [_last(piece) if _WHOLE.match(piece) else _PATH.sub(_name, piece) for piece in value.split(";")]
    return ";".join(pieces)


def _name(match: re.Match[str]) -> str:
    return _last(match[0])


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


@dataclass(frozen=True)
class Histogram:
    """How the kept weights of a layer are distributed: counts in equal steps from low to high."""

    layer: str
    kept: int
    low: float
    high: float
    counts: list[int]
    deviation: float


def histograms(run: Run) -> list[Histogram]:
    """The distribution of the kept weights of every layer; none if the run has no file of weights."""
    path = run.folder / "model.safetensors"
    if not path.is_file():
        return []
    try:
        weights, _ = checkpoint.load_tensors(path)
        mask_path = run.folder / "masks.safetensors"
        kept = masks.load(mask_path) if mask_path.is_file() else {}
    except CheckpointError as error:
        raise RecipeError(str(error)) from error
    found = []
    for name in _layer_names(run, weights):
        weight = weights[name].detach().float()
        chosen = kept.get(name)
        values = weight[chosen] if chosen is not None and chosen.shape == weight.shape else weight[weight != 0]
        values = values[values.isfinite()]
        if not len(values):
            found.append(Histogram(name, 0, -1.0, 1.0, [0] * _FEW_BINS, 0.0))
            continue
        end = float(values.abs().max()) or 1.0
        counts = values.histc(_BINS if len(values) >= _MANY else _FEW_BINS, -end, end).int().tolist()
        spread = float(values.std()) if len(values) > 1 else 0.0
        found.append(Histogram(name, len(values), -end, end, counts, spread if math.isfinite(spread) else 0.0))
    return found


def _layer_names(run: Run, weights: Mapping[str, Tensor]) -> list[str]:
    """The layers whose weights are shown: all that channels run through, or those that single weights are pruned of."""
    costs = run.summary.cost.layers if run.summary.cost else []
    layers = costs if run.kind == "channels" and costs else run.summary.layers
    return [layer.name for layer in layers if layer.name in weights]


def pixels(text: str, shape: tuple[int, int, int], what: str) -> bytes:
    """The bytes of an image, channel after channel."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecipeError(f"{what}: the image is no base64 text") from error
    if len(content) != math.prod(shape):
        raise RecipeError(f"{what}: the image has {len(content)} bytes, but its shape {shape} needs {math.prod(shape)}")
    return content
