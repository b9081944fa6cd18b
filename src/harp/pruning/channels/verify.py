"""Verification: the channels that tracing has found are cut out of a copy of the model before they count as prunable.

Channels of every space are cut out of a copy with perturbed weights, and its output must be that of a copy in which
they are only masked. A space that fails, because forward reshapes by fixed numbers for instance, is left whole, with
the line of the model where it failed. A number that a module stores and that should shrink too (the number of attention
heads) is found here as well, by trying.

A cut that passes once could pass by luck, so there are four. Every channel is removed in one of the first two, which
keep different numbers of channels in every space; in the others every second space keeps a single channel, and the
rest all.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harp.errors import ModelError
from harp.models.inputs import Inputs, ask, first_rows, mapped
from harp.models.inputs import copied as copied_inputs
from harp.models.modes import untouched
from harp.pruning.channels.cutting import plan
from harp.pruning.channels.forward import failing_line, first_line, tensors_of, training
from harp.pruning.channels.spaces import Space, Whole
from harp.pruning.channels.traces import Trace

TOLERANCE = 1e-4  # relative to the largest entry, in 32 bit and through many layers

_KNOWN = {"in_channels", "out_channels", "in_features", "out_features", "num_features", "groups"}


class Trial:
    """A model's perturbed copy, on which cuts are tried."""

    def __init__(self, model: nn.Module, example: Inputs, trace: Trace) -> None:
        self.trace = trace
        self.passed: list[Space] = []  # the spaces of the last cuts that passed
        self.model = perturbed(model)
        generator = torch.Generator().manual_seed(0)
        like = next(p for p in self.model.parameters() if p.is_floating_point())
        self.inputs = noise(example, like, generator)
        if not self._runs_calibrated():  # roots and logarithms of weights bear no noise
            self.model = copied(model).eval()
            if not _finite(self._ask(self.model)):
                raise ModelError(f"{type(model).__name__} returns NaN or infinity: its channels can't be verified")

    @torch.no_grad()
    def _runs_calibrated(self) -> bool:
        with torch.random.fork_rng([]), torch.compiler.set_stance("force_eager"):
            calibrate(self.model, self.inputs)
        return _finite(self._ask(self.model))

    def survivors(self, spaces: Sequence[Space]) -> tuple[list[Space], list[Whole]]:
        """The spaces that can be cut, with the numbers that shrink with them, and those that can't."""
        good, whole = self._halve([space for space in spaces if len(space.atoms) > 1])
        while good != self.passed and (reason := self.failure(good)):  # halves pass: leave out what fails with others
            low, high = 0, len(good)  # the first `low` pass together, the first `high` don't
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self.failure(good[:middle]) else (middle, high)
            whole.append(_whole(good.pop(high - 1), reason))
        singles = [_whole(space, "one channel, which must stay") for space in spaces if len(space.atoms) == 1]
        order = {space.name: number for number, space in enumerate(spaces)}
        return self._needed(sorted(good, key=lambda space: order[space.name])), [*whole, *singles]

    def _halve(self, spaces: Sequence[Space]) -> tuple[list[Space], list[Whole]]:
        """Try the spaces together, then with more stored numbers, then in two parts."""
        reason = self.failure(spaces) if spaces else None
        if reason is None:
            return list(spaces), []
        for widths_too in (False, True):
            mended = [self._with_numbers(space, widths_too) for space in spaces]
            if any(space.numbers or space.swaps for space in mended) and self.failure(mended) is None:
                return mended, []
        if len(spaces) == 1:
            return [], [_whole(spaces[0], reason)]
        suspects = [space for space in spaces if self._is_suspect(space, reason)]
        rest = [space for space in spaces if space not in suspects]
        if not suspects or not rest:
            suspects, rest = list(spaces[: len(spaces) // 2]), list(spaces[len(spaces) // 2 :])
        (good, whole), (more, others) = self._halve(rest), self._halve(suspects)
        return [*good, *more], [*whole, *others]

    def _is_suspect(self, space: Space, reason: str) -> bool:
        """Whether the line that a reason names treats channels of a space by their positions."""
        return any(where.rpartition(" at ")[2] in reason for where in self._placing(space.atoms))

    def _placing(self, atoms: Sequence[int]) -> Iterator[str]:
        """The operations that treat some of these atoms by their positions."""
        own = self.trace.atoms.flags(atoms)
        for placed, where in self.trace.placed:
            if bool(own[self.trace.atoms.find(placed).clamp_min(0)].any()):
                yield where

    def _with_numbers(self, space: Space, widths_too: bool) -> Space:
        names = [name.rpartition(".")[0] for name in [*space.readers, *space.givers]]
        owners = list(dict.fromkeys([*names, *(name.rpartition(".")[0] for name in names)]))
        swaps = [name for name in owners if type(self.model.get_submodule(name)) is nn.MultiheadAttention]
        units = len(space.atoms)
        widths = {len(site.atoms) for site in self.trace.sites if site.name in space.givers} if widths_too else set()
        shares = {units: 1} | {width: width // units for width in widths if width > units and width % units == 0}
        numbers = {
            (owner, attribute): shares[value]
            for owner in owners
            for attribute, value in vars(self.model.get_submodule(owner)).items()
            if type(value) is int and value in shares and attribute not in _KNOWN
        }
        return replace(space, numbers=numbers, swaps=swaps)

    def _needed(self, good: list[Space]) -> list[Space]:
        """The spaces without the numbers that are equal to a count of theirs by chance."""
        for attribute in sorted({attribute for space in good for _, attribute in space.numbers}):
            fewer = [replace(s, numbers={k: v for k, v in s.numbers.items() if k[1] != attribute}) for s in good]
            good = good if self.failure(fewer) else fewer
        return good

    @torch.inference_mode(False)
    @torch.no_grad()
    def failure(self, spaces: Sequence[Space]) -> str | None:
        """Why these spaces can't be cut together; None if they can."""
        for number, dead in enumerate(_deaths(spaces)):
            try:
                with restored(self.model):
                    plan(self.model, self.trace, spaces, dead).apply(self.model)
                    answer = self._ask(self.model)
                    if self.trace.trains_more and number == 0:
                        self._ask(self.model, in_training=True)
            except Exception as error:  # a model's forward may raise any error
                return f"{failing_line(self.model, error)}: {first_line(error)}"
            with masked(self.model, self.trace, dead):
                expected = self._ask(self.model)
            if not difference(answer, expected) <= TOLERANCE:
                where = next(self._placing([atom for space in spaces for atom in space.atoms]), None)
                cause = f": {where} depends on its position" if where else ""
                return f"without it the output changes{cause}"
        self.passed = list(spaces)
        return None

    @torch.no_grad()
    def _ask(self, net: nn.Module, *, in_training: bool = False) -> Any:
        with untouched(net):
            if in_training:
                training(net)
            return ask(net, copied_inputs(self.inputs))


def _deaths(spaces: Sequence[Space]) -> Iterator[set[int]]:
    """The atoms that are removed in each of the cuts."""
    generator = torch.Generator().manual_seed(0)
    order = [[space.atoms[i] for i in torch.randperm(len(space.atoms), generator=generator)] for space in spaces]
    counts = [1 + int(torch.randint(len(atoms) - 1, (), generator=generator)) for atoms in order]
    yield {atom for atoms, count in zip(order, counts, strict=True) for atom in atoms[count:]}
    yield {atom for atoms, count in zip(order, counts, strict=True) for atom in atoms[:count]}
    for parity in range(min(2, len(spaces))):
        yield {atom for atoms in order[parity::2] for atom in atoms[1:]}


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore all attributes of a model's modules at the end."""
    before = [
        (
            module,
            {
                name: copy.copy(value) if isinstance(value, (list, dict)) else value
                for name, value in vars(module).items()
            },
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


@contextmanager
def masked(model: nn.Module, trace: Trace, dead: set[int]) -> Iterator[None]:
    """Set the weights that read the dead channels to zero, and restore them at the end."""
    gone = trace.atoms.flags(dead)
    before: dict[str, Tensor] = {}
    for site, roots in zip(trace.sites, trace.roots, strict=True):
        if site.reads and bool(gone[roots].any()):
            weight = model.get_parameter(site.name)
            before.setdefault(site.name, weight.data)
            lives = (~gone[roots]).to(weight)
            weight.data = weight.data * lives.reshape([-1 if a == site.axis else 1 for a in range(weight.ndim)])
    try:
        yield
    finally:
        for name, values in before.items():
            model.get_parameter(name).data = values


def difference(answer: Any, expected: Any) -> float:
    """How far two answers of a model are apart, relative to the largest entry; infinite if they are of other shapes."""
    ours, theirs = ([t for t in tensors_of(a) if t.is_floating_point() and t.numel()] for a in (answer, expected))
    if [leaf.shape for leaf in ours] != [leaf.shape for leaf in theirs]:
        return float("inf")
    gaps = [float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in zip(ours, theirs, strict=True)]
    return max(gaps, key=lambda gap: (math.isnan(gap), gap), default=0.0)


def noise(example: Inputs, like: Tensor, generator: torch.Generator) -> Inputs:
    """Random numbers in [0, 1] of an example's shape, one row; indices, such as tokens, are those of the example."""

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.to(like.device)
        return torch.rand(tuple(tensor.shape), generator=generator).to(like)

    return mapped(drawn, first_rows(example, 1))


def copied(model: nn.Module) -> nn.Module:
    """A copy, in 32 bit where the model has fewer."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # modules may hold anything
        raise ModelError(f"{type(model).__name__} can't be copied: {first_line(error)}") from error
    small = any(p.dtype in (torch.float16, torch.bfloat16) for p in twin.parameters())
    return twin.float() if small else twin


@torch.no_grad()
def perturbed(model: nn.Module) -> nn.Module:
    """A copy in eval mode with a little noise on all weights, so that no branch is silent, as fresh ones can be."""
    twin = copied(model).eval()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1_000_003, generator=generator)  # a prime: no two rows of a large weight get the same
    for tensor in twin.parameters():
        if tensor.is_floating_point() and tensor.numel():
            spread = max(0.3 * float(tensor.std(correction=0)), 0.02)
            values = noise.repeat(-(-tensor.numel() // len(noise)))[: tensor.numel()]
            tensor.add_(values.view(tensor.shape).to(tensor), alpha=spread)
            noise = noise.roll(-tensor.numel())
    for module in _norms(twin):
        if module.running_mean is not None and module.running_var is not None:
            drawn = torch.rand(2, module.num_features, generator=generator).to(module.running_var)
            module.running_mean.add_(0.2 * drawn[0] - 0.1)
            module.running_var.mul_(0.75 + 0.5 * drawn[1])
    return twin


def _norms(model: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]


def calibrate(model: nn.Module, inputs: Inputs) -> None:
    """Rescale layers and norms so that their outputs vary by about one.

    Otherwise signals vanish in deep networks with fresh weights, and a wrong cut would not be seen.
    """
    layers = [module for module in model.modules() if isinstance(module, _RESCALED)]
    handles = [module.register_forward_hook(_rescale, with_kwargs=True) for module in layers]
    try:
        ask(model, copied_inputs(inputs))
    finally:
        for handle in handles:
            handle.remove()


def _rescale(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
    """Scale a layer's weight and shrink a large bias; or set a norm's statistics to those of the batch."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return None
    if isinstance(module, nn.modules.batchnorm._NormBase):
        if module.running_mean is None or module.running_var is None:
            return None
        spread, mean = torch.std_mean(_by_channel([*inputs, *options.values()][0], 1), dim=1, correction=0)
        spread = torch.where(spread > 0, spread, 1.0)  # one position of one image
        offset = 0.1 * torch.linspace(-1, 1, len(mean)).to(mean)
        module.running_mean.copy_(mean + offset * spread)
        module.running_var.copy_(spread.square().clamp_min(1e-6))
        if module.affine:
            module.weight.copy_(module.weight.sign() * module.weight.abs().clamp(0.5, 2.0))
            module.bias.clamp_(-0.5, 0.5)
    else:
        weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
        axis = output.ndim - 1 if isinstance(module, nn.Linear) else 1
        spread = _by_channel(output, axis).std(dim=1, correction=0).mean()
        spread = spread if spread > 0 else output.std(correction=0)  # one position of one image
        if weight is None or not bool(spread.isfinite() & (spread > 0)):
            return None
        weight.div_(spread)
        if bias is not None:
            bias.clamp_(-0.5, 0.5)
    return module.forward(*inputs, **options)


def _by_channel(tensor: Tensor, axis: int) -> Tensor:
    return tensor.movedim(axis, 0).flatten(1) if tensor.ndim > 1 else tensor[None]


_RESCALED = (nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase)


def _finite(answer: Any) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in tensors_of(answer))


def _whole(space: Space, reason: str) -> Whole:
    return Whole(space.readers, len(space.atoms), reason)
