"""The network while it stands still is the same function, and the model does not notice."""

import copy
import gc
import logging
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from harp.attacks.fast_forward import frozen, thin_convolution
from harp.engine.follower import Follower
from harp.models.agreement import disagreement
from support import cases


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1)
        self.bn2 = nn.BatchNorm2d(out, affine=False)
        self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return F.relu(y)


def rewritten(net: Any) -> fx.GraphModule:
    """The graph of a network that was rewritten."""
    graph = net.plan.graph
    assert isinstance(graph, fx.GraphModule)
    return graph


def deep() -> nn.Module:
    """Residual, then plain: every kind of fold, down to feature maps of 2 x 2."""
    return nn.Sequential(
        Block(3, 8, 1),
        Block(8, 8, 2),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 4),
    )


class Shared(nn.Module):
    """A convolution with two readers, one called twice, and a norm without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.again = nn.BatchNorm2d(6)
        self.batch = nn.Conv2d(6, 6, 3, padding=1)
        self.statistics = nn.BatchNorm2d(6, track_running_stats=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.add(torch.relu(self.norm(x)), x, alpha=2)
        x = torch.relu(self.again(self.twice(x)))
        x = torch.relu(self.again(self.twice(x)))
        x = torch.relu(self.statistics(self.batch(x)))
        return self.head(x.mean((2, 3)))


class Sums(nn.Module):
    """Sums of what a gradient needs (the result of a ReLU) and of what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(width, 6, 3, padding=1) for width in (3, 6, 6))
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(x))
        x = torch.relu(self.norm(self.two(x))) + x
        x = torch.relu(torch.relu(self.three(x)) + self.two.bias.view(-1, 1, 1))
        y = self.three(x)
        y += x
        return self.head((y + y).mean((2, 3)))


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no")


