"""GPUs by their data sheets, and what of that is reached.

Peaks are dense ones (no structured sparsity) in 10¹² operations a second, a multiplication with its addition being two;
watts are board power. A training of convolutional networks reaches a part of the peak: batch norms, activations and
small feature maps wait for memory, the more the faster the products are. The parts here are an assumption, and may be
given instead.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harp.errors import RecipeError
from harp.experiments.recipe import read, unknown

UTILISATION = {"f32": 0.35, "tf32": 0.20, "bf16": 0.15}
"""The share of the peak that is assumed to be reached, by precision."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: its peaks by precision, None where it does not compute in it, and its watts."""

    name: str
    f32: float
    tf32: float | None
    bf16: float | None
    watts: float

    def peak(self, precision: str) -> float:
        """Operations a second, in 10¹²."""
        if precision not in UTILISATION:
            raise RecipeError(unknown("precision", precision, UTILISATION))
        found: float | None = getattr(self, precision)
        if found is None:
            raise RecipeError(f"{self.name} does not compute in {precision}: choose another --precision")
        return found

    def usual(self) -> str:
        """The precision that a recipe's `auto` means on it."""
        return "bf16" if self.bf16 is not None else "f32"


GPUS = {
    "t4": Gpu("T4", 8.1, None, None, 70),
    "v100": Gpu("V100 SXM2", 15.7, None, None, 300),
    "rtx2080ti": Gpu("RTX 2080 Ti", 13.4, None, None, 250),
    "rtx3090": Gpu("RTX 3090", 35.6, 35.6, 71.0, 350),
    "rtx4090": Gpu("RTX 4090", 82.6, 82.6, 165.2, 450),
    "a10": Gpu("A10", 31.2, 62.5, 125.0, 150),
    "a40": Gpu("A40", 37.4, 74.8, 149.7, 300),
    "l40s": Gpu("L40S", 91.6, 183.0, 362.0, 350),
    "a100": Gpu("A100 SXM 80 GB", 19.5, 156.0, 312.0, 400),
    "a100-pcie": Gpu("A100 PCIe 80 GB", 19.5, 156.0, 312.0, 300),
    "h100": Gpu("H100 SXM", 66.9, 494.7, 989.4, 700),
    "h100-pcie": Gpu("H100 PCIe", 51.2, 378.0, 756.0, 350),
    "h200": Gpu("H200 SXM", 66.9, 494.7, 989.4, 700),
}
"""GPUs by name."""


@dataclass(frozen=True)
class Hardware:
    """So many GPUs at a precision, and the share of their peak that is reached."""

    gpu: Gpu
    count: int
    precision: str
    utilisation: float

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 < self.utilisation <= 1:
            raise RecipeError(
                f"{self.count} GPUs at a utilisation of {self.utilisation:g}: give at least 1, and 0 to 1"
            )

    @property
    def sustained(self) -> float:
        """Operations a second that one GPU is assumed to do."""
        return self.gpu.peak(self.precision) * 1e12 * self.utilisation

    @property
    def words(self) -> str:
        """The hardware for people."""
        peak, reached = self.gpu.peak(self.precision), self.sustained / 1e12
        return (
            f"{self.count} x {self.gpu.name}, {self.precision}: "
            f"{reached:.3g} of {peak:g} TFLOP/s each ({self.utilisation:.0%})"
        )


def hardware(text: str, precision: str | None = None, utilisation: float | None = None) -> Hardware:
    """Read `a100x8`, `rtx3090`, or a YAML file with name, f32, watts and perhaps tf32, bf16 and count."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        gpu, count = _described(read(path, text), text)
    else:
        match = re.fullmatch(r"(.+?)(?:x(\d+))?", text.lower().strip())
        name = match[1] if match else text
        if match is None or name not in GPUS:
            raise RecipeError(unknown("GPU", name, GPUS))
        gpu, count = GPUS[name], int(match[2] or 1)
    chosen = precision or gpu.usual()
    gpu.peak(chosen)
    return Hardware(gpu, count, chosen, UTILISATION[chosen] if utilisation is None else utilisation)


def _described(content: Any, where: str) -> tuple[Gpu, int]:
    known = ("name", "f32", "tf32", "bf16", "watts", "count")
    if not isinstance(content, Mapping) or not {"f32", "watts"} <= content.keys() or content.keys() - set(known):
        raise RecipeError(f"{where} describes no GPU: give f32 (TFLOP/s), watts, and perhaps tf32, bf16, name, count")
    numbers = {key: content[key] for key in ("f32", "tf32", "bf16", "watts") if content.get(key) is not None}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise RecipeError(f"{where}: {key} is {value!r}: give a number above 0")
    count = content.get("count", 1)
    if type(count) is not int:
        raise RecipeError(f"{where}: count is {count!r}: give a whole number")
    peaks = {key: numbers.get(key) for key in ("tf32", "bf16")}
    return Gpu(str(content.get("name", Path(where).stem)), numbers["f32"], **peaks, watts=numbers["watts"]), count
