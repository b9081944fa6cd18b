"""Models as people have them: each works, or says in one line what would be right."""

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from harp.attacks import Pgd
from harp.errors import HarpError
from harp.evaluation.model_checks import examine
from harp.evaluation.score import accuracy
from harp.pruning.channels import Channels
from harp.pruning.macs import cost
from harp.pruning.methods import Harp
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import PgdTraining

SHAPE = (3, 8, 8)


def body() -> nn.Sequential:
    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(32, 4))


class Wrapped(nn.Module):
    """A small network, and a function of the images and of it."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.function = body(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.body, x)


class Viewed(nn.Module):
    """Views that depend on how tensors lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Linear(512, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).view(len(x), 2, 4, 8, 8).transpose(1, 2).contiguous().view(len(x), 8, 8, 8)
        return self.head(self.second(torch.relu(x)).view(len(x), -1))


class Answer(OrderedDict[str, Tensor]):
    """A class of its own, as libraries return it."""


class Heads(nn.Module):
    """Heads in a plain list, whose parameters torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = body()[:5], [nn.Linear(32, 4), nn.Linear(32, 4)]

    def forward(self, x: Tensor) -> Tensor:
        features = self.trunk(x)
        return self.heads[0](features) + self.heads[1](features)


class Branches(nn.Module):
    """A branch without parameters, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused, self.skip = body(), nn.Linear(5, 5), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.skip(x).mean((1, 2, 3))[:, None]


