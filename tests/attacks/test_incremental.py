"""A network that is asked about changed squares gives its own answers, and keeps its maps up to date."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harp import models
from harp.attacks import Square, incremental, square
from harp.attacks.batched import Packing
from harp.attacks.fast_forward import frozen
from harp.attacks.incremental import Windows
from support.interruption import go_on


class Preactivated(nn.Module):
    """Norms before convolutions, a path beside them, and a pooling that is none for windows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 5, padding=2)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=2)
        self.beside = nn.Conv2d(6, 6, 1, stride=1, bias=False)
        self.pool = nn.AvgPool2d(3, 2)
        self.padded = nn.MaxPool2d(3, 2, padding=1)
        self.last = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first((2 * x - 1) * 0.7)
        y = self.second(torch.relu(self.norm(x))) + self.beside(x)
        return self.last(self.padded(self.pool(y)).flatten(1))


SHAPES: dict[str, tuple[int, int, int]] = {
    "convnet": (1, 17, 20),
    "resnet8": (3, 19, 16),
    "tinynet": (2, 20, 23),
    "normalised": (3, 16, 16),
    "preactivated": (3, 21, 18),
}


def build(name: str) -> nn.Module:
    """A network in eval mode whose norms have something to do."""
    torch.manual_seed(0)
    shape = SHAPES[name]
    if name == "preactivated":
        model: nn.Module = Preactivated()
    elif name == "normalised":
        norm = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
        model = models.build("resnet8", num_classes=4, shape=shape, width=0.25, normalize=norm)
    else:
        model = models.build(name, num_classes=4, shape=shape, width=0.5 if name == "resnet8" else 4)
    model(torch.rand(2, *shape))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias, std=0.5)
            nn.init.uniform_(module.running_var, 0.3, 1)
    return model.eval()