class Switch(nn.Module):
    """What a trace takes for constant may change: a flag, a buffer, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled = False
        self.register_buffer("mean", torch.rand(3, 1, 1))
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.conv = nn.Conv2d(3, 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv((x - self.mean.sqrt()) * self.scale).flatten(1)
        return 2 * y if self.doubled else y


def randomised(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and module.running_mean is not None:
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.3, 2)
            if module.weight is not None:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.1)
    return model


def pooled() -> nn.Module:
    """A max pooling that follows no ReLU."""
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 4))


MODELS: dict[str, Any] = {
    "pooled": pooled,
    **{name: lambda name=name: cases.build(name) for name in cases.CASES},
    "deep": lambda: randomised(deep()),
    "shared": lambda: randomised(Shared()),
    "sums": lambda: randomised(Sums()),
    "switch": Switch,
}


def gradients(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_(True)
    with torch.enable_grad():
        logits = net(x)
        (gradient,) = torch.autograd.grad(logits.square().sum(), x)
    return logits.detach(), gradient


def assert_same(model: nn.Module, x: Tensor, tolerance: float) -> None:
    with frozen(model, x, fast=False) as net:
        assert net is model
        expected = gradients(net, x)
    with frozen(model, x) as net:
        found = gradients(net, x)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_same_logits_and_gradients(name: str) -> None:
    model = MODELS[name]()
    x = cases.batch(6)[0]
    x = F.interpolate(x, size=16) if name == "deep" else x
    assert_same(model, x, 1e-4)
    assert_same(model.double(), x.double(), 1e-12)


@pytest.mark.parametrize("name", ["conv", "residual", "grouped", "deep"])
def test_norms_are_folded(name: str) -> None:
    model = MODELS[name]()
    x = F.interpolate(cases.batch(6)[0], size=16)
    with frozen(model, x) as net:
        graph = rewritten(net)
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    modules = dict(graph.named_modules())
    assert not any(isinstance(modules[target], (nn.BatchNorm1d, nn.BatchNorm2d)) for target in targets)


def test_autocast() -> None:
    model, x = cases.build("residual"), cases.batch()[0]
    with torch.autocast("cpu", torch.bfloat16):
        with frozen(model, x) as net:
            found = net(x).float()
        with frozen(model, x, fast=False) as net:
            expected = net(x).float()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_folds_again_after_a_weight_changed() -> None:
    model, x = cases.build("conv"), cases.batch()[0]
    assert_same(model, x, 1e-4)
    with torch.no_grad():
        model.features[0].weight.mul_(-2)
        model.features[1].running_mean.add_(1)
    model.features[4].weight.data = torch.randn(16, 8, 3, 3)
    assert_same(model, x, 1e-4)
    model.features[4] = nn.Conv2d(8, 16, 3, padding=1)
    assert_same(model, x, 1e-4)
    assert_same(model, F.interpolate(x, size=12), 1e-4)


def test_sees_changes_of_what_it_traced() -> None:
    model, x = Switch(), cases.batch()[0]
    assert_same(model, x, 1e-4)
    model.doubled = True
    assert_same(model, x, 1e-4)
    model.mean = torch.rand(3, 1, 1)
    assert_same(model, x, 1e-4)
    model.scale = nn.Parameter(torch.rand(3, 1, 1))
    assert_same(model, x, 1e-4)


def test_modes_are_restored_also_after_an_exception() -> None:
    model, x = cases.build("conv"), cases.batch()[0]
    model.train()
    model.features[1].eval()
    modes = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    with frozen(model, x) as net:
        assert not any(module.training for module in model.modules())
        net(x)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(RuntimeError, match="stop"), frozen(model, x):
        raise RuntimeError("stop")
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    broken = nn.Sequential(nn.Conv2d(3, 4, 3), Raising())
    with pytest.raises(RuntimeError, match="no"), frozen(broken, x) as net:
        net(x)
    assert all(module.training for module in broken.modules())


def hooked(model: Any) -> None:
    model.features[0].register_forward_hook(lambda module, args, output: output + 1)


def prehooked(model: Any) -> None:
    model.features[3].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def parametrized(model: Any) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    parametrize.register_parametrization(model.features[0], "weight", Double())


def patched(model: Any) -> None:
    model.features[2].forward = torch.tanh


@pytest.mark.parametrize("change", [hooked, prehooked, parametrized, patched])
def test_falls_back_on_what_a_trace_would_miss(change: Any) -> None:
    model, x = cases.build("conv"), cases.batch()[0]
    assert_same(model, x, 1e-4)
    change(model)
    with frozen(model, x) as net:
        assert net is model
    assert_same(model, x, 0)


def test_falls_back_on_control_flow_and_low_precision() -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x.flatten(1))
            return x if x.sum() > 0 else -x

    x = cases.batch()[0]
    for model, images in ((Branching(192, 4), x), (cases.build("conv").bfloat16(), x.bfloat16())):
        with frozen(model, images) as net:
            assert net is model


def test_falls_back_with_one_warning_if_the_logits_differ(caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(cases.ConvNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand_like(x[:, 0, 0, :4])

    model, x = Noisy(), cases.batch()[0]
    with caplog.at_level(logging.WARNING, logger="harp"):
        for _ in range(3):
            with frozen(model, x) as net:
                assert net is model
    assert len(caplog.records) == 1


def test_falls_back_without_images_or_if_the_sparse_engine_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = cases.build("conv"), cases.batch()[0]
    with frozen(model, x[:0]) as net:
        assert net is model
    monkeypatch.setenv("HARP_ENGINE", "always")
    with frozen(model, x) as net:
        assert isinstance(net, Follower)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(Follower, "__call__", lambda self, x: torch.zeros(len(x), 4))
        other = cases.build("conv")
        for _ in range(2):  # the folded network has the weights of the moment, and the engine is not tried again
            with frozen(other, x) as net:
                assert rewritten(net) and (net(x) - other(x)).abs().max() < 1e-4 * other(x).abs().max()
            other.features[0].weight.mul_(-2)


class Halved(torch.autograd.Function):
    """The identity with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


@fx.wrap
def halved(x: Tensor) -> Tensor:
    found: Tensor = Halved.apply(x)  # type: ignore[no-untyped-call]
    return found


def levels(x: Tensor) -> Tensor:
    return (x * 8).round() / 8


class Straight(nn.Module):
    """Numbers of few levels, with the gradient of the numbers themselves."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (levels(x) - x).detach()


class Unrecorded(nn.Module):
    """A sum of which one half has no gradient, in words that a trace does not see."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            cut = x * 2
        return x + cut


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return halved(x)


