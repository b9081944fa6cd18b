"""The sparse engine inside attacks and trainings: the same results up to rounding, the same bits every time."""

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import harp
from harp.attacks import Pgd
from harp.attacks import fast_forward as frozen_module
from harp.attacks.fast_forward import frozen
from harp.engine.follower import Follower
from harp.engine.native import bindings
from harp.engine.sparse_training import SparseForward
from harp.errors import RecipeError
from harp.pruning.masks import Masks

pytestmark = pytest.mark.skipif(bindings.kernels() is None, reason="this installation has no native code")


class Residual(nn.Module):
    """Small, with all that makes it hard: norms that train, a stride, a sum, a layer that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.one, self.two = nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.Conv2d(64, 64, 3, 1, 1)
        self.short = nn.Conv2d(32, 64, 1, 2, bias=False)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (32, 64, 64, 64)))
        self.head = nn.Linear(64 * 16, 40)
        self.last = nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.stem(x)))
        y = F.relu(self.norms[1](self.one(x)), inplace=True)
        x = F.relu(self.norms[2](self.two(y)) + self.norms[3](self.short(x)))
        return self.last(F.leaky_relu(self.head(F.max_pool2d(x, 2).flatten(1)), 0.1))


def folded(net: Any) -> bool:
    """Whether a network is the one of torch that attacks use, rewritten."""
    return isinstance(net.plan.graph, fx.GraphModule)


def pruned(keep: float = 0.05, seed: int = 0) -> tuple[Residual, Masks]:
    torch.manual_seed(seed)
    model = Residual()
    masks = {}
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and name not in ("stem.weight", "last.weight"):
            masks[name] = torch.rand_like(weight) < keep
            weight.data.mul_(masks[name] / keep**0.5)
    for norm in model.norms:
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 1.5)
    return model, masks


def data(count: int = 24) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.rand(count, 3, 16, 16), torch.randint(10, (count,))


def slope(net: Any, x: Tensor, y: Tensor) -> Tensor:
    points = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(points), y, reduction="sum"), points)
    return gradient


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARP_ENGINE", "always")


def test_attacks_use_the_engine_for_sparse_networks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_module, "WORTH", 0)
    monkeypatch.delenv("HARP_ENGINE", raising=False)
    x, y = data()
    model, _ = pruned()
    with frozen(model, x) as net:
        assert isinstance(net, Follower)
        by_engine = slope(net, x, y)
    with frozen(pruned(1.0)[0], x) as net:
        assert folded(net), "a dense network is left to torch"
    monkeypatch.setenv("HARP_ENGINE", "off")
    with frozen(model, x) as net:
        assert folded(net), "it can be switched off"
        wanted = slope(net, x, y)
    assert (by_engine - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    with frozen(model, x.double(), fast=False) as net:
        assert net is model


def test_attacks_on_small_networks_do_not_use_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARP_ENGINE", raising=False)
    monkeypatch.setattr(frozen_module, "WORTH", 1e9)
    with frozen(pruned()[0], data()[0]) as net:
        assert folded(net)


@pytest.mark.usefixtures("always")
def test_the_engine_follows_weights_norms_and_masks() -> None:
    x, y = data()
    model, _ = pruned()
    model.eval()
    networks = []
    for change in ("none", "weights", "norms", "masks"):
        with torch.no_grad():
            if change == "weights":
                for weight in model.parameters():
                    weight.mul_(1.1)
            elif change == "norms":
                for norm in model.norms:
                    norm.running_mean.add_(0.1)
                    norm.running_var.mul_(1.2)
                    norm.weight.mul_(0.9)
                    norm.bias.add_(0.05)
            elif change == "masks":
                model.two.weight[0, :5] += 0.1
        with frozen(model, x) as net:
            assert isinstance(net, Follower)
            networks.append(net.network)
            assert torch.allclose(net(x), model(x), atol=1e-5)
            by_engine = slope(net, x, y)
        wanted = slope(model, x, y)
        assert (by_engine - wanted).abs().max() <= 1e-4 * wanted.abs().max(), change
    assert networks[0] is networks[1] is networks[2] is not networks[3], "programs are made anew for other masks only"


class Derived(nn.Module):
    """A layer whose weight is a product with a mask, a norm behind it, and a power that torch has to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        self.register_buffer("mask", (torch.rand(8, 3, 3, 3) < 0.3).float())
        self.norm = nn.BatchNorm2d(8)
        self.power = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.conv2d(x, self.weight * self.mask, padding=1))
        return self.head((F.softplus(x) ** self.power.exp()).mean((2, 3)))


