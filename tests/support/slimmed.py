"""What every model must pass before its channels may be pruned: the same answer, and costs that are exact."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from harp.pruning import macs
from harp.pruning import masks as mask_ops
from harp.pruning.channels import Channels, price
from harp.pruning.channels.verify import difference, perturbed

aten = torch.ops.aten
DENSITIES = (0.9, 0.5, 0.2, 0.0)  # at 0 every space keeps a single channel


@dataclass(frozen=True)
class Checked:
    """A model's channels, and how far the smaller networks were off at most."""

    units: Channels
    gap: float

    def reasons(self) -> str:
        """Why channels stay, in one line."""
        return "; ".join(dict.fromkeys(part.reason for part in self.units.whole))


def check(
    model: nn.Module,
    example: Tensor,
    *,
    densities: Sequence[float] = DENSITIES,
) -> Checked:
    """Prune channels of a model at random, with random weights and statistics, and compare the cut network with it."""
    model = perturbed(model)
    units = Channels(model, example)
    generator = torch.Generator().manual_seed(0)
    gap = 0.0
    for density in densities:
        masks = units.expand(draw(units, density, generator))
        masked = copy.deepcopy(model)
        mask_ops.apply(masked, masks)
        small = units.slim(masked, masks)
        images = torch.rand(example.shape, generator=generator)
        with torch.no_grad():
            gap = max(gap, difference(small(images), masked(images)))
        kept = [int(alive.sum()) for alive in units.alive(masks)]
        counted = multiplications(small, images[:1])
        assert predicted(units, "macs", kept) == counted
        ours = macs.cost(small, tuple(example.shape[1:]))
        assert ours["macs"] == counted
        assert predicted(units, "parameters", kept) == sum(parameter.numel() for parameter in small.parameters())
        assert units.spent(masks) == predicted(units, "flops", kept) == price(small, example, "flops")
    assert gap <= 1e-5, f"off by {gap:.1e}"
    return Checked(units, gap)


def predicted(units: Channels, budget: str, kept: Sequence[int]) -> int:
    """What so many channels of each space cost under a budget."""
    return units.priced(budget).exact(kept)


def draw(units: Channels, density: float, generator: torch.Generator) -> list[Tensor]:
    """Random masks of about this density, at least one channel a space and another number in each."""
    masks = []
    for size in units.sizes:
        wanted = density * size + 2 * float(torch.rand((), generator=generator)) - 1 if density else 1
        kept = torch.randperm(size, generator=generator)[: max(1, min(size, round(wanted)))]
        masks.append(torch.zeros(size, dtype=torch.bool).scatter(0, kept, True))
    return masks


def multiplications(model: nn.Module, image: Tensor) -> int:
    """What PyTorch itself counts in convolutions and matrix products, for one image."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would hide them
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    torch.backends.mha.set_fastpath_enabled(fast)
    counts = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counts.items() if name in (aten.convolution, aten.mm, aten.addmm)) // 2
