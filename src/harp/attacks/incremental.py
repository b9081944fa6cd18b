"""What a network answers about an image that has changed in one place only.

A convolution looks at a few pixels at a time. Where an image changes in a small window, so does every feature map: in a
window that grows by the kernel's reach from layer to layer and shrinks with every pooling. Of an attack that changes an
image a thousand times, a square at a time, most of the work is therefore done over and over. Here the feature maps of
the image as it was are kept, and only windows of them are computed anew. Once a window is the whole map, or a layer is
none that looks at places, all goes on as usual.

The graph of a frozen network is cut into *stages*: a convolution or a pooling with what follows it pixel by pixel, or a
sum. Output o of a stage reads the inputs o s − p, ..., o s − p + k − 1 along an axis (kernel k, stride s, padding p):
inputs a, ..., a + n − 1 reach the outputs

    ⌈(a + p − k + 1) / s⌉, ..., ⌊(a + n − 1 + p) / s⌋,

which are never more than ⌊(n + k − 2) / s⌋ + 1. Windows of a batch have one size, and lie within the maps.

The answers are the network's up to rounding. Rounding errors do not add up: what is kept was always computed from what
was kept before it, with the one rounding of its layer.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from harp.attacks.fast_forward import FoldedLayer
from harp.attacks.threat import logits
from harp.models.modes import Logits

Pair = tuple[int, int]

MOST = 2**20  # bytes of maps an image; wider networks are asked as usual
# What windows cost, measured: a multiplication, times as much as in whole maps, as pieces are small and are fetched; a
# number of a map, in multiplications; and a stage by itself, however many images there are.
DEARER = 1.5
_PIXEL = 64
STAGE = 20_000_000
_POINTWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Identity, nn.Dropout, nn.Dropout2d, nn.BatchNorm2d)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d)
_WITH_CONSTANT = (
    operator.sub,
    operator.truediv,
    operator.mul,
    operator.add,
    torch.sub,
    torch.div,
    torch.mul,
    torch.add,
)
_ADDS = ("add_", operator.add, torch.add)


class _Axis(NamedTuple):
    kernel: int
    stride: int
    padding: int

    def then(self, other: "_Axis") -> "_Axis":
        """With one without padding behind it."""
        return _Axis(self.kernel + (other.kernel - 1) * self.stride, self.stride * other.stride, self.padding)

    def reached(self, window: "_Span", length: int) -> "_Span":
        """The outputs, of so many, that a window of inputs reaches."""
        size = min(length, (window.size + self.kernel - 2) // self.stride + 1)
        firsts = [-((self.kernel - 1 - self.padding - start) // self.stride) for start in window.starts]
        return _Span(size, [min(max(first, 0), length - size) for first in firsts])

    def read(self, window: "_Span") -> "_Span":
        """The inputs that a window of outputs reads."""
        starts = [start * self.stride - self.padding for start in window.starts]
        return _Span((window.size - 1) * self.stride + self.kernel, starts)


class _Span(NamedTuple):
    """Windows along one axis: their size, and where they begin for every place of the window in the image."""

    size: int
    starts: list[int]


@dataclass
class _Stage:
    """Maps to one map: the first function takes the sources, each further one what the last has made."""

    sources: tuple[int, ...]
    functions: list[Callable[..., Tensor]]
    axes: tuple[_Axis, _Axis]
    shape: tuple[int, int, int]  # of the result: channels, height, width
    work: int  # multiplications for each of its pixels

    def go_on(self, other: "_Stage") -> None:
        """Take in a stage without padding that alone reads this one."""
        down, across = (one.then(another) for one, another in zip(self.axes, other.axes, strict=True))
        self.axes, self.shape = (down, across), other.shape
        self.work = self.work * prod(axis.stride for axis in other.axes) + other.work
        self.functions += other.functions


@dataclass
class _Plan:
    """Where windows of one size of the image are in all maps, and what is read for them.

    Pixels have numbers, line by line. `down` and `across` have a row for everything that has a place: each map's
    window, then each patch in its source, then each source's window in its patch. The number of the first pixel is the
    sum of what the rows hold for where the window of the image begins, one for each axis.
    """

    windows: list[Pair]  # the sizes, a map each
    patches: list[Pair]  # the sizes of what the stages read
    down: Tensor
    across: Tensor
    inside: list[tuple[Tensor, Tensor] | None]  # for each patch: which lines of the source's window it has, if not all


class News(NamedTuple):
    """What is new in the maps of points that were asked about."""

    plan: _Plan
    corners: tuple[Tensor, ...]
    values: list[Tensor]


class Windows:
    """A network that is asked about images with windows that have changed. `of` makes one, where it pays.

    The maps of a batch are a list of tensors, with a row an image; `fill` computes them.
    """

    def __init__(
        self, shape: tuple[int, int, int], stages: list[_Stage], tail: fx.GraphModule, ends: list[int]
    ) -> None:
        self.stages, self.tail, self.ends = stages, tail, ends
        self.shapes = [shape, *(stage.shape for stage in stages)]
        self.margins = [0] * len(self.shapes)  # zeros around a map, as many as its readers pad with
        for stage in stages:
            for source in stage.sources:
                self.margins[source] = max(self.margins[source], *(axis.padding for axis in stage.axes))
        self.plans: dict[Pair, _Plan] = {}

    def fill(self, points: Tensor) -> list[Tensor]:
        """The maps of some images."""
        maps = [points.new_zeros(len(points), *self._padded(at), self.shapes[at][0]) for at in self._kept()]
        everything = _range(len(points), points.device)
        zeros = torch.zeros_like(everything)
        self.take(
            maps, everything, self._ask(maps, everything, points, (zeros, zeros), self.shapes[0][1:])[1], everything
        )
        return maps

    def ask(
        self, maps: list[Tensor], which: Tensor, points: Tensor, corner: tuple[Tensor, Tensor], side: int
    ) -> tuple[Tensor, News]:
        """The logits of points that differ in squares from the images number `which`, and what `take` needs."""
        _, height, width = self.shapes[0]
        sizes = self._sizes(side)
        inside = corner[0].clamp(0, height - sizes[0]), corner[1].clamp(0, width - sizes[1])
        return self._ask(maps, which, points, inside, sizes)

    def take(self, maps: list[Tensor], which: Tensor, news: News, better: Tensor) -> None:
        """Bring the maps up to date with those of the points asked about that are taken over."""
        for at, kept in zip(self._kept(), maps, strict=True):
            line, channels = self._padded(at), kept.shape[-1]
            index = _index(which[better], news.corners[at][better], news.plan.windows[at], line)
            kept.view(-1, channels).index_copy_(0, index, news.values[at][better].view(-1, channels))

    def pays(self, side: int, count: int) -> bool:
        """Whether squares of so many images are less work than the images."""
        windows = count * DEARER * self.work(self._sizes(side)) + len(self.stages) * STAGE
        return windows < count * self.work(self.shapes[0][1:])

    @property
    def bytes(self) -> int:
        """The size of the maps of an image."""
        return 4 * sum(self.shapes[at][0] * prod(self._padded(at)) for at in self._kept())

    def work(self, sizes: Pair) -> int:
        """What a window of an image costs, in multiplications."""
        windows = self._plan(sizes).windows[1:]
        return sum(prod(window) * stage.work for window, stage in zip(windows, self.stages, strict=True))

    def _sizes(self, side: int) -> Pair:
        return min(side, self.shapes[0][1]), min(side, self.shapes[0][2])

    def _kept(self) -> range:
        return range(1, len(self.shapes))  # the image itself is known

    def _padded(self, at: int) -> Pair:
        _, height, width = self.shapes[at]
        return height + 2 * self.margins[at], width + 2 * self.margins[at]

    def _plan(self, sizes: Pair) -> _Plan:
        if sizes not in self.plans:
            self.plans[sizes] = self._make_plan(sizes)
        return self.plans[sizes]

    def _make_plan(self, sizes: Pair) -> _Plan:
        starts = [list(range(length - size + 1)) for length, size in zip(self.shapes[0][1:], sizes, strict=True)]
        windows = [tuple(_Span(size, start) for size, start in zip(sizes, starts, strict=True))]
        patches = []
        rows: list[list[list[int]]] = []
        for stage in self.stages:
            hulls = [_hull([windows[source][axis] for source in stage.sources]) for axis in (0, 1)]
            both = zip(stage.axes, hulls, stage.shape[1:], strict=True)
            windows.append(tuple(axis.reached(hull, length) for axis, hull, length in both))
            patches.append([axis.read(window) for axis, window in zip(stage.axes, windows[-1], strict=True)])
        for at, window in enumerate(windows):
            rows.append(_corner(window, self.margins[at], self._padded(at)[1]))
        pairs = [(at, patch) for stage, patch in zip(self.stages, patches, strict=True) for at in stage.sources]
        for at, patch in pairs:
            rows.append(_corner(patch, self.margins[at], self._padded(at)[1]))
        inside: list[tuple[Tensor, Tensor] | None] = []
        for at, patch in pairs:
            places = [_difference(window, own) for window, own in zip(windows[at], patch, strict=True)]
            rows.append(_corner(places, 0, patch[1].size))
            has = [_inside(place, own.size) for place, own in zip(places, patch, strict=True)]
            inside.append(None if has[0].all() and has[1].all() else (has[0], has[1]))
        return _Plan(
            [(window[0].size, window[1].size) for window in windows],
            [(patch[0].size, patch[1].size) for patch in patches],
            torch.tensor([row[0] for row in rows]),
            torch.tensor([row[1] for row in rows]),
            inside,
        )

    def _ask(
        self, maps: list[Tensor], which: Tensor, points: Tensor, corner: tuple[Tensor, Tensor], sizes: Pair
    ) -> tuple[Tensor, News]:
        plan = self._plan(sizes)
        places = plan.down.index_select(1, corner[0]) + plan.across.index_select(1, corner[1])
        news = News(plan, places.unbind(), [points.permute(0, 2, 3, 1).contiguous()])
        pair = 0
        for stage, size in zip(self.stages, plan.patches, strict=True):
            patches = []
            for source in stage.sources:
                patches.append(self._patch(maps, which, corner, news, source, pair, size))
                pair += 1
            value = stage.functions[0](*patches)
            for function in stage.functions[1:]:
                value = function(value)
            news.values.append(value.permute(0, 2, 3, 1).contiguous())
        ends = [self._map(maps, which, news, at) for at in self.ends]
        return logits(lambda _: self.tail(*ends), points), news

    def _patch(
        self,
        maps: list[Tensor],
        which: Tensor,
        corner: tuple[Tensor, Tensor],
        news: News,
        at: int,
        pair: int,
        size: Pair,
    ) -> Tensor:
        """What a stage reads of a map, as it is with what is new in it; channels last in memory."""
        margin, (channels, *lengths) = self.margins[at], self.shapes[at]
        known = at == 0 or news.plan.windows[at] == tuple(lengths)  # all of the map is new
        table, rows, own = maps[at - 1], which, _range(len(which), which.device)
        if known:
            table, rows = news.values[at], own
            table = F.pad(table, (0, 0, margin, margin, margin, margin)) if margin else table
            if size == table.shape[1:3]:
                return table.permute(0, 3, 1, 2)
        begins = news.corners[len(self.shapes) + pair]
        index = _index(rows, begins, size, self._padded(at))
        patch = table.new_empty(len(index) + 1, channels)  # the last row takes what the patch has not
        torch.index_select(table.view(-1, channels), 0, index, out=patch[:-1])
        if not known:
            window, inside = news.plan.windows[at], news.plan.inside[pair]
            index = _index(own, news.corners[len(self.shapes) + len(news.plan.inside) + pair], window, size)
            if inside is not None:
                has = inside[0][corner[0]][:, :, None] & inside[1][corner[1]][:, None, :]
                index = torch.where(has.flatten(), index, len(patch) - 1)
            patch.index_copy_(0, index, news.values[at].view(-1, channels))
        return patch[:-1].view(len(which), *size, channels).permute(0, 3, 1, 2)

    def _map(self, maps: list[Tensor], which: Tensor, news: News, at: int) -> Tensor:
        """A map with what is new, as a tensor that may be written to."""
        margin, (channels, height, width) = self.margins[at], self.shapes[at]
        window = news.plan.windows[at]
        if at == 0 or window == (height, width):
            return news.values[at].permute(0, 3, 1, 2).clone()
        full = maps[at - 1].index_select(0, which)
        index = _index(_range(len(which), which.device), news.corners[at], window, self._padded(at))
        full.view(-1, channels).index_copy_(0, index, news.values[at].view(-1, channels))
        return full[:, margin : margin + height, margin : margin + width].permute(0, 3, 1, 2)


def _corner(spans: Sequence[_Span], margin: int, line: int) -> list[list[int]]:
    """What both axes add to the number of a window's first pixel, in lines of some length."""
    down, across = ([start + margin for start in span.starts] for span in spans)
    return [[start * line for start in down], across]


