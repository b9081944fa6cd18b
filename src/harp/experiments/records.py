"""The content of a run's files: records whose known keys are checked."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Record(BaseModel):
    """Known keys are checked, others are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)


class Part(Record):
    """An attack of an ensemble: how many images it got, and how many it fooled."""

    attack: str
    words: str = ""
    tried: int
    fooled: int
    left: int
    seconds: float | None = None


class Accuracy(Record):
    """A measured accuracy."""

    name: str
    value: float
    low: float
    high: float
    n: int = Field(gt=0)
    measure: str = "accuracy"
    attack: dict[str, Any] | None = None
    correct: list[int]
    totals: list[int]
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
        """Two accuracies with the same key are comparable: the attack's name, its epsilon and its norm."""
        return self.name, self.epsilon, str((self.attack or {}).get("norm", ""))


class CurvePoint(Record):
    """Accuracy at one epsilon."""

    epsilon: float
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


class Curve(Record):
    """Accuracy over epsilon."""

    attack: str
    norm: str
    points: list[CurvePoint]
    n: int | None = None


class Distances(Record):
    """The smallest perturbation that fools the network, for each image; None where none did."""

    attack: str
    norm: str
    median: float | None = None
    values: list[float | None]
    n: int | None = None


class Finding(Record):
    """A check and its result."""

    check: str
    verdict: Literal["good", "look", "bad"]
    text: str


class Checks(Record):
    """Checks for false robustness."""

    findings: list[Finding]
    n: int | None = None


class CorruptionRow(Record):
    """Accuracy under one corruption."""

    corruption: str
    severity: int
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


class Corruptions(Record):
    """Accuracy under common corruptions."""

    rows: list[CorruptionRow]
    mean: float | None = None
    n: int | None = None


class Flip(Record):
    """An image that the dense and the pruned network classify differently."""

    index: int
    label: int
    dense: int
    pruned: int


class Flips(Record):
    """The changes of predictions by pruning."""

    n: int
    both_right: int
    lost: int
    won: int
    both_wrong: int
    changed: int
    examples: list[Flip] = []
    classes: list[str] = []


class Example(Record):
    """An image before and after an attack."""

    index: int
    label: int
    before: int
    after: int
    image: str
    attacked: str


class Examples(Record):
    """Attacked images."""

    attack: str
    epsilon: float | None = None
    shape: tuple[int, int, int]
    items: list[Example]
    classes: list[str] = []
    n: int | None = None


class File(Record):
    """An exported file of a network."""

    file: str
    format: str = ""
    sha256: str
    bytes: int = Field(ge=0)
    runtime: dict[str, Any] = {}


class Agreement(Record):
    """The agreement of an exported file with a network in torch: of predictions on clean images, and of logits."""

    other: str = Field(alias="with")
    twin: bool = True
    n: int = Field(gt=0)
    agree: int
    difference: float
    relative: float


class Twin(Record):
    """The network that gradients were taken from."""

    words: str


class Trial(Record):
    """An accuracy in torch and of the exported file; `how` is the measurement of the second one."""

    name: str
    how: str
    torch: Accuracy | None = None
    deployed: Accuracy


class Deployed(Record):
    """The evaluation of an exported file."""

    artefact: File
    twin: Twin | None = None
    n: int = Field(gt=0)
    agreement: list[Agreement] = []
    tests: list[Trial] = Field(min_length=1)
    checks: list[Finding] = []


class CostLayer(Record):
    """The multiplications of one image with a layer's weights, before and after pruning."""

    name: str
    macs: int = Field(ge=0)
    macs_kept: int = Field(ge=0)


class Cost(Record):
    """The cost of the network: multiplications, parameters, bytes."""

    macs: int | None = None
    macs_kept: int | None = None
    parameters: int | None = None
    parameters_kept: int | None = None
    bytes_dense: int | None = None
    bytes_sparse: int | None = None
    layers: list[CostLayer] = []


class Energy(Record):
    """The energy of a stage."""

    kwh: float
    co2_g: float | None = None
    by: str = ""


class _Kept(Record):
    size: int = Field(gt=0)
    kept: int = Field(ge=0)

    @model_validator(mode="after")
    def _is_part(self) -> Self:
        if self.kept > self.size:
            raise ValueError(f"keeps {self.kept} of {self.size}")
        return self


class Layer(_Kept):
    """A layer and what was kept of it."""

    name: str


class Budget(_Kept):
    """The budget: what was pruned, what is counted of it, and how much is kept."""

    kind: str = "weights"
    unit: str = "weights"


class Summary(Record):
    """`summary.json`."""

    recipe: str
    name: str
    source: str = ""
    stages: list[str] = []
    results: list[Accuracy] = Field(min_length=1)
    dense: list[Accuracy] = []
    layers: list[Layer] = Field(min_length=1)
    cost: Cost | None = None
    budget: Budget | None = None
    warnings: list[str] | None = None  # older runs don't say


class StageFile(Record):
    """`stage.json`."""

    stage: str
    epochs: int
    chosen_epoch: int | None = None
    seconds: float | None = None
    history: list[dict[str, Any]] = []
    energy: Energy | None = None


KINDS: dict[str, type[Record]] = {
    "accuracy": Accuracy,
    "curve": Curve,
    "distances": Distances,
    "checks": Checks,
    "corruptions": Corruptions,
    "flips": Flips,
    "examples": Examples,
    "deployed": Deployed,
}
"""The records of measurements after a run, by the `kind` in their file."""