@pytest.mark.usefixtures("always")
def test_the_engine_follows_tensors_derived_from_weights() -> None:
    torch.manual_seed(0)
    model, (x, y) = Derived().eval(), data()
    for change in ("none", "weights", "masks", "powers", "norms"):
        with torch.no_grad():
            if change == "weights":
                model.weight.mul_(-1)
            elif change == "masks":
                model.mask.copy_((torch.rand_like(model.mask) < 0.3).float())
            elif change == "powers":
                model.power.add_(0.3)
            elif change == "norms":
                model.norm.running_var.mul_(2)
                model.norm.bias.add_(0.1)
        with frozen(model, x) as net:
            assert isinstance(net, Follower)
            assert torch.allclose(net(x), model(x), atol=1e-5), change
            by_engine = slope(net, x, y)
        wanted = slope(model, x, y)
        assert (by_engine - wanted).abs().max() <= 1e-4 * wanted.abs().max(), change


def test_an_unknown_value_of_harp_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARP_ENGINE", "of")
    with pytest.raises(RecipeError, match="HARP_ENGINE=of: choose from"), frozen(pruned()[0], data()[0]):
        pass


@pytest.mark.usefixtures("always")
def test_second_derivatives_are_refused_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harp.engine.sparse_training.WORTH", 0)
    model, masks = pruned()
    x = data()[0].requires_grad_(True)
    with frozen(model, x) as net:
        answers = [net(x), SparseForward(model, model, masks)(x)]
    for answer in answers:
        (gradient,) = torch.autograd.grad(answer.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@pytest.mark.usefixtures("always")
def test_a_layer_that_is_too_large_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harp.engine.lowering.matrices.FARTHEST", 10)
    x = data()[0]
    with frozen(pruned()[0], x) as net:
        assert folded(net) and net(x).isfinite().all()


@pytest.mark.usefixtures("always")
def test_an_attack_leaves_the_model_as_it_was() -> None:
    model, _ = pruned()
    model.train()
    before = copy.deepcopy(model.state_dict())
    x, y = data()
    Pgd(steps=2)(model, x, y)
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert "forward" not in vars(model.one)


def test_an_attack_with_the_engine_is_the_same_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pruned()
    x, y = data()
    points = {}
    for said in ("off", "always"):
        monkeypatch.setenv("HARP_ENGINE", said)
        torch.manual_seed(0)
        points[said] = Pgd(steps=1)(model, x, y)
    assert (points["off"] == points["always"]).float().mean() > 0.999
    torch.manual_seed(0)
    assert torch.equal(Pgd(steps=1)(model, x, y), points["always"]), "the same seed gives the same bits"


@pytest.mark.parametrize(("count", "cache"), [(5, 24 << 10), (24, 24 << 10), (24, 1)])
def test_a_training_pass_gives_the_gradients_of_the_kept_weights(
    monkeypatch: pytest.MonkeyPatch, count: int, cache: int
) -> None:
    monkeypatch.setattr("harp.engine.sparse_training.WORTH", 0)
    monkeypatch.setattr("harp.engine.lowering.matrices.CACHE", cache)
    monkeypatch.setattr("harp.engine.lowering.matrices.ENOUGH", 8 if cache > 1 else 0)
    model, masks = pruned()
    twin = copy.deepcopy(model)
    x, y = data(count)
    F.cross_entropy(model(x), y).backward()
    sparse = SparseForward(twin, twin, masks)
    F.cross_entropy(sparse(x), y).backward()
    for (name, one), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        wanted = one.grad * masks[name] if name in masks else one.grad
        assert (other.grad - wanted).abs().max() <= 1e-4 * one.grad.abs().max() + 1e-6, name
    for (name, one), (_, other) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.allclose(one, other, atol=1e-5), name
    assert "forward" not in vars(twin.one)


def test_without_masks_all_weights_get_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harp.engine.sparse_training.WORTH", 0)
    model, _ = pruned(0.03)
    twin = copy.deepcopy(model)
    x, y = data()
    sparse = SparseForward(twin, twin)
    for _ in range(2):  # the second time with other weights zero
        for net, forward in ((model, model), (twin, sparse)):
            net.zero_grad()
            F.cross_entropy(forward(x), y).backward()
        for (name, one), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert (other.grad - one.grad).abs().max() <= 1e-4 * one.grad.abs().max() + 1e-6, name
        with torch.no_grad():
            for net in (model, twin):
                net.one.weight.copy_(net.one.weight.roll(1, 0))


def test_torch_computes_dense_layers_and_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harp.engine.sparse_training.WORTH", 0)
    model, _ = pruned(0.9)
    sparse = SparseForward(model, model)
    assert not sparse.sparse_layers()
    model, masks = pruned()
    sparse = SparseForward(model, model, masks)
    assert len(sparse.sparse_layers()) == 4
    x = data()[0]
    monkeypatch.setenv("HARP_ENGINE", "off")
    assert torch.equal(sparse(x), model(x))


def fitted(masks: Masks, model: nn.Module, epochs: int = 2) -> dict[str, Tensor]:
    units = harp.Weights(model)
    whole = {
        name: masks.get(name, torch.ones_like(w, dtype=torch.bool))
        for name, w in zip(units.masked, units.weights, strict=True)
    }
    batches = [data()]
    harp.fit(model, batches, harp.PgdTraining(steps=2), harp.Fixed(units, whole), epochs=epochs, lr=0.05)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_fine_tuning_is_the_same_up_to_rounding_and_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harp.engine.sparse_training.WORTH", 0)
    results = {}
    for said in ("off", "always", "always again"):
        monkeypatch.setenv("HARP_ENGINE", said.split()[0])
        model, masks = pruned()
        results[said] = fitted(masks, model)
    for name, value in results["always"].items():
        assert torch.equal(value, results["always again"][name])
        assert (value - results["off"][name]).abs().max() <= 1e-3 * max(1.0, float(value.abs().max())), name
    kept = {name: int(value.count_nonzero()) for name, value in results["always"].items() if name in masks}
    assert all(kept[name] <= int(mask.sum()) for name, mask in masks.items())


def test_without_native_code_everything_still_works() -> None:
    script = (
        "import torch, harp\n"
        "from harp.engine.native import bindings\n"
        "from harp.engine.capture.capture import capture\n"
        "from harp.engine.network import Network\n"
        "assert bindings.kernels() is None\n"
        "model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten()).eval()\n"
        "x = torch.rand(3, 3, 5, 5)\n"
        "captured = capture(model, x)\n"
        "net = Network(captured.graph, {k: v.numpy() for k, v in captured.tensors(model).items()})\n"
        "assert net.isa is None and torch.allclose(net(x), model(x), atol=1e-6)\n"
        "y, trace = net.forward(x.numpy(), keep=True)\n"
        "points = x.clone().requires_grad_(True)\n"
        "(slope,) = torch.autograd.grad(model(points).sum(), points)\n"
        "import numpy as np\n"
        "assert np.allclose(net.backward(trace, np.ones_like(y)), slope.numpy(), atol=1e-5)\n"
    )
    environment = {**os.environ, "HARP_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
