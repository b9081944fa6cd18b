"""Networks and batches that are not image classification: what `fit` and the channels must work for as well."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.models.modes import Logits
from harp.training.base import Objective

BATCHES = 3


class Segmenter(nn.Module):
    """An encoder and a decoder with a skip connection: a class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        return self.head(torch.cat([fine, self.up(self.down(fine))], dim=1))


class Reader(nn.Module):
    """A transformer that reads tokens and names the kind of text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.position = nn.Parameter(0.02 * torch.randn(12, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.position[: tokens.shape[1]]).mean(1))


class Pair(nn.Module):
    """An image and a row of numbers by their names; the answer is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.read = nn.Sequential(nn.Linear(5, 16), nn.ReLU())
        self.head = nn.Linear(48, 4)

    def forward(self, *, image: Tensor, facts: Tensor) -> dict[str, Tensor]:
        hidden = torch.cat([self.look(image), self.read(facts)], dim=1)
        return {"logits": self.head(hidden)}


class Regressor(nn.Module):
    """Numbers from numbers, neither of them in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Detector(nn.Module):
    """A small pyramid: features of two sizes, upsampled and concatenated, and two heads at each size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.side, self.top = nn.Conv2d(8, 12, 1), nn.Conv2d(16, 12, 1)
        self.smooth = nn.Conv2d(24, 16, 3, padding=1)
        self.classes = nn.Sequential(nn.Conv2d(16, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 4, 1))
        self.boxes = nn.Sequential(nn.Conv2d(16, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 4, 1))
        self.coarse = nn.Conv2d(12, 16, 1)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        shallow = self.stem(x)
        top = self.top(self.deep(shallow))
        large = F.interpolate(top, scale_factor=2, mode="nearest")
        levels = [self.smooth(torch.cat([self.side(shallow), large], dim=1)), self.coarse(top)]
        return {"classes": [self.classes(level) for level in levels], "boxes": [self.boxes(level) for level in levels]}


class PixelClasses(Objective):
    """The cross entropy of every pixel; an epoch is judged by the share of correct ones."""

    def __call__(self, model: nn.Module, x: Any, y: Any, forward: Logits | None = None) -> Tensor:
        return F.cross_entropy((forward or model)(x), y)

    def measure(self, model: nn.Module, x: Any, y: Any) -> Mapping[str, float]:
        return {"pixels": float((model(x).argmax(1) == y).float().mean())}


class TextKind(Objective):
    """The cross entropy of texts; the loader gives lists with the lengths beside the tokens."""

    def split(self, batch: Any) -> tuple[Any, Any]:
        tokens, (labels, _) = batch
        return tokens, labels

    def __call__(self, model: nn.Module, x: Any, y: Any, forward: Logits | None = None) -> Tensor:
        return F.cross_entropy((forward or model)(x), y)

    def measure(self, model: nn.Module, x: Any, y: Any) -> Mapping[str, float]:
        return {"accuracy": float((model(x).argmax(1) == y).float().mean())}


class Named(Objective):
    """Batches are dicts, and so are the model's inputs and its answer."""

    def split(self, batch: Any) -> tuple[Any, Any]:
        return {"image": batch["image"], "facts": batch["facts"]}, batch["kind"]

    def __call__(self, model: nn.Module, x: Any, y: Any, forward: Any = None) -> Tensor:
        return F.cross_entropy((forward or model)(**x)["logits"], y)

    def measure(self, model: nn.Module, x: Any, y: Any) -> Mapping[str, float]:
        return {"accuracy": float((model(**x)["logits"].argmax(1) == y).float().mean())}


class Squares(Objective):
    """The mean squared error; a smaller one is better, so its negative is measured."""

    def __call__(self, model: nn.Module, x: Any, y: Any, forward: Logits | None = None) -> Tensor:
        return F.mse_loss((forward or model)(x), y)

    def measure(self, model: nn.Module, x: Any, y: Any) -> Mapping[str, float]:
        return {"negative_error": -float(F.mse_loss(model(x), y))}


class Batches:
    """A few fixed batches of a task, the same in every epoch."""

    def __init__(self, task: str) -> None:
        self.task = task

    def __len__(self) -> int:
        return BATCHES

    def __call__(self, epoch: int, start: int = 0) -> Any:
        return (batch(self.task, seed) for seed in range(start, BATCHES))


def batch(task: str, seed: int = 0) -> Any:
    """A batch as the loader of a task gives it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(8, 3, 8, 8, generator=generator)
    if task == "segmentation":
        return x, (3 * x.mean(1)).long().clamp(0, 2)
    if task == "tokens":
        tokens = torch.randint(20, (8, 10), generator=generator)
        return [tokens, (tokens[:, 0] % 3, torch.full((8,), 10))]
    if task == "pair":
        facts = torch.randn(8, 5, generator=generator)
        return {"image": x, "facts": facts, "kind": (facts[:, 0] > 0).long(), "name": [f"no. {n}" for n in range(8)]}
    numbers = 10 * torch.randn(8, 6, generator=generator)
    return numbers, torch.stack([numbers[:, 0] - numbers[:, 1], numbers.norm(dim=1)], dim=1) / 10


TASKS: dict[str, tuple[type[nn.Module], type[Objective], str]] = {
    "segmentation": (Segmenter, PixelClasses, "pixels"),
    "tokens": (Reader, TextKind, "accuracy"),
    "pair": (Pair, Named, "accuracy"),
    "regression": (Regressor, Squares, "negative_error"),
}
"""By name: the network, the objective, and what an epoch is chosen by."""


def build(task: str) -> nn.Module:
    """The network of a task with seeded weights."""
    torch.manual_seed(0)
    return TASKS[task][0]()