@pytest.mark.parametrize("engine", ["off", "always"])
@pytest.mark.parametrize("kind", [Straight, Unrecorded, Own])
def test_a_model_with_gradients_of_its_own_keeps_them(
    kind: type[nn.Module], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARP_ENGINE", engine)
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    x = torch.rand(4, 3, 8, 8)
    expected = gradients(model, x)[1]
    assert expected.abs().max() > 0
    with frozen(model, x) as net:
        found = gradients(net, x)[1]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_agreement_compares_the_gradients_of_most_images() -> None:
    model, x = cases.build("conv").eval(), cases.batch(6)[0]

    def cut(count: int) -> Any:
        return lambda points: model(torch.cat([points[:count].detach(), points[count:]]))

    assert disagreement(model, model, x) == ""
    assert disagreement(cut(1), model, x) == "", "a kink may be near one of them"
    assert "gradients are off by 100" in disagreement(cut(4), model, x)
    assert "gradients are off" in disagreement(lambda points: model(points).detach(), model, x)
    assert "gradients are off" in disagreement(lambda points: model(points) + (points * 0).sqrt().sum(), model, x)
    assert "logits are off" in disagreement(lambda points: model(points) * 2, model, x)
    assert disagreement(lambda points: model(points).detach(), lambda points: model(points).detach(), x) == ""


def test_tensors_that_forward_creates_do_not_stay_on_the_model() -> None:
    class Constant(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - torch.full((1, 3, 1, 1), 0.5)).flatten(1)

    model, x = Constant(3, 4, 8), cases.batch()[0]
    attributes = set(vars(model))
    with frozen(model, x) as net:
        assert net is model
    assert set(vars(model)) == attributes


def test_the_model_copies_and_pickles_as_before() -> None:
    model, x = cases.build("residual"), cases.batch()[0]
    before = len(pickle.dumps(model))
    with frozen(model, x) as net:
        expected = net(x)
    assert len(pickle.dumps(model)) == before
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.stem.weight.zero_()
        assert_same(twin, x, 1e-4)
    with frozen(model, x) as net:
        assert torch.equal(net(x), expected)


@pytest.mark.parametrize("name", ["conv", "residual", "tied"])
def test_model_is_not_kept_alive(name: str) -> None:
    model, x = cases.build(name), cases.batch()[0]
    with frozen(model, x) as net:
        net(x)
    parts = [weakref.ref(module) for module in model.modules()]
    del model, net
    gc.collect()  # the model, which the tracer's own cycles refer to
    gc.collect()  # then the graph, whose last owner was the entry of the model
    alive = [type(part()) for part in parts if part() is not None]
    assert alive == []


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding"),
    [
        (1, (3, 3), (1, 1), (1, 1)),
        (3, (3, 3), (2, 2), (1, 1)),
        (2, (5, 3), (2, 3), (2, 0)),
        (3, (1, 1), (2, 1), (0, 0)),
    ],
)
def test_the_gradient_of_thin_images(channels: int, kernel: Any, stride: Any, padding: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, channels, 8, 9, dtype=torch.double, requires_grad=True)
    weight, bias = torch.randn(4, channels, *kernel).double(), torch.randn(4).double()
    results = []
    for convolve in (thin_convolution, F.conv2d):
        y = convolve(x, weight, bias, stride, padding)
        (slope,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.pow(2).sum(), x)
        results.append((y, slope, second))
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-9)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)])
def test_a_relu_is_moved_behind_a_max_pooling(pool: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), pool, nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
    x, results = torch.rand(5, 1, 12, 12), []
    with frozen(model, x) as net:
        order = [str(node.target) for node in rewritten(net).graph.nodes]
        assert order.index("2") < order.index("relu_")
        for function in (net, model):
            points = x.clone().requires_grad_(True)
            answer = function(points)
            results.append((answer, *torch.autograd.grad(answer.square().sum(), points)))
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours, expected, atol=1e-6)


def test_a_graph_that_fails_later_is_left_for_the_model_and_this_is_said_once(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model, (x, _) = cases.build("conv").eval(), cases.batch()
    with caplog.at_level(logging.WARNING, "harp"), frozen(model, x) as net:
        graph = rewritten(net)

        def failing(*inputs: Any) -> Tensor:
            raise RuntimeError("view size is not compatible")

        graph.forward = failing
        assert torch.equal(net(x), model(x)) and torch.equal(net(x), model(x))
    with frozen(model, x) as net:
        assert torch.equal(net(x), model(x))
    assert [record.message for record in caplog.records] == [
        "the model is attacked as it is, because its folded form fails: RuntimeError: view size is not compatible"
    ]
    assert capfd.readouterr() == ("", "")


class FixedCount(nn.Module):
    """It takes sixteen images, and the trace is tried with eight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cases.build("conv")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.view(16, 3, 8, 8))


class ByLayout(nn.Module):
    """Views what only a contiguous result allows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(512, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        return self.head(x.view(len(x), 2, 4, 64).permute(0, 2, 1, 3).reshape(len(x), -1))


@pytest.mark.parametrize("kind", [FixedCount, ByLayout])
def test_what_can_not_be_rewritten_prints_nothing(kind: type[nn.Module], capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, (x, _) = kind().eval(), cases.batch(16)
    with frozen(model, x) as net:
        torch.testing.assert_close(net(x), model(x))
    assert capfd.readouterr() == ("", "")
