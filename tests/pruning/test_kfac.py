"""Block K-FAC: the products against matrices that are formed by explicit loops, in double precision."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harp.pruning.methods._kfac import fisher_products, layer_product
from support import cases

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), (4, 5)),
    "linear over a sequence": (lambda: nn.Linear(5, 3), (4, 6, 5)),
    "conv": (lambda: nn.Conv2d(2, 3, 3), (4, 2, 5, 5)),
    "strided": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), (4, 2, 6, 7)),
    "dilated": (lambda: nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=(2, 1), dilation=2), (3, 2, 6, 7)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (3, 4, 4, 4)),
    "depthwise": (lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3, bias=False), (3, 3, 5, 5)),
    "same": (lambda: nn.Conv2d(2, 3, (1, 3), padding="same"), (3, 2, 4, 4)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (3, 2, 4, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (4, 2, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 3, 3)),
}


def setting(case: str) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A layer, its input, gradients of its output and a direction."""
    torch.manual_seed(0)
    make, shape = LAYERS[case]
    layer = make().double()
    x = torch.randn(shape, dtype=torch.float64)
    return layer, x, torch.randn_like(layer(x)), torch.randn_like(layer.weight)


def padded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def by_loops(layer: nn.Conv2d, x: Tensor, gradient: Tensor, direction: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """A of each group, G, and G_ii (D A)_ij, written out sample by sample and position by position."""
    samples, channels, height, width = gradient.shape
    groups, (rows, columns) = layer.groups, layer.kernel_size
    size, positions = direction[0].numel(), height * width
    field = padded(layer, x)
    inputs = [torch.zeros(size, size, dtype=x.dtype) for _ in range(groups)]
    outputs = torch.zeros(channels, channels, dtype=x.dtype)
    for n, i, j in itertools.product(range(samples), range(height), range(width)):
        top, left = i * layer.stride[0], j * layer.stride[1]
        for group, part in enumerate(field[n].chunk(groups)):
            window = [
                part[:, top + a * layer.dilation[0], left + b * layer.dilation[1]]
                for a, b in itertools.product(range(rows), range(columns))
            ]
            patch = torch.stack(window, 1).reshape(-1) / positions
            inputs[group] += torch.outer(patch, patch) / samples
        g = gradient[n, :, i, j] * positions
        outputs += torch.outer(g, g) / (samples * positions)
    product = torch.zeros(channels, size, dtype=x.dtype)
    for row in range(channels):
        product[row] = outputs[row, row] * (direction[row].reshape(-1) @ inputs[row // (channels // groups)])
    return inputs, outputs, product.view_as(direction)


@pytest.mark.parametrize("case", [case for case, (make, _) in LAYERS.items() if isinstance(make(), nn.Conv2d)])
def test_convolutions_equal_explicit_loops(case: str) -> None:
    layer, x, gradient, direction = setting(case)
    inputs, outputs, expected = by_loops(layer, x, gradient, direction)
    for factor in (*inputs, outputs):
        torch.testing.assert_close(factor, factor.T)
        assert torch.linalg.eigvalsh(factor).min() > -1e-12
    torch.testing.assert_close(layer_product(layer, x, gradient, direction, len(x)), expected)


def matrix(layer: nn.Module, x: Tensor) -> Tensor:
    """The input factor as `layer_product` applies it, entry by entry, where G is the identity."""
    ones = torch.ones_like(layer(x))
    positions = ones.numel() / layer(x).size(1 - layer.weight.ndim) / len(x)
    units = torch.eye(layer.weight.numel(), dtype=x.dtype).unflatten(1, layer.weight.shape)
    rows = [layer_product(layer, x, ones / positions, unit, len(x)).flatten() for unit in units]
    return torch.stack(rows)


@pytest.mark.parametrize("case", LAYERS)
def test_the_input_factor_is_symmetric_positive_and_that_of_the_jacobian(case: str) -> None:
    layer, x, _, _ = setting(case)
    products = matrix(layer, x)
    torch.testing.assert_close(products, products.T)
    assert torch.linalg.eigvalsh(products).min() > -1e-12

    def linear_part(weight: Tensor) -> Tensor:
        parts = {name: torch.zeros_like(value) for name, value in layer.named_parameters()} | {"weight": weight}
        return torch.func.functional_call(layer, parts, (x,))

    jacobian = torch.autograd.functional.jacobian(linear_part, layer.weight.detach()).flatten(-layer.weight.ndim)
    jacobian = jacobian.flatten(0, -2)
    positions = len(jacobian) / layer(x).size(1 - layer.weight.ndim) / len(x)
    torch.testing.assert_close(products, jacobian.T @ jacobian / len(x) / positions**2)


@pytest.mark.parametrize("case", LAYERS)
def test_the_output_factor_scales_each_channel(case: str) -> None:
    layer, x, gradient, direction = setting(case)
    channel = 1 - direction.ndim
    by_channel = gradient.movedim(channel, 0).flatten(1)
    positions = by_channel.shape[1] / len(x)
    expected = positions * by_channel.square().sum(1) / len(x)
    plain = layer_product(layer, x, torch.ones_like(gradient) / positions, direction, len(x))
    products = layer_product(layer, x, gradient, direction, len(x))
    if isinstance(layer, nn.ConvTranspose2d):  # in x out/groups x kernel, the groups along the first axis
        scales = expected.view(layer.groups, 1, -1).expand(-1, len(direction) // layer.groups, -1).flatten(0, 1)
    else:
        scales = expected[:, None]
    torch.testing.assert_close(products, plain * scales.reshape(*scales.shape, *[1] * (direction.ndim - 2)))


def weigh(logits: Tensor, y: Tensor) -> Tensor:
    """A loss whose gradient at the logits is `y`."""
    return (logits * y).sum()


def dense_fisher(model: nn.Module, weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The mean outer product of the samples' gradients."""
    rows = [torch.autograd.grad(weigh(model(x[i : i + 1]), y[i : i + 1]), weight)[0].flatten() for i in range(len(x))]
    gradients = torch.stack(rows)
    return gradients.T @ gradients / len(x)


def test_a_linear_layer_has_its_dense_fisher_matrix_where_input_and_gradient_are_independent() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    inputs, outputs = torch.randn(5, 4, dtype=torch.float64), torch.diag(torch.tensor([1.0, -2.0, 0.5])).double()
    pairs = list(itertools.product(inputs, outputs))  # every input with every gradient; G is diagonal
    x, y = torch.stack([a for a, _ in pairs]), torch.stack([g for _, g in pairs])
    direction = torch.randn_like(model.weight)
    products = dict(fisher_products(model, {"weight": model.weight}, {"weight": direction}, x, y, weigh))["weight"]
    expected = dense_fisher(model, model.weight, x, y) @ direction.flatten()
    torch.testing.assert_close(products.flatten(), expected)


def test_a_bias_column_in_the_input_factor_would_change_nothing() -> None:
    layer, x, gradient, direction = setting("linear")
    with_ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    factor = with_ones.T @ with_ones / len(x)
    moved = torch.cat([direction, torch.zeros(3, 1, dtype=x.dtype)], 1)  # a bias stays where it is
    expected = (gradient.square().mean(0)[:, None] * (moved @ factor))[:, :-1]
    torch.testing.assert_close(layer_product(layer, x, gradient, direction, len(x)), expected)


class TwiceCalled(nn.Module):
    """One module called twice, one whose class does something else with its weight, and a plain one."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, 2 * self.weight, self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.again, self.doubled, self.plain = nn.Linear(4, 4), self.Doubled(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(torch.tanh(self.doubled(torch.tanh(self.again(torch.tanh(self.again(x)))))))


def test_weights_without_factors_use_the_exact_diagonal() -> None:
    torch.manual_seed(0)
    model = TwiceCalled().double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    weights = {name: value.detach() for name, value in model.named_parameters() if name.endswith("weight")}
    directions = {name: torch.randn_like(value) for name, value in weights.items()}
    products = dict(fisher_products(model, weights, directions, x, y, weigh))
    for name in ("again.weight", "doubled.weight"):
        diagonal = dense_fisher(model, model.get_parameter(name), x, y).diagonal().view_as(weights[name])
        torch.testing.assert_close(products[name], diagonal * directions[name])
    inputs: list[Tensor] = []
    model.plain.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    model(x)
    torch.testing.assert_close(
        products["plain.weight"], layer_product(model.plain, inputs[0], y, directions["plain.weight"], 6)
    )


@pytest.mark.parametrize(
    ("case", "without"),
    [
        ("conv", set()),
        ("residual", set()),
        ("grouped", set()),
        ("tied", {"up.weight"}),
        ("transformer", {"encoder.layers.0.self_attn.in_proj_weight", "encoder.layers.0.self_attn.out_proj.weight"}),
    ],
)
def test_every_weight_of_every_model_has_a_product(case: str, without: set[str]) -> None:
    """By the factors of its layer, or, where it has none, by its own diagonal."""
    model = cases.build(case).double().eval()
    names = [name for name, value in model.named_parameters() if name.endswith("weight") and value.ndim > 1]
    weights = {name: model.get_parameter(name).detach() for name in names}
    x, y = cases.batch(6)
    losses: Any = lambda logits, y: F.cross_entropy(logits, y, reduction="sum")  # noqa: E731
    products = dict(fisher_products(model, weights, weights, x.double(), y, losses))
    assert set(products) == set(names)
    gradients = [
        torch.autograd.grad(losses(model(x[i : i + 1].double()), y[i : i + 1]), [*map(model.get_parameter, names)])
        for i in range(len(x))
    ]
    for name, *of_samples in zip(names, *gradients, strict=True):
        diagonal = torch.stack(of_samples).square().mean(0) * weights[name]
        assert torch.allclose(products[name], diagonal) == (name in without), name
    for name, product in products.items():
        assert product.shape == weights[name].shape and product.isfinite().all()
        assert float((weights[name] * product).sum()) > 0, f"{name}: a Fisher matrix is positive"


def test_writing_into_a_layers_output_changes_nothing() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 3), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers).double()
    twin = copy.deepcopy(model)
    twin[1].inplace = twin[4].inplace = False
    x, y = torch.rand(5, 3, 8, 8, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    weights = {"0.weight": model[0].weight, "3.weight": model[3].weight}
    products, expected = (dict(fisher_products(net, weights, weights, x, y, weigh)) for net in (model, twin))
    for name in weights:
        torch.testing.assert_close(products[name], expected[name])


def test_a_layer_that_the_loss_does_not_depend_on_has_a_zero_product() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.called, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.called(x)
            return self.used(x)

    model = Idle()
    weights = {f"{name}.weight": getattr(model, name).weight for name in ("used", "called", "never")}
    products = dict(fisher_products(model, weights, weights, torch.rand(5, 4), torch.randn(5, 3), weigh))
    assert products["used.weight"].any()
    assert not products["called.weight"].any() and not products["never.weight"].any()


def test_the_product_uses_the_given_weights_and_leaves_the_model_unchanged() -> None:
    model = cases.build("conv").eval()
    other = cases.build("conv", seed=1).eval()
    other.load_state_dict({**other.state_dict(), **{k: v for k, v in model.state_dict().items() if v.ndim < 2}})
    names = ["features.0.weight", "features.4.weight", "classifier.0.weight", "classifier.3.weight"]
    weights = {name: other.get_parameter(name) for name in names}
    before = copy.deepcopy(model.state_dict())
    x, y = cases.batch(8)
    losses: Any = lambda logits, y: F.cross_entropy(logits, y, reduction="sum")  # noqa: E731
    products, expected = (dict(fisher_products(net, weights, weights, x, y, losses)) for net in (model, other))
    for name in names:
        torch.testing.assert_close(products[name], expected[name])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_are_removed_when_the_model_fails() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(5, 3))
    weights = {"0.weight": model[0].weight}
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        list(fisher_products(model, weights, weights, torch.rand(2, 4), torch.randn(2, 3), weigh))
    assert not model[0]._forward_hooks


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation gives."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            self.entries = max(self.entries, value.numel() if isinstance(value, Tensor) else 0)
        return result


def test_no_factor_is_ever_formed() -> None:
    model = nn.Sequential(nn.Conv2d(32, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3), nn.Flatten())
    weights = {name: model.get_parameter(name) for name in ("0.weight", "2.weight")}
    x = torch.rand(2, 32, 6, 6)
    with Largest() as largest:
        list(fisher_products(model, weights, weights, x, torch.randn(2, 32), weigh))
    assert largest.entries == max(x.numel(), weights["0.weight"].numel())
    assert largest.entries < (32 * 9) ** 2 / 30  # one A