def _hull(spans: Sequence[_Span]) -> _Span:
    """The smallest windows of one size that hold all."""
    starts = [min(each) for each in zip(*(span.starts for span in spans), strict=True)]
    ends = [max(each) for each in zip(*([start + span.size for start in span.starts] for span in spans), strict=True)]
    return _Span(max(end - start for start, end in zip(starts, ends, strict=True)), starts)


def _difference(window: _Span, patch: _Span) -> _Span:
    """Where a window is, as seen from a patch."""
    return _Span(window.size, [one - other for one, other in zip(window.starts, patch.starts, strict=True)])


def _inside(place: _Span, size: int) -> Tensor:
    """For each place which lines of a window are in a patch of some size."""
    lines = torch.tensor(place.starts)[:, None] + torch.arange(place.size)
    return (lines >= 0) & (lines < size)


@lru_cache(maxsize=256)
def _range(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _index(rows: Tensor, corners: Tensor, sizes: Pair, lengths: Pair) -> Tensor:
    """The numbers of the pixels of windows, in maps of some lengths that are one behind the other."""
    first = torch.add(corners, rows, alpha=prod(lengths))
    return (first[:, None] + _offsets(sizes, lengths[1], rows.device)).flatten()


@lru_cache(maxsize=256)
def _offsets(sizes: Pair, length: int, device: torch.device) -> Tensor:
    """The pixels of a window as seen from its first, in lines of some length."""
    return (torch.arange(sizes[0], device=device)[:, None] * length + torch.arange(sizes[1], device=device)).flatten()


_known: weakref.WeakKeyDictionary[nn.Module, Windows | None] = weakref.WeakKeyDictionary()


def of(net: Logits, images: Tensor, side: int) -> Windows | None:
    """The network `net` for changes of squares in some images; None if it is as fast, or faster, to ask it as usual.

    Measured on processors only: elsewhere a network is asked as usual.
    """
    if not isinstance(net, fx.GraphModule) or images.device.type != "cpu" or images.dtype != torch.float32:
        return None
    if net not in _known:
        _known[net] = _cut(net)
    found = _known[net]
    fits = found is not None and found.shapes[0] == images.shape[1:] and found.bytes <= MOST
    return found if found is not None and fits and found.pays(side, len(images)) else None


def _cut(net: fx.GraphModule) -> Windows | None:
    """Stages as far as the graph has any, and the rest as a network of its own."""
    stages: list[_Stage] = []
    maps: dict[fx.Node, int] = {}
    rest: list[fx.Node] = []
    for node in net.graph.nodes:
        if node.op == "placeholder" and len(_shape(node)) == 4 and not maps:
            maps[node] = 0
        elif len(_shape(node)) != 4 or not _add_stage(net, node, stages, maps):
            rest.append(node)
    if not stages or any(node.op == "placeholder" for node in rest):
        return None
    tail, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    ends = [node for node in maps if any(user in rest for user in node.users)]
    for node in ends:
        copies[node] = tail.placeholder(node.name)
    for node in rest:
        copies[node] = tail.node_copy(node, copies.__getitem__)
    shape = _shape(next(iter(net.graph.nodes)))[1:]
    return Windows((shape[0], shape[1], shape[2]), stages, fx.GraphModule(net, tail), [maps[node] for node in ends])


def _add_stage(net: fx.GraphModule, node: fx.Node, stages: list[_Stage], maps: dict[fx.Node, int]) -> bool:
    """Take a node into the stage before it, or begin one with it; whether it is one for stages at all."""
    sources = [each for each in node.all_input_nodes if each.op != "get_attr"]
    if not sources or any(each not in maps for each in sources):
        return False
    alone = len(sources) == 1 and len(sources[0].users) == 1 and maps[sources[0]] > 0  # the only reader of a stage
    found = _stage(net, node, sources, alone=alone)
    if found is None:
        return False
    found.sources = tuple(maps[each] for each in sources)
    if alone and not any(axis.padding for axis in found.axes):
        maps[node] = maps.pop(sources[0])
        stages[maps[node] - 1].go_on(found)
    else:
        stages.append(found)
        maps[node] = len(stages)
    return True


def _stage(net: fx.GraphModule, node: fx.Node, sources: list[fx.Node], *, alone: bool) -> _Stage | None:
    """A node as a stage of its own, if it looks at places; its sources are filled in by the caller."""
    module: Any = net.get_submodule(str(node.target)) if node.op == "call_module" else None
    channels, height, width = _shape(node)[1:]
    shape, work = (channels, height, width), _PIXEL * channels
    pixel = _Axis(1, 1, 0), _Axis(1, 1, 0)
    if len(sources) == 2:
        same = len({_shape(each) for each in (*sources, node)}) == 1
        return (
            _Stage((), [torch.add], pixel, shape, work) if same and node.target in _ADDS and not node.kwargs else None
        )
    if isinstance(module, FoldedLayer):
        layer = module.layer
        if not isinstance(layer, nn.Conv2d) or isinstance(layer.padding, str):
            return None
        reach = [(size - 1) * gap + 1 for size, gap in zip(layer.kernel_size, layer.dilation, strict=True)]
        axes = [_Axis(*axis) for axis in zip(reach, layer.stride, layer.padding, strict=True)]
        return _Stage((), [_convolution(module)], (axes[0], axes[1]), shape, work + module.weight.numel())
    if type(module) in _POOLS:
        if _pair(module.padding) != (0, 0) or _pair(getattr(module, "dilation", 1)) != (1, 1) or module.ceil_mode:
            return None
        axes = [_Axis(*axis, 0) for axis in zip(_pair(module.kernel_size), _pair(module.stride), strict=True)]
        return _Stage((), [module], (axes[0], axes[1]), shape, work)
    function = _pointwise(net, node, module, alone=alone)
    return None if function is None else _Stage((), [function], pixel, shape, work)


def _convolution(module: FoldedLayer) -> Callable[[Tensor], Tensor]:
    """The layer without its padding, with the weights that it has when it is called."""
    layer = module.layer
    return lambda x: F.conv2d(x, module.weight, module.bias, layer.stride, 0, layer.dilation, layer.groups)


def _pointwise(
    net: fx.GraphModule, node: fx.Node, module: nn.Module | None, *, alone: bool
) -> Callable[[Tensor], Tensor] | None:
    """The function of a node that treats every pixel by itself."""
    if type(module) in _POINTWISE and (alone or not getattr(module, "inplace", False)):
        return module if getattr(module, "running_var", 0) is not None else None
    if node.target == "relu_" and alone:
        return torch.relu_
    if node.op == "call_function" and node.target in (torch.relu, F.relu) and not node.kwargs.get("inplace"):
        return torch.relu
    if node.op == "call_function" and node.target in _WITH_CONSTANT and not node.kwargs and len(node.args) == 2:
        first, second = (_constant(net, each) for each in node.args)
        function: Any = node.target
        if isinstance(node.args[0], fx.Node) and second is not None:
            return lambda x: function(x, second)
        if isinstance(node.args[1], fx.Node) and first is not None:
            return lambda x: function(first, x)
    return None


def _constant(net: fx.GraphModule, value: Any) -> Any:
    """A number, or a tensor of the network with at most one number a channel."""
    if not isinstance(value, fx.Node):
        return value
    if value.op != "get_attr":
        return None
    tensor = operator.attrgetter(str(value.target))(net)
    return tensor if tensor.ndim == 0 or tensor.shape[-2:] == (1, 1) else None


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("tensor_meta"), "shape", ()))
