"""Common corruptions: noise, blur, weather and compression instead of an adversary.

The kinds and the five severities follow Hendrycks & Dietterich ("Benchmarking Neural Network Robustness to Common
Corruptions and Perturbations", ICLR 2019). These are own implementations of the kinds, in plain torch, for images of
any size with any number of channels: results with them are not comparable with those on the files of CIFAR-10-C or
ImageNet-C. Lengths are in pixels for images of up to 32 pixels and scale with larger ones.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import images_in_box
from harp.errors import RecipeError
from harp.evaluation.runner import BATCH
from harp.evaluation.score import accuracy

SEVERITIES = (1, 2, 3, 4, 5)

Corrupt = Callable[[Tensor, int, torch.Generator], Tensor]


def _gaussian_noise(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    return x + (0.04, 0.06, 0.08, 0.10, 0.12)[level] * _normal(x.shape, x, generator)


def _shot_noise(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Poisson noise of a limited number of photons."""
    photons = (500, 250, 120, 75, 50)[level]
    return (torch.poisson(x.float().cpu() * photons, generator=generator) / photons).to(x)


def _impulse_noise(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Salt and pepper."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[level]
    drawn = _uniform(x.shape, x, generator)
    return x.masked_fill(drawn < share / 2, 0.0).masked_fill(drawn > 1 - share / 2, 1.0)


def _defocus_blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Convolution with a disc that has a soft edge."""
    radius = (0.8, 1.1, 1.4, 1.8, 2.3)[level] * _scale(x)
    half = math.ceil(radius)
    offsets = torch.arange(-half, half + 1, device=x.device, dtype=x.dtype)
    disc = (radius + 0.5 - torch.hypot(offsets[:, None], offsets)).clamp(0, 1)
    return _filtered(x, disc / disc.sum())


def _motion_blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """The mean along a line, in a random direction for each image."""
    length = (1.5, 2.5, 3.5, 4.5, 6.0)[level] * _scale(x)
    angle = math.pi * _uniform((len(x), 1, 1), x, generator)
    direction = torch.stack([torch.cos(angle), torch.sin(angle)], dim=-1)
    offsets = torch.linspace(-length / 2, length / 2, 2 * math.ceil(length) + 1).tolist()
    return _mean([_shifted(x, offset * direction) for offset in offsets])


def _zoom_blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """The mean over magnifications about the centre."""
    most = (0.10, 0.16, 0.22, 0.28, 0.36)[level]
    grid = _grid(x)
    return _mean([_shifted(x, grid * (1 / (1 + most * share / 8) - 1)) for share in range(9)])


def _fog(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """A mix with bright clouds: random fields at every scale, the coarser the stronger."""
    height, width = x.shape[-2:]
    clouds = torch.zeros(len(x), 1, height, width, device=x.device, dtype=x.dtype)
    for octave in range(max(1, math.ceil(math.log2(max(height, width))))):
        field = _uniform((len(x), 1, 2**octave + 1, 2**octave + 1), x, generator)
        clouds += F.interpolate(field, (height, width), mode="bilinear", align_corners=True) / 2**octave
    low, high = clouds.amin((1, 2, 3), keepdim=True), clouds.amax((1, 2, 3), keepdim=True)
    clouds = (clouds - low) / (high - low).clamp_min(1e-6)
    veil = (0.15, 0.30, 0.42, 0.54, 0.65)[level]
    return (1 - veil) * x + veil * (0.4 + 0.6 * clouds)


def _brightness(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    return x + (0.05, 0.10, 0.15, 0.20, 0.30)[level]


def _contrast(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    middle = x.mean((2, 3), keepdim=True)
    return middle + (0.75, 0.55, 0.40, 0.30, 0.20)[level] * (x - middle)


def _elastic(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """A shift of every pixel by a smooth random field of a given mean length."""
    length = (0.4, 0.7, 1.0, 1.3, 1.7)[level] * _scale(x)
    radius = max(1, round(2 * _scale(x)))
    field = _normal((len(x), 2, *x.shape[-2:]), x, generator)
    box = torch.full((2 * radius + 1,) * 2, 1 / (2 * radius + 1) ** 2, device=x.device, dtype=x.dtype)
    field = _filtered(_filtered(field, box), box)
    field = field / torch.linalg.vector_norm(field, dim=1, keepdim=True).mean((1, 2, 3), keepdim=True)
    return _shifted(x, length * field.permute(0, 2, 3, 1))


def _pixelate(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Larger pixels: means over cells; a pixel that overlaps several cells gets their weighted mean."""
    share = (0.9, 0.75, 0.6, 0.5, 0.4)[level]
    rows, columns = (_cells(size, max(1, round(share * size))).to(x) for size in x.shape[-2:])
    return rows @ x @ columns.T


def _cells(size: int, cells: int) -> Tensor:
    """The matrix that replaces a row of pixels by their means over cells of equal length."""
    pixels, width = torch.arange(size), size / cells
    starts = width * torch.arange(cells)[:, None]
    overlap = (torch.minimum(pixels + 1, starts + width) - torch.maximum(pixels, starts)).clamp_min(0)
    return overlap.T @ overlap / width


# The table for luminance in annex K of the JPEG standard (ITU-T T.81).
_QUANTA = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)


