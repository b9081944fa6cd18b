"""Remove the dead channels of a network that was pruned weight by weight, without changing its output.

A channel can be removed if it is unread: all weights that read it are zero. A channel that is the same number for every
input, because all weights that compute it are pruned, can be made unread:

* a constant zero, as after a ReLU, adds nothing, so the weights that read it can be set to zero;
* another constant c adds Σ w·c to a reader's output. The sum is added to the reader's bias, subtracted from the mean of
  the batch norm after it, or put in a new bias. This is exact only without padding: with zero padding the sum is
  smaller at the borders. Note that a channel whose filter is pruned still has the value that its norm makes of zero;
* constants that remain because of padding differ by a factor only: each is an image of ones times a number. So one of
  them can replace the others: w·c of the others, divided by its own c, is added to its weights.

When a channel is removed, the channels that it was computed from may become unread too, and so on.

During training under fixed masks only the removal of unread channels is exact, see `compact.py`.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from harp.errors import ModelError
from harp.models.modes import evaluating
from harp.pruning.channels.constant_values import readings
from harp.pruning.channels.cutting import Cut, named_tensors
from harp.pruning.channels.spaces import Place
from harp.pruning.channels.units import Channels
from harp.pruning.channels.verify import difference
from harp.pruning.masks import Masks, apply
from harp.system.seeds import derive

TOLERANCE = 1e-5  # relative to the largest answer
_IMAGES = 4  # random ones, on which the smaller network is checked
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_REASONS = ("unread", "zero", "folded", "merged")


@dataclass(frozen=True)
class Gone:
    """What was removed for one reason: channels, and weights that weren't zero."""

    channels: int
    weights: int


@dataclass(frozen=True)
class Removed:
    """A network without its dead channels.

    Attributes:
        model: the smaller network, a plain module in the modes of the large one.
        masks: which of its weights aren't zero, for weights that had a mask (without masks: all that read channels).
        cut: what it keeps of the large network, and the biases that the large network doesn't have.
        unread: removed because no weight reads it, from the start or in the end.
        zero: removed because it is zero wherever it is read.
        folded: removed because its value was added to biases and norms.
        merged: removed because another constant channel replaces it.
        padded: the number of constant channels that stay because a reader pads.
        stuck: the number of constant channels that stay because a reader has no bias that could take their value.
        parameters: the numbers of parameters of the large and the smaller network.
    """

    model: nn.Module
    masks: Masks
    cut: Cut
    unread: Gone
    zero: Gone
    folded: Gone
    merged: Gone
    padded: int
    stuck: int
    parameters: tuple[int, int]


@torch.inference_mode(False)
def remove_dead(model: nn.Module, example: Tensor, masks: Mapping[str, Tensor] | None = None) -> Removed:
    """Remove all channels that can be removed without changing the output of the model in eval mode.

    Without masks, weights that are zero count as pruned. The model is not changed, and the smaller one is compared with
    it on random images. At least one channel of each space is kept.
    """
    large = copy.deepcopy(model)
    apply(large, masks or {})
    example = example[:2].to(next(large.parameters()).device)
    generator = torch.Generator().manual_seed(derive(0, "dead channels"))
    images = torch.rand((_IMAGES, *example.shape[1:]), generator=generator).to(example)
    expected = _answer(large, images)
    search = _Search(large, example)
    search.run()
    cut = search.cut()
    small = cut.applied(large)
    gap = difference(_answer(small, images), expected)
    if not gap <= TOLERANCE:
        raise ModelError(
            f"without its dead channels the network is off by {gap:.1e}: it computes what can't be followed"
        )
    weights = dict(small.named_parameters())
    names = search.units.masked if masks is None else masks
    return Removed(
        small,
        {name: weights[name].detach() != 0 for name in names},
        cut,
        **{reason: Gone(int((search.reason == i).sum()), search.weights[i]) for i, reason in enumerate(_REASONS)},
        padded=search.padded,
        stuck=search.stuck,
        parameters=(_size(model), _size(small)),
    )


