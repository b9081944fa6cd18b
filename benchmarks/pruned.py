"""Networks as pruning leaves them, untrained: random weights, random norms, random masks with a strategy's counts.

What such a network answers is worth nothing; what it costs is what a trained one of the same counts costs.

Beside the strategies of the library there are two:

harp       the rates that HARP has learned by its authors' own figures, at 0.1 % and for two networks.
harp-like  these rates scaled up until a budget is met to the weight, none above 1. The paper has no table of the same
           networks at another budget.
"""

import argparse
import math

import torch
from torch import Tensor, nn

from harp import models
from harp.errors import RecipeError
from harp.pruning.allocation import allocate
from harp.pruning.channels.tracing import trace
from harp.pruning.masks import Masks, at_random, top_k
from harp.pruning.units import Weights, checked_total
from harp.system.seeds import derive

SHAPE, CLASSES = (3, 32, 32), 10

# Zhao & Wressnegger, "Holistic Adversarially Robust Pruning", ICLR 2023: the figures "Strategy comparison for pruning
# a VGG16 with target 99.9 % sparsity on CIFAR-10" (layer-wise compression rates) and "... a ResNet18 with target 99.9 %
# sparsity on SVHN". The layers are in the order of the network.
PUBLISHED_AT = 0.001
PUBLISHED = {
    "vgg16": (
        0.4594291151, 0.0277645625, 0.0092659546, 0.0047599999, 0.0025094135, 0.0013384445, 0.0013269510, 0.0007611368,
        0.0004555447, 0.0004556927, 0.0004552769, 0.0004552965, 0.0004554314, 0.0014460140, 0.0090687536, 0.8430150747,
    ),
    "resnet18": (
        0.2373831272, 0.0103495838, 0.0107299592, 0.0110683925, 0.0106641715, 0.0058021424, 0.0032304812, 0.0346209481,
        0.0033260435, 0.0032320230, 0.0018066824, 0.0010101683, 0.0113064637, 0.0010036491, 0.0009867043, 0.0005805201,
        0.0003582567, 0.0033429866, 0.0003586135, 0.0003586863, 0.1323123425,
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which network: what all benchmarks of pruned networks ask for."""
    parser.add_argument("--model", default="vgg16", help="a name (`harp list models`; default: vgg16)")
    parser.add_argument("--width", type=float, help="factor of the model's width")
    parser.add_argument("--keep", default=0.01, type=float, help="share of the weights (default: 0.01)")
    parser.add_argument(
        "--strategy", default="uniform", help="uniform, erk, lamp, ..., harp or harp-like (default: uniform)"
    )


def built(name: str, width: float | None = None, seed: int = 0) -> nn.Module:
    """A network for CIFAR's images whose batch norms have statistics and shifts of their own."""
    torch.manual_seed(seed)
    model = models.build(name, num_classes=CLASSES, shape=SHAPE, **width_option(width))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
    return model.eval()


def width_option(width: float | None) -> dict[str, float]:
    """The width as an option of a model: a factor, or a number of channels."""
    return {} if width is None else {"width": int(width) if float(width).is_integer() else width}


def counts(name: str, units: Weights, keep: float, strategy: str) -> list[int]:
    """How many weights of each layer are kept."""
    if strategy not in ("harp", "harp-like"):
        return allocate(strategy, units, checked_total(units, keep))
    rates = PUBLISHED.get(name, ())
    if len(rates) != len(units.names):
        raise RecipeError(f"strategy {strategy!r} for {name}: rates were published for {', '.join(PUBLISHED)}")
    if strategy == "harp-like":
        return allocate(dict(zip(units.names, rates, strict=True)), units, checked_total(units, keep))
    if not math.isclose(keep, PUBLISHED_AT):
        raise RecipeError(
            f"strategy 'harp' at keep {keep:g}: its rates are for {PUBLISHED_AT}; 'harp-like' scales them"
        )
    return [round(rate * size) for rate, size in zip(rates, units.sizes, strict=True)]


def random_masks(name: str, model: nn.Module, keep: float, strategy: str, clustered: float = 0, seed: int = 0) -> Masks:
    """Masks with the counts of a strategy.

    Without `clustered` all sets of that many weights are equally likely. With it, every channel has a log-normal
    importance of that width in logs, and the weights with the largest random magnitude times the importance of their
    channels are kept: so does magnitude pruning of a network in which some channels matter more.
    """
    units = Weights(model)
    generator = torch.Generator().manual_seed(derive(seed, "masks"))
    numbers = zip(units.names, units.weights, counts(name, units, keep, strategy), strict=True)
    if not clustered:
        return {name: at_random(torch.ones_like(w, dtype=torch.bool), count, generator) for name, w, count in numbers}
    importance = _importance(model, clustered, generator)
    masks = {}
    for name, weight, count in numbers:
        noise = torch.randn(weight.shape, generator=generator).abs().log()
        masks[name] = top_k(importance[name] + noise, count)
    return masks


def _importance(model: nn.Module, width: float, generator: torch.Generator) -> dict[str, Tensor]:
    """The logarithm of every weight's importance: the sum over its input and its output channel."""
    seen = trace(model, torch.rand(2, *SHAPE, generator=generator))
    ends = seen.atoms.locked()  # images and classes matter all alike
    matters: dict[int, float] = {}
    logs = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for site, roots in zip(seen.sites, seen.roots, strict=True):
        if site.name in logs:
            for atom in roots.tolist():
                if atom not in matters:
                    matters[atom] = 0.0 if atom in ends else width * float(torch.randn((), generator=generator))
            of_channels = torch.tensor([matters[atom] for atom in roots.tolist()])
            axes = [1] * logs[site.name].ndim
            axes[site.axis] = -1
            logs[site.name] += of_channels.view(axes)
    return logs


@torch.no_grad()
def prune(model: nn.Module, masks: Masks, seed: int = 0) -> None:
    """Zero what the masks exclude, make up for the lost sum by larger weights, and draw the variances of the norms.

    Without that, signals would fade from layer to layer, and gradients would be denormal numbers.
    """
    generator = torch.Generator().manual_seed(derive(seed, "variances"))
    for name, mask in masks.items():
        weight = model.get_parameter(name)
        weight.masked_fill_(~mask, 0).mul_(math.sqrt(mask.numel() / max(1, int(mask.sum()))))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 1.5, generator=generator)


def pruned(
    name: str, keep: float, strategy: str, *, width: float | None = None, clustered: float = 0, seed: int = 0
) -> tuple[nn.Module, Masks]:
    """A network in eval mode with zeros, and its masks."""
    model = built(name, width, seed)
    masks = random_masks(name, model, keep, strategy, clustered, seed)
    prune(model, masks, seed)
    return model, masks