def centred(name: str) -> nn.Module:
    """The same, with all classes occurring."""
    model = build(name)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        last.bias -= model(torch.rand(50, *SHAPES[name])).mean(0)
    return model


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows pay, however few images there are."""
    monkeypatch.setattr(incremental, "STAGE", 0)
    monkeypatch.setattr(incremental, "DEARER", 0)


def local(net: Callable[[Tensor], Tensor], x: Tensor, side: int = 1) -> Windows:
    found = incremental.of(net, x, side)
    assert found is not None
    return found


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("name", SHAPES)
def test_answers_and_maps_are_the_networks(name: str) -> None:
    model, shape = build(name), SHAPES[name]
    generator = torch.Generator().manual_seed(1)
    points = torch.rand(6, *shape, generator=generator)
    with torch.no_grad(), frozen(model, points) as net:
        asked = local(net, points)
        assert len(asked.stages) >= 4
        maps = asked.fill(points)
        for side in (1, 2, 3, 5, 9, 40, 2, 1, 1, 3, 4, 6, 1, 2):
            which = torch.randperm(6, generator=generator)[:4]
            sizes = [min(side, length) for length in shape[1:]]
            corner = [
                torch.randint(length - size + 1, (4,), generator=generator)
                for length, size in zip(shape[1:], sizes, strict=True)
            ]
            proposal = points[which]
            for image, top, left in zip(proposal, *corner, strict=True):
                here = image[:, top : top + sizes[0], left : left + sizes[1]]
                here.copy_(torch.rand(here.shape, generator=generator))
            answer, news = asked.ask(maps, which, proposal, (corner[0], corner[1]), side)
            expected = model(proposal)
            assert (expected - model(points[which])).abs().max() > 1e-4 * expected.abs().max()
            assert torch.allclose(answer, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
            better = torch.tensor([2, 0])
            asked.take(maps, which, news, better)
            points[which[better]] = proposal[better]
        for kept, fresh in zip(maps, asked.fill(points), strict=True):
            assert torch.allclose(kept, fresh, rtol=0, atol=1e-5 * float(fresh.abs().max()))


def test_windows_are_less_work() -> None:
    model, x = build("convnet"), torch.rand(4, *SHAPES["convnet"])
    with torch.no_grad(), frozen(model, x) as net:
        assert incremental.of(net, x, 2) is None  # so few images of so small a network
        many = torch.rand(400, *SHAPES["convnet"])
        found = local(net, many, 2)
        costs = [found.work((side, side)) for side in (1, 3, 9, 17)]
        assert costs == sorted(costs) and costs[0] < 0.3 * costs[-1]
        assert incremental.of(net, many, 17) is None


@pytest.mark.usefixtures("cheap")
def test_who_is_asked_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("convnet"), torch.rand(4, *SHAPES["convnet"])
    with torch.no_grad(), frozen(model, x, fast=False) as net:
        assert incremental.of(net, x, 1) is None
    with torch.no_grad(), frozen(copy.deepcopy(model).double(), x.double()) as net:
        assert incremental.of(net, x.double(), 1) is None
    plain = nn.Sequential(nn.Flatten(), nn.Linear(340, 4)).eval()
    with torch.no_grad(), frozen(plain, x) as net:
        assert incremental.of(net, x, 1) is None
    with torch.no_grad(), frozen(model, x) as net:
        assert incremental.of(net, x[..., :-1], 1) is None
        monkeypatch.setattr(incremental, "MOST", local(net, x).bytes - 1)
        assert incremental.of(net, x, 1) is None


@pytest.mark.usefixtures("cheap")
def test_weights_of_the_moment() -> None:
    model, x = build("convnet"), torch.rand(4, *SHAPES["convnet"])
    for _ in range(2):
        with torch.no_grad(), frozen(model, x) as net:
            asked, zeros = local(net, x), torch.zeros(4, dtype=torch.long)
            answer, _ = asked.ask(asked.fill(x), torch.arange(4), x, (zeros, zeros), 2)
            assert torch.allclose(answer, model(x), rtol=0, atol=1e-5)
            for parameter in model.parameters():
                parameter.mul_(1.3)


@pytest.mark.usefixtures("cheap")
def test_the_network_is_not_kept_alive() -> None:
    model, x = build("resnet8"), torch.rand(4, *SHAPES["resnet8"])
    with torch.no_grad(), frozen(model, x) as net:
        local(net, x).fill(x)
    gone = weakref.ref(model), weakref.ref(net)
    del model, net
    gc.collect()
    gc.collect()  # what only the model's entry held
    assert [ref() for ref in gone] == [None, None]


# --- the square attack -------------------------------------------------------------------------------------------


def packing(net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, attack: Square) -> Packing:
    return Packing(attack, net, x, y, batch=6, seed=3)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("name", ["convnet", "resnet8"])
def test_the_square_attack_finds_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = centred(name), torch.rand(10, *SHAPES[name], generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    attack = Square(0.01, steps=30, restarts=2)
    with torch.no_grad(), frozen(model, x) as net:
        quick, asked = packing(net, x, y, attack), []
        quick.run(lambda: asked.append(any(key.startswith(square._MAP) for key in quick.rows)))
        monkeypatch.setattr(incremental, "of", lambda *arguments: None)
        usual = packing(net, x, y, attack)
        usual.run()
    assert sum(asked) > 50
    assert 0 < usual.fooled.sum() < 10
    assert (quick.fooled != usual.fooled).sum() <= 1  # a rounding may decide between two squares
    assert (quick.points != usual.points).flatten(1).any(1).sum() <= 2


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("at", [1, 25, 50])
def test_interrupted_work_ends_with_the_same_bits(at: int, tmp_path: Path) -> None:
    model, x = centred("convnet"), torch.rand(10, *SHAPES["convnet"], generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    attack = Square(0.01, steps=30, restarts=2)
    with torch.no_grad(), frozen(model, x) as net:
        whole, first, second = (packing(net, x, y, attack) for _ in range(3))
        whole.run()
        go_on(first, second, at, tmp_path / "state.pt")
    assert torch.equal(second.points, whole.points) and torch.equal(second.fooled, whole.fooled)


@pytest.mark.usefixtures("cheap")
def test_maps_that_nobody_updates_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = centred("convnet"), torch.rand(6, *SHAPES["convnet"])
    y, attack, generator = model(x).argmax(1), Square(0.001, steps=50), torch.Generator().manual_seed(0)
    with torch.no_grad(), frozen(model, x) as net:
        state = attack.begin(net, x, y, model(x), generator)
        state["step"] += 30
        attack.advance(net, x, y, state, generator)
        assert f"{square._MAP}0" in state
        monkeypatch.setattr(incremental, "of", lambda *arguments: None)
        attack.advance(net, x, y, state, generator)
        assert not any(key.startswith(square._MAP) for key in state)