@torch.no_grad()
def _answer(model: nn.Module, images: Tensor) -> Tensor:
    with evaluating(model):
        logits: Tensor = model(images)
    return logits


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class _Search:
    """The search for dead channels of a network. It changes the network's weights."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.model = model
        self.units = Channels(model, example)
        self.places = self.units.places
        tensors = dict(named_tensors(model))  # a weight may be a buffer
        self.weights_of = {name: tensors[name].detach() for name in self.places.names}
        uses = Counter(use.name for use in self.units.trace.uses)
        # A weight whose uses were not all seen is not known well enough.
        self.readings = {
            name: of_weight for name, of_weight in readings(model, example).items() if len(of_weight) == uses[name]
        }
        self.targets = {name: target for name in self.readings if (target := self._target(name))}
        self.biases: list[str] = []  # the new ones
        self.reason = torch.full((len(self.places.atoms),), -1)  # why each channel was removed, -1 if it was not
        self.weights = [0] * len(_REASONS)  # the numbers of weights that were removed for each reason
        self.left = self._count()
        self.padded = self.stuck = 0

    @property
    def gone(self) -> Tensor:
        """The channels that were removed, as flags."""
        return self.reason >= 0

    def run(self) -> None:
        """Remove channels until none is left that can be removed."""
        while True:
            states = self._states()
            removable = [states[reason] & ~self.gone for reason in ("unread", "zero", "folded")]
            if not any(bool(flags.any()) for flags in removable):
                removable.append(self._merge(states["padded"] & ~self.gone))
            number = next((number for number, flags in enumerate(removable) if bool(flags.any())), None)
            if number is None:
                break
            self._remove(removable[number], number)
        self.reason[self.gone & ~self.places.spare(self.gone)] = -1
        self.padded, self.stuck = (int((states[reason] & ~self.gone).sum()) for reason in ("padded", "stuck"))

    def cut(self) -> Cut:
        """The cut that removes the channels; new biases are cut like the rows of their weights."""
        cut = self.units.without(self.gone)
        cut.added.extend(self.biases)
        for bias in self.biases:
            rows = cut.kept.get(bias.removesuffix("bias") + "weight", {}).get(0)
            if rows is not None:
                cut.kept[bias] = {0: rows}
                cut.shapes[bias] = list(self.model.get_parameter(bias).shape)
        return cut

    def _states(self) -> dict[str, Tensor]:
        """Flags of all channels for each reason to remove them, and for each reason that a constant channel stays."""
        read, varying, nonzero, padded, stuck = (self.places.none() for _ in range(5))
        for place in self.places.readers:
            of_weight = [reading for reading in self.readings.get(place.name, []) if reading.axis == place.axis]
            used = place.nonzero(self.weights_of[place.name]) & (place.channels >= 0)
            constant = zero = torch.zeros_like(used)
            if of_weight:
                constant = torch.stack([reading.constant for reading in of_weight]).all(dim=0).cpu()
                zero = constant & (torch.stack([reading.values for reading in of_weight]) == 0).all(dim=0).cpu()
            read[place.channels[used]] = True
            varying[place.channels[used & ~constant]] = True
            nonzero[place.channels[used & ~zero]] = True
            if place.name not in self.targets:
                stuck[place.channels[used & ~zero]] = True
            elif self._pads(place):
                padded[place.channels[used & ~zero]] = True
        constant = read & ~varying
        return {
            "unread": ~read,
            "zero": constant & ~nonzero,
            "folded": constant & nonzero & ~padded & ~stuck,
            "padded": constant & padded & ~stuck,
            "stuck": constant & stuck,
        }

    def _remove(self, channels: Tensor, number: int) -> None:
        """Set the weights of these channels to zero, and count the weights that are removed for a reason."""
        if _REASONS[number] in ("folded", "merged"):
            self._fold(channels)
        for place in (*self.places.readers, *self.places.givers):
            place.clear(self.weights_of[place.name], channels)
        self.reason[channels] = number
        left = self._count()
        self.weights[number] += self.left - left
        self.left = left

    def _count(self) -> int:
        return sum(int(weight.count_nonzero()) for weight in self.weights_of.values())

    def _fold(self, channels: Tensor) -> None:
        """Add the values of constant channels to the biases of their readers, except of readers that pad."""
        for place in self.places.readers:
            indices = place.indices(channels).to(self.weights_of[place.name].device)
            if len(indices) and place.name in self.targets and not self._pads(place):
                weight = self.weights_of[place.name].index_select(place.axis, indices).movedim(place.axis, 0).double()
                sums = weight.reshape(*weight.shape[:2], -1).sum(dim=2)
                values = self.readings[place.name][0].values[indices]
                self._add(place.name, torch.tensordot(values, sums, dims=1))

    def _merge(self, candidates: Tensor) -> Tensor:
        """Let one constant channel of each space replace others for the readers that pad; return the others."""
        merged = torch.zeros_like(candidates)
        padding = [_Padding.of(place, self) for place in self.places.readers if self._pads(place)]
        for reader in padding:
            candidates = candidates & ~reader.several
        for space in torch.split(torch.arange(len(candidates)), self.units.sizes):
            channels = space[candidates[space]]
            if len(channels) > 1:
                values = torch.stack([reader.values[channels] for reader in padding])
                used = torch.stack([reader.used[channels] for reader in padding])
                needed = values[used.any(dim=1)].abs()
                best = int(((needed > 0).sum(dim=0) + needed.amin(dim=0).clamp(max=0.5)).argmax())
                replaced = (~used | (values[:, best : best + 1] != 0)).all(dim=0)
                replaced[best] = False
                for reader in padding:
                    reader.merge(channels[replaced], channels[best])
                merged[channels[replaced]] = True
        return merged

    def _pads(self, place: Place) -> bool:
        return place.name in self.targets and not self.readings[place.name][0].bare

    def _add(self, name: str, constant: Tensor) -> None:
        """Add a constant to a weight's output at every position."""
        if not bool(constant.any()):
            return
        owner, _, attribute = self.targets[name].rpartition(".")
        module = self.model.get_submodule(owner)
        if getattr(module, attribute) is None:
            weight = self.weights_of[name]
            bias = nn.Parameter(torch.zeros(len(constant), dtype=weight.dtype, device=weight.device))
            setattr(module, attribute, bias.requires_grad_(self.model.get_parameter(name).requires_grad))
            self.biases.append(self.targets[name])
        with torch.no_grad():
            tensor = getattr(module, attribute)
            tensor.copy_(tensor.double() + (-constant if attribute == "running_mean" else constant))

    def _target(self, name: str) -> str | None:
        """The bias or running mean that can take a constant in a weight's output; None if there is no such tensor."""
        first, *others = self.readings[name]
        owner, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(owner)
        if others or not isinstance(module, _LAYERS) or attribute != "weight" or not self._is_single(module.weight):
            return None
        bias = f"{owner}.bias".lstrip(".")
        if module.bias is None:
            return first.norm or (bias if type(module) in _LAYERS else None)
        return bias if self._is_single(module.bias) else None

    def _is_single(self, parameter: Tensor) -> bool:
        """Whether a parameter has one owner only."""
        return sum(p is parameter for _, p in self.model.named_parameters(remove_duplicate=False)) == 1