class Waves(nn.Module):
    """Complex weights beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.waves, self.head = nn.Linear(192, 16, dtype=torch.complex64), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.waves(x.flatten(1).to(torch.complex64)).abs())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.flip(-1)) / 2


def changed(change: Callable[[nn.Sequential], Any]) -> nn.Module:
    model = body()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch will remove some day
        other = change(model)
    return other if isinstance(other, nn.Module) and other not in model else model


def hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, inputs, output: output * 0.5)
    model[3].register_full_backward_hook(lambda module, before, after: None)


def tied() -> nn.Module:
    layers = [nn.Linear(192, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)]
    layers[2].weight = layers[1].weight
    return nn.Sequential(nn.Flatten(), *layers)


class Case(NamedTuple):
    """How to make the model; the one line of a training, of the channels and of the MACs, None where they work."""

    make: Callable[[], nn.Module]
    training: str | None = None
    channels: str | None = None
    macs: str | None = None


def whole(function: Callable[[nn.Module, Tensor], Any], *lines: str | None) -> Case:
    return Case(lambda: Wrapped(function), *lines)


SCRIPT = "compiled by TorchScript: give the module that it was made of"
NOT_LOGITS = r"must return logits of shape \(batch, classes\), not "
COMPUTED = "has a weight that is computed"
CASES = {
    "views": Case(Viewed),
    "a view that fails": whole(
        lambda net, x: net(x.permute(0, 2, 1, 3).view(len(x), 3, -1)),
        r"can't run on images of shape \(1, 3, 8, 8\): RuntimeError: view size is not",
        r"can't run on an example of shape \(1, 3, 8, 8\): view size is not",
        "can't run on an image of shape 3x8x8: view size is not",
    ),
    "control flow by values": whole(
        lambda net, x: net(x) if x.mean() > 0.5 else net(1 - x), None, "forward decides by the values it computes"
    ),
    "in place": whole(lambda net, x: net(x.mul_(2).sub_(1)), "the model overwrites its images"),
    "a dict": whole(lambda net, x: {"logits": net(x)}, NOT_LOGITS + "dict"),
    "a tuple": whole(lambda net, x: (net(x), x.mean()), NOT_LOGITS + "tuple"),
    "an answer of a class": whole(lambda net, x: Answer(logits=net(x)), NOT_LOGITS + "Answer"),
    "a list of heads": Case(Heads, None, "has no channels that can be pruned"),
    "branches": Case(Branches),
    "tied": Case(tied),
    "contiguous only": whole(lambda net, x: net(x) if x.is_contiguous() else net(None)),
    "hooks": Case(lambda: changed(hooked)),
    "weight norm": Case(lambda: changed(lambda m: parametrizations.weight_norm(m[0])), None, COMPUTED),
    "old weight norm": Case(lambda: changed(lambda m: weight_norm(m[0])), None, COMPUTED),
    "spectral norm": Case(lambda: changed(lambda m: spectral_norm(m[0])), None, COMPUTED),
    "a parametrization": Case(
        lambda: changed(lambda m: parametrize.register_parametrization(m[0], "weight", Symmetric())), None, COMPUTED
    ),
    "lazy": Case(
        lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)),
        *["not initialised yet: run one batch through"] * 3,
    ),
    "torch.compile": Case(lambda: torch.compile(body(), backend="eager")),  # type: ignore[arg-type, return-value]
    "data parallel": Case(lambda: nn.DataParallel(body())),
    "scripted": Case(lambda: changed(torch.jit.script), SCRIPT, SCRIPT, SCRIPT),
    "traced": Case(lambda: changed(lambda m: torch.jit.trace(m.eval(), torch.rand(2, *SHAPE))), None, SCRIPT, SCRIPT),
    "quantised": Case(
        lambda: changed(lambda m: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, torch.qint8)),
        None,
        "has no channels that can be pruned",
    ),
    "complex": Case(Waves, None, "has no channels that can be pruned"),
    "half": Case(lambda: body().half(), "no longer finite"),
    "bfloat16": Case(lambda: body().bfloat16()),
    "double": Case(lambda: body().double()),
    "frozen": Case(lambda: body().requires_grad_(False)),
    "no parameters": Case(
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), "has no prunable weights", "has no parameters"
    ),
    "meta": Case(lambda: body().to("meta"), *["on the meta device"] * 3),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(8, *SHAPE, generator=generator), torch.randint(4, (8,), generator=generator)


def line_of(action: Callable[[], Any]) -> str | None:
    """The one line of an error that is meant for users; any other error fails the test."""
    try:
        action()
    except HarpError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def matches(line: str | None, expected: str | None) -> bool:
    if line is None or expected is None:
        return line is expected
    return re.search(expected, line) is not None


@pytest.mark.filterwarnings("ignore:quantized", "ignore:.*quantization.*:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_it_works_or_says_in_one_line_what_is_wrong(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    x, y = data()
    torch.manual_seed(0)

    def train() -> None:
        model = case.make()
        pruner = Harp(Weights(model), keep=0.3)
        fitted = fit(model, [(x.clone(), y)], PgdTraining(steps=1), pruner, epochs=1, lr=0.01)
        assert sum(int(mask.sum()) for mask in fitted.masks.values()) == pruner.total

    line = line_of(train)
    assert matches(line, case.training), line
    line = line_of(lambda: Channels(case.make(), x.clone()))
    assert matches(line, case.channels), line
    line = line_of(lambda: cost(case.make(), SHAPE))
    assert matches(line, case.macs), line
    if case.training is None and name != "quantised":
        assert 0 <= accuracy(case.make().eval(), x, y, attack=Pgd(steps=2)).accuracy <= 1
    assert "Traceback" not in capfd.readouterr().err


def test_what_has_no_gradient_can_not_be_attacked() -> None:
    x, y = data()
    for model in (Wrapped(lambda net, x: net(x.detach())), Wrapped(lambda net, x: net(x).detach())):
        line = line_of(lambda model=model: accuracy(model.eval(), x, y, attack=Pgd(steps=2)))  # type: ignore[misc]
        assert line is not None and "logits do not depend on the images by a gradient" in line


@pytest.mark.parametrize("name", ["a dict", "a tuple", "a view that fails", "an answer of a class"])
def test_doctor_says_why_it_can_not_be_attacked(name: str) -> None:
    found = {one.check: one for one in examine(CASES[name].make(), *data(), channels=False).findings}
    assert found["logits"].verdict == "bad" and "gradients" not in found
    assert re.search("can't run on images|attacks need a tensor of logits", found["logits"].text)


def test_doctor_and_a_class_for_each_pixel() -> None:
    model = nn.Conv2d(3, 5, 1)
    found = {one.check: one.text for one in examine(model, *data(), channels=False).findings}
    assert "one row of logits for each image is needed" in found["logits"] and "gradients" not in found
