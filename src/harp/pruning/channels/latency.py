"""Latency: the time that channels cost, measured on this machine.

The network is cut to several widths, the same in all spaces, and every layer is timed in each of the networks. Then

    t = fixed + per_product · (products of a weight and a number) + per_result · (numbers written),   all ≥ 0,

is fitted to each layer by least squares of the relative error, and the time outside of all layers (norms, activations,
sums, the interpreter) to the numbers that all layers write. This gives a tariff like those of FLOPs and MACs, in
picoseconds for a batch, as prices are integers and one product of a small layer takes less than a nanosecond.

It is a model of the machine: kernels work on blocks of channels, so the true time is a step function around the fitted
one, and other work of the machine adds noise. For one image on one core, twelve random cuts of a ResNet18 were off by
4 % in the median and 13 % at most; time in proportion to FLOPs would have been off by 31 % and 90 %. A shared machine
drifts by up to 25 % between measurements: mostly by a common factor, which does not change shares of a budget. Measured
times are plain data and can be saved, so that a budget stays the same.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from harp.errors import ModelError, RecipeError
from harp.models.modes import evaluating, slow_attention
from harp.pruning.channels.cutting import plan
from harp.pruning.channels.prices import Product
from harp.pruning.channels.spaces import Space
from harp.pruning.channels.traces import Trace, Use

NOUN = "ps"
_WIDTHS = (1.0, 0.77, 0.55, 0.37, 0.23, 0.12)  # of 64, 128, ... channels these are no multiples of a kernel's block
_PICOSECONDS = 1e12
_WARM_UP = 2
_Floats = npt.NDArray[np.float64]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Speed:
    """The time of a layer, in picoseconds for a batch; the numbers of products and results are those of one image."""

    fixed: float
    per_product: float
    per_result: float


@dataclass(frozen=True)
class Latency:
    """The measured times of a network's layers.

    Attributes:
        layers: the speed of each timed module, by name.
        rest: the speed of all work outside of these modules.
        places: the module in which each weight is used, "" for the rest.
        batch: the number of images in a batch.
    """

    layers: dict[str, Speed]
    rest: Speed
    places: dict[str, str]
    batch: int

    def products(self, trace: Trace) -> Iterator[Product]:
        """The costs as products of numbers of channels."""
        missing = next((use.name for use in trace.uses if use.name not in self.places), None)
        if missing is not None:
            raise ModelError(f"these times are of another network: none for {missing!r}")
        for speed in (*self.layers.values(), self.rest):
            yield Product(round(speed.fixed), 1, 1)
        for use in trace.uses:
            place = self.places[use.name]
            speed = self.layers.get(place, self.rest)
            written = self.rest.per_result + (speed.per_result if place in self.layers else 0.0)
            yield Product(round(speed.per_product * use.kernel * use.positions), use.reads, use.gives)
            yield Product(round(written * use.positions), 1, use.gives)

    def as_dict(self) -> dict[str, Any]:
        """The times as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Latency":
        """Read saved times."""
        try:
            layers = {str(name): Speed(**speed) for name, speed in content["layers"].items()}
            places = {str(weight): str(place) for weight, place in content["places"].items()}
            return cls(layers, Speed(**content["rest"]), places, int(content["batch"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"no times of a network's layers: {error}") from error


@torch.no_grad()
def measure(
    model: nn.Module,
    example: Tensor,
    trace: Trace,
    spaces: Sequence[Space],
    *,
    batch: int = 1,
    repeats: int = 15,
    clock: Clock | None = None,
) -> Latency:
    """Time a network's layers at several widths.

    The time of one image (the default batch) is the response time of the network. On a device that processes many
    images in parallel it hardly depends on the channels: give the batch size that will be used there.
    """
    if batch < 1 or repeats < 1:
        raise RecipeError(f"times of batch {batch} with {repeats} repeats: both must be at least 1")
    stopwatch = _Stopwatch(example[:1].expand(batch, *example.shape[1:]).contiguous(), clock or _clock(example.device))
    dead = [
        {atom for space in spaces for atom in space.atoms[max(1, round(width * len(space.atoms))) :]}
        for width in _WIDTHS
    ]
    nets = [plan(model, trace, spaces, atoms).applied(model, share=True).eval() for atoms in dead]
    places = stopwatch.places(nets, trace)
    wholes, parts = stopwatch.medians(nets, sorted(set(places.values()) - {""}), repeats)
    uses: dict[str, list[Use]] = {name: [] for name in ["", *parts[0]]}
    for use in trace.uses:
        uses[places[use.name]].append(use)
    left = [~trace.atoms.flags(atoms) for atoms in dead]
    layers = {}
    for name in parts[0]:
        work = [_work(trace, uses[name], uses[name], alive) for alive in left]
        layers[name] = fitted(work, [times[name] for times in parts])
    rest = [max(0.0, whole - sum(times.values())) for whole, times in zip(wholes, parts, strict=True)]
    return Latency(layers, fitted([_work(trace, uses[""], trace.uses, alive) for alive in left], rest), places, batch)


@dataclass(frozen=True)
class _Stopwatch:
    """Times of networks and of modules in them, for one batch, in picoseconds."""

    images: Tensor
    clock: Clock

    def places(self, nets: Sequence[nn.Module], trace: Trace) -> dict[str, str]:
        """For each weight, the innermost module around it that is called; "" for none."""
        places = {use.name: use.name.rpartition(".")[0] for use in trace.uses}
        owners = sorted(set(places.values()) - {""})
        called = set(owners).intersection(*(self._times(net, owners) for net in nets))
        for weight, place in places.items():
            while place and place not in called:
                place = place.rpartition(".")[0]
            places[weight] = place
        return places

    def medians(
        self, nets: Sequence[nn.Module], names: Sequence[str], repeats: int
    ) -> tuple[list[float], list[dict[str, float]]]:
        """Median times of each network and of its modules, in turns, so that all see the same load of the machine."""
        wholes: list[list[float]] = [[] for _ in nets]
        parts: list[list[dict[str, float]]] = [[] for _ in nets]
        for turn in range(_WARM_UP + repeats):
            for number, net in enumerate(nets):
                whole, part = self._times(net, [""])[""], self._times(net, names)
                if turn >= _WARM_UP:
                    wholes[number].append(whole)
                    parts[number].append(part)
        medians = [{name: statistics.median(turn[name] for turn in turns) for name in names} for turns in parts]
        return [statistics.median(turns) for turns in wholes], medians

    def _times(self, net: nn.Module, names: Collection[str]) -> dict[str, float]:
        """The time in each module that is called, without the time in other timed modules inside it; "" is the net."""
        times: dict[str, float] = {}
        inside: list[float] = []  # for each open call, the time of the timed calls within it
        starts: list[float] = []

        def enter(*_: Any) -> None:
            inside.append(0.0)
            starts.append(self.clock())

        def leave(name: str) -> None:
            took = (self.clock() - starts.pop()) * _PICOSECONDS
            times[name] = times.get(name, 0.0) + took - inside.pop()
            if inside:
                inside[-1] += took

        handles = []
        for name in names:
            module = net.get_submodule(name)
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(lambda *_, name=name: leave(name)))
        try:
            with evaluating(net), slow_attention():
                net(self.images)
        finally:
            for handle in handles:
                handle.remove()
        return times


def fitted(work: Sequence[tuple[int, int]], times: Sequence[float]) -> Speed:
    """The nonnegative coefficients that fit times to numbers of products and results."""
    seconds = np.maximum(np.array(times, dtype=np.float64), 1.0)
    columns = np.column_stack([np.ones(len(seconds)), np.array(work, dtype=np.float64)])
    scales = np.maximum(columns.max(axis=0), 1.0)
    rows = columns / scales / seconds[:, None]
    best, error = np.zeros(3), np.inf
    for size in (1, 2, 3):  # with three columns, every subset can be tried
        for chosen in combinations(range(3), size):
            solution: _Floats = np.linalg.lstsq(rows[:, chosen], np.ones(len(seconds)), rcond=None)[0]
            residual = float(((rows[:, chosen] @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and residual < error * (1 - 1e-9):
                best, error = np.zeros(3), residual
                best[list(chosen)] = solution
    return Speed(*(float(number) for number in best / scales))


def _work(trace: Trace, reading: Sequence[Use], writing: Sequence[Use], alive: Tensor) -> tuple[int, int]:
    """The products of some uses and the results of others, for one image, of the channels that are left."""

    def left(atoms: Tensor | int) -> int:
        return atoms if isinstance(atoms, int) else int(alive[trace.atoms.find(atoms).clamp_min(0)].sum())

    products = sum(use.kernel * use.positions * left(use.gives) * left(use.reads) for use in reading)
    return products, sum(use.positions * left(use.gives) for use in writing)


def _clock(device: torch.device) -> Clock:
    """A clock that waits until the device has finished its work."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