@dataclass(frozen=True)
class _Padding:
    """A weight that pads its input; the tensors have one entry for each channel of all spaces."""

    weight: Tensor
    axis: int
    index: Tensor  # the index along the axis at which it reads a channel, -1 for none
    several: Tensor  # whether it reads a channel at several indices
    values: Tensor  # the constant that it reads, 0 for none
    used: Tensor  # whether its weights for a channel aren't all zero

    @classmethod
    def of(cls, place: Place, search: _Search) -> Self:
        """A reader in the current state of the search."""
        weight, reading = search.weights_of[place.name], search.readings[place.name][0]
        indices = (place.channels >= 0).nonzero().reshape(-1)
        used = search.places.none()
        index = torch.full(used.shape, -1)
        index[place.channels[indices]] = indices
        constants = torch.where(reading.constant, reading.values, 0.0).cpu()
        used[place.read(weight)] = True
        several = torch.bincount(place.channels[indices], minlength=len(used)) > 1
        return cls(weight, place.axis, index, several, torch.where(index >= 0, constants[index], 0.0), used)

    def merge(self, others: Tensor, carrier: Tensor) -> None:
        """Add the weights of other channels to those of the carrier, times the ratio of their constants."""
        others = others[self.used[others]]
        if len(others):
            ratios = (self.values[others] / self.values[carrier]).to(self.weight.device)
            weights = self.weight.index_select(self.axis, self.index[others].to(self.weight.device))
            added = torch.tensordot(ratios, weights.movedim(self.axis, 0).double(), dims=1)
            own = self.weight.select(self.axis, int(self.index[carrier]))
            own.copy_(own.double() + added)