def _jpeg(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """The lossy step of JPEG, on each channel by itself: the cosine transform of 8 x 8 blocks, quantised."""
    coarseness = (0.5, 1.0, 1.6, 2.4, 3.5)[level]
    height, width = x.shape[-2:]
    padded = F.pad(x, (0, -width % 8, 0, -height % 8), mode="replicate")
    n, channels, rows, columns = padded.shape
    blocks = padded.reshape(n, channels, rows // 8, 8, columns // 8, 8).transpose(3, 4)
    k = torch.arange(8, device=x.device, dtype=x.dtype)
    cosines = torch.cos(math.pi / 8 * (k + 0.5) * k[:, None]) / 2
    cosines[0] /= math.sqrt(2)
    quanta = coarseness * torch.tensor(_QUANTA, device=x.device, dtype=x.dtype) / 255
    rounded = torch.round(cosines @ blocks @ cosines.T / quanta) * quanta
    return (cosines.T @ rounded @ cosines).transpose(3, 4).reshape(padded.shape)[..., :height, :width]


CORRUPTIONS: dict[str, Corrupt] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "defocus_blur": _defocus_blur,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "fog": _fog,
    "brightness": _brightness,
    "contrast": _contrast,
    "elastic": _elastic,
    "pixelate": _pixelate,
    "jpeg": _jpeg,
}


def corrupt(x: Tensor, kind: str, severity: int, generator: torch.Generator) -> Tensor:
    """Corrupt images in [0, 1]. The random numbers come from a CPU generator, whatever device the images are on.

    The same state of the generator gives the same noise, directions and fields at every severity.
    """
    if kind not in CORRUPTIONS:
        raise RecipeError(f"no corruption is called {kind!r}: there are {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise RecipeError(f"severity must be 1, 2, 3, 4 or 5, not {severity!r}")
    return CORRUPTIONS[kind](x, severity - 1, generator).clamp(0, 1)


@dataclass(frozen=True)
class Corruption:
    """A kind and a severity, called like an attack; the model and the labels are not used."""

    kind: str
    severity: int

    @property
    def name(self) -> str:
        """A short name, such as fog-3."""
        return f"{self.kind}-{self.severity}"

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The corrupted images; the seed is drawn from torch's generator."""
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, (1,))))
        return corrupt(images_in_box(x, y), self.kind, self.severity, generator)


def measure(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    kinds: Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    batch: int = BATCH,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Accuracy under every kind at every severity: one row for each with its 95 % interval, and the mean of all rows.

    `progress(done, all)` counts the images of all rows.
    """
    corruptions = [Corruption(kind, severity) for kind in (kinds or CORRUPTIONS) for severity in severities]
    if not corruptions:
        raise RecipeError("there are no severities to measure at: give some of 1, 2, 3, 4, 5")
    rows, values = [], []
    for index, corruption in enumerate(corruptions):
        before = index * len(images)

        def count(done: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, len(corruptions) * len(images))

        score = accuracy(model, images, labels, attack=corruption, batch=batch, seed=seed, progress=count)
        low, high = score.interval()
        values.append(score.accuracy)
        key = {"corruption": corruption.kind, "severity": corruption.severity}
        rows.append({**key, "value": score.accuracy, "low": low, "high": high, "n": score.n})
    return {"rows": rows, "mean": fmean(values), "seed": seed, "batch": batch}


def _scale(x: Tensor) -> float:
    return max(1.0, min(x.shape[-2:]) / 32)


def _uniform(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(tuple(shape), generator=generator).to(like)


def _normal(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator).to(like)


def _filtered(x: Tensor, kernel: Tensor) -> Tensor:
    """Filter each channel with the same kernel; the border pixels are repeated."""
    half, channels = len(kernel) // 2, x.shape[1]
    padded = F.pad(x, (half,) * 4, mode="replicate")
    return F.conv2d(padded, kernel.expand(channels, 1, -1, -1), groups=channels)


def _grid(x: Tensor) -> Tensor:
    """The positions of the pixels relative to the centre, in pixels: (1, height, width, 2) with x first."""
    down, right = (torch.arange(size, device=x.device, dtype=x.dtype) - (size - 1) / 2 for size in x.shape[-2:])
    rows, columns = torch.meshgrid(down, right, indexing="ij")
    return torch.stack([columns, rows], dim=-1)[None]


def _shifted(x: Tensor, by: Tensor) -> Tensor:
    """Sample each pixel `by` pixels away, bilinearly; the border pixels are repeated."""
    height, width = x.shape[-2:]
    sizes = torch.tensor([width, height], device=x.device, dtype=x.dtype)
    positions = (_grid(x) + by).expand(len(x), height, width, 2) * 2 / sizes
    return F.grid_sample(x, positions, mode="bilinear", padding_mode="border", align_corners=False)


def _mean(images: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(images)).mean(0)
