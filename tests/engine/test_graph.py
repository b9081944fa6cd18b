"""Graphs: a captured graph computes what the model does and survives the file; invalid graphs are refused."""

import copy
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.engine.capture.capture import Captured, capture
from harp.engine.format.reader import BadFile, Stored
from harp.engine.graph import reference
from harp.engine.graph.allowed_calls import is_allowed
from harp.engine.graph.nodes import Graph, Node
from harp.errors import MissingExtra, ModelError
from harp.models import external
from harp.models.normalize import Normalized
from support.cases import CASES, batch, build


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def same(a: Tensor, b: Tensor, bound: float = 1e-5) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= bound * b.abs().max())


def logits(captured: Captured, model: nn.Module, x: Tensor) -> Tensor:
    return reference.run(captured.graph, captured.tensors(model), x)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """A model whose norms have statistics that are not the trivial ones."""
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 1.5)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.2)
    return model


def check(model: nn.Module, x: Tensor) -> Captured:
    """Capture, and hold against the model whatever a graph has to hold against."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    captured = capture(model, x)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    again = Graph.from_dict(json.loads(json.dumps(captured.graph.as_dict())))
    assert again == captured.graph
    tensors = captured.tensors(model)
    assert list(tensors) == again.tensor_names()
    again.check({name: tensor.shape for name, tensor in tensors.items()})
    reference.check(again, {name: Stored(tuple(t.shape), None, t.numpy()) for name, t in tensors.items()})
    frozen = copy.deepcopy(model).eval()
    for images in (x[:1], x, x.repeat(2, *[1] * (x.ndim - 1))):
        assert same(reference.run(again, tensors, images), frozen(images).detach(), 1e-4)
    return captured


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple[nn.Module, Captured]]:
    """Every case and its graph, which takes seconds."""
    return {name: (model := build(name), check(model, batch(3)[0])) for name in CASES}


def test_layers_become_operations(cases: dict[str, tuple[nn.Module, Captured]]) -> None:
    _, conv = cases["conv"]
    assert ops(conv.graph) == {
        "input": 1, "conv": 2, "relu": 3, "maxpool": 1, "avgpool": 1, "flatten": 1, "linear": 2,
    }  # fmt: skip
    assert list(conv.folds) == ["features.0.weight", "features.4.weight"]
    fold = conv.folds["features.0.weight"]
    assert (fold.bias, fold.mean, fold.epsilon) == (None, "features.1.running_mean", 1e-5)
    assert [node.name for node in conv.graph.nodes if node.op == "conv"] == ["features.0", "features.4"]
    _, residual = cases["residual"]
    assert ops(residual.graph)["add"] == 1
    assert not any(node.op in ("affine", "torch") for node in residual.graph.nodes)
    assert residual.graph.nodes[-2].attributes == {"keep": False}
    _, grouped = cases["grouped"]
    assert [node.attributes["groups"] for node in grouped.graph.nodes if node.op == "conv"] == [1, 12, 3]
    assert (grouped.graph.input_shape, grouped.graph.nodes[-1].shape) == ((3, 8, 8), (4,))


def test_a_shared_weight_has_one_tensor(cases: dict[str, tuple[nn.Module, Captured]]) -> None:
    _, tied = cases["tied"]
    uses = [node.tensors["weight"] for node in tied.graph.nodes if node.op == "linear"]
    assert uses == ["inner.weight", "up.weight", "up.weight", "head.weight"]
    assert tied.graph.tensor_names().count("up.weight") == 1


def test_torch_computes_a_transformer(cases: dict[str, tuple[nn.Module, Captured]]) -> None:
    model, captured = cases["transformer"]
    assert captured.graph.needs_torch
    assert captured.graph.nodes[1].op == "conv"
    assert captured.graph.nodes[-1].op == "linear"
    assert any(min(node.shape) < 0 for node in captured.graph.nodes), "the batch axis is not always in front"
    x = batch(4)[0].requires_grad_()
    expected = torch.autograd.grad(model.eval()(x).square().sum(), x)[0]
    assert same(torch.autograd.grad(logits(captured, model, x).square().sum(), x)[0], expected, 1e-4)


def test_a_graph_whose_answers_are_not_numbers_is_refused() -> None:
    class Divided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) / (x.flatten(1) - x.flatten(1))

    with pytest.raises(ModelError, match="off by nan"):
        capture(Divided(), torch.rand(2, 1, 3, 3))


def test_tensors_are_computed_from_the_current_weights(cases: dict[str, tuple[nn.Module, Captured]]) -> None:
    _, captured = cases["residual"]
    other = build("residual", seed=7).eval()
    x = batch(5)[0]
    assert same(logits(captured, other, x), other(x).detach(), 1e-4)
    with pytest.raises(ModelError, match=r"it isn't the one whose graph was captured"):
        captured.tensors(build("tied"))


class Odd(nn.Module):
    """What needs a rule of its own: constants, arithmetic of channels, padding, pooling, ops of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 4, 3, padding="same")
        self.uneven = nn.Conv2d(4, 4, 2, padding="same")
        self.norm = nn.BatchNorm2d(4)
        self.twice = nn.Conv2d(4, 4, 1)
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
        self.weight = nn.Parameter(torch.rand(4, 36) - 0.5)
        self.offset = torch.rand(4)
        self.last = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / 0.5
        x = 1 - self.same(x) * 2
        x = self.norm(torch.relu_(self.uneven(x)))
        x = F.hardtanh(F.relu6(F.leaky_relu(x, 0.2)) + x.mean((-2, -1), keepdim=True), -0.9, 0.8)
        x = self.first(self.twice(x)) + self.second(self.twice(x))
        a, b = F.gelu(x).chunk(2, 1)
        x = torch.cat([b, a * torch.sigmoid(a)], 1)
        x = x.reshape(x.shape[0], 2, 2, 8, 8).transpose(1, 2).reshape(x.size(0), -1, 8, 8)
        x = F.avg_pool2d(F.max_pool2d(x, 3, 2, 1, ceil_mode=True), 2, 1, 1, ceil_mode=True, count_include_pad=False)
        x = F.adaptive_avg_pool2d(F.pad(x, (0, 1, 0, 1)), 3).contiguous()
        x = F.linear(x.view(x.shape[0], -1), self.weight.tanh(), self.offset)
        return F.dropout(F.normalize(self.last(x)), training=self.training)


def test_unusual_calls_are_captured() -> None:
    captured = check(randomised(Odd()), torch.rand(2, 3, 8, 8))
    counts = ops(captured.graph)
    assert counts["affine"] == 5, "the constants before, 1 - 2x, the norm behind the ReLU, the norms of two uses"
    assert captured.graph.nodes[1].op == "affine", "the differences and quotients of constants are one map"
    assert list(captured.folds) == ["tanh"], "one layer before two norms, and a norm behind a ReLU, stay"
    names = {node.attributes["op"] for node in captured.graph.nodes if node.op == "torch"}
    assert "aten.conv2d.padding" in names, "zeros on one side only"
    assert {"aten.gelu.default", "aten.split.Tensor"} <= names
    assert not any("dropout" in name or "clone" in name for name in names)
    assert (counts["clip"], counts["leaky"], counts["maxpool"], counts["avgpool"]) == (2, 1, 1, 1)


def test_normalisation_is_one_affine_map() -> None:
    model = Normalized(build("conv"), (0.1, 0.2, 0.3), (0.2, 0.3, 0.4))
    captured = check(model, batch(2)[0])
    assert [node.op for node in captured.graph.nodes[:3]] == ["input", "affine", "conv"]
    scale = captured.tensors(model)[captured.graph.nodes[1].tensors["scale"]]
    assert torch.allclose(scale, 1 / torch.tensor([0.2, 0.3, 0.4]))


class Random(nn.Module):
    """Draws numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rand_like(x)).flatten(1)


class Dropping(nn.Module):
    """Drops numbers in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x.flatten(1), training=True)


class Overwriting(nn.Module):
    """Writes into the images that it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(0.5).relu_().flatten(1)


class Counting(nn.Module):
    """Computes with the number of images."""

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x.flatten(1) - 0.5, 1 / (x.shape[0] + 1))


class Mixing(nn.Module):
    """Lets the images of a batch know of each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) - x.flatten(1).mean(0)


class Branching(nn.Module):
    """Looks at the numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) if x.sum() > 0 else -x.flatten(1)


class Pair(nn.Module):
    """Gives two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(1), x.flatten(1) + 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Random(), "calls aten.rand_like"),
        (Dropping(), "calls aten"),
        (Counting(), "which a graph can't hold"),
        (Mixing(), "mixes the images"),
        (Branching(), "can't be captured"),
        (Pair(), "one tensor"),
    ],
)
def test_models_that_cannot_be_captured_are_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        capture(model, torch.rand(2, 3, 4, 4))
    assert "\n" not in str(caught.value)


def test_a_model_that_overwrites_its_images_is_captured() -> None:
    x = torch.rand(2, 3, 4, 4)
    captured = capture(Overwriting(), x.clone())
    assert [node.op for node in captured.graph.nodes] == ["input", "affine", "relu", "flatten"]
    assert same(logits(captured, Overwriting(), x), (x - 0.5).relu().flatten(1))


def test_graphs_need_no_torch() -> None:
    code = "import sys; import harp.engine.graph.nodes, harp.engine.format.reader; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Untrusted graphs.

CONV: dict[str, Any] = {"op": "conv", "name": "a", "shape": [4, 6, 6], "attributes": {"padding": [1, 1]}}
INPUT = {"op": "input", "shape": [3, 6, 6]}


def graph_of(*nodes: Any, **more: Any) -> Graph:
    return Graph.from_dict({"nodes": [INPUT, *nodes], **more})


def test_defaults_are_filled_in() -> None:
    graph = graph_of(CONV, {"op": "relu"}, {"op": "mean"})
    assert graph.nodes[1] == Node(
        "a", "conv", ("input0",), (4, 6, 6), {"weight": "a.weight", "bias": "a.bias"},
        {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1},
    )  # fmt: skip
    assert graph.nodes[3] == Node("mean3", "mean", ("relu2",), (4,), {}, {"keep": False})
    assert graph.output == "mean3"
    assert Graph.from_dict(graph.as_dict()) == graph


TORCH = {"op": "torch", "shape": [3, 6, 6]}
WINDOW = {"kernel": [1, 1], "stride": [1, 1]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no list of nodes"),
        ({"nodes": []}, "0 nodes"),
        ({"nodes": [CONV]}, "first node"),
        ({"nodes": [INPUT, INPUT]}, "first node"),
        ({"nodes": [INPUT, 3]}, "no object"),
        ({"nodes": [INPUT, {"op": "exec"}]}, "unknown operation"),
        ({"nodes": [INPUT, {"op": ["conv"]}]}, "unknown operation"),
        ({"nodes": [INPUT, {"op": "relu", "inputs": ["b"]}, {"op": "relu", "name": "b"}]}, "no earlier node"),
        ({"nodes": [INPUT, {"op": "relu", "inputs": "input0"}]}, "no earlier node"),
        ({"nodes": [INPUT, {"op": "relu", "inputs": [["input0"]]}]}, "no earlier node"),
        ({"nodes": [INPUT, {"op": "relu", "name": "input0"}]}, "two nodes"),
        ({"nodes": [INPUT, {"op": "relu", "name": ""}]}, "proper name"),
        ({"nodes": [INPUT, {"op": "add"}]}, "1 inputs"),
        ({"nodes": [INPUT, {"op": "relu", "shape": [3, 6, 7]}]}, "gives"),
        ({"nodes": [INPUT, {"op": "relu", "attributes": {"slope": 1}}]}, "attributes it can't have"),
        ({"nodes": [{"op": "input", "shape": [1 << 40]}]}, "too large"),
        ({"nodes": [{"op": "input", "shape": [3, True, 6]}]}, "proper shape"),
        ({"nodes": [{"op": "input", "shape": [3, -1, 6]}]}, "proper shape"),
        ({"nodes": [INPUT, {"op": "linear", "name": "a", "shape": [4]}]}, "linear can't"),
        ({"nodes": [INPUT, {"op": "conv", "shape": [4, 6, 6]}]}, "no name"),
        ({"nodes": [INPUT, {**CONV, "tensors": {"weight": 3}}]}, "tensors that it needs"),
        ({"nodes": [INPUT, {**CONV, "tensors": {"bias": "a"}}]}, "tensors that it needs"),
        ({"nodes": [INPUT, {**CONV, "attributes": {"stride": [0, 1]}}]}, "stride"),
        ({"nodes": [INPUT, {**CONV, "attributes": {"groups": 2}}]}, "gives no shape"),
        ({"nodes": [INPUT, {"op": "affine"}]}, "tensors that it needs"),
        ({"nodes": [INPUT, {"op": "maxpool"}]}, "kernel None"),
        ({"nodes": [INPUT, {"op": "maxpool", "attributes": {"kernel": [9, 1], "stride": [1, 1]}}]}, "does not fit"),
        ({"nodes": [INPUT, {"op": "avgpool", "attributes": {**WINDOW, "padding": [0, 1]}}]}, "half a window"),
        ({"nodes": [INPUT, {"op": "clip", "attributes": {"low": 1, "high": 0}}]}, "low above high"),
        ({"nodes": [INPUT, {"op": "clip", "attributes": {"low": float("nan"), "high": 0}}]}, "low nan"),
        ({"nodes": [INPUT, {**TORCH, "attributes": {"op": "os.system.default"}}]}, "has op"),
        ({"nodes": [INPUT, {**TORCH, "attributes": {"op": "aten.x.y", "args": [{"node": "b"}]}}]}, "no earlier node"),
        ({"nodes": [INPUT, {**TORCH, "attributes": {"op": "aten.x.y", "args": [{"code": "b"}]}}]}, "has args"),
        ({"nodes": [INPUT, {**TORCH, "attributes": {"op": "aten.x.y", "pick": -1}}]}, "has pick"),
        ({"nodes": [INPUT, {"op": "relu", "inputs": []}]}, "0 inputs"),
        ({"nodes": [INPUT], "output": "relu"}, "none of its nodes"),
        ({"nodes": [INPUT, {"op": "flatten"}, {"op": "mean"}]}, "height and width"),
    ],
)  # fmt: skip
def test_wrong_graphs_are_refused(content: Any, words: str) -> None:
    with pytest.raises(BadFile, match=words) as caught:
        Graph.from_dict(content)
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ["op", "name", "inputs", "shape", "tensors", "attributes"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_graphs_are_refused_or_read(data: st.DataObject) -> None:
    """A good graph with something put somewhere: read, and then the same again, or refused, and nothing else."""
    good = [INPUT, CONV, {"op": "relu"}, {"op": "maxpool", "attributes": {"kernel": [2, 2], "stride": [2, 2]}},
            {**TORCH, "shape": [4, 3, 3], "attributes": {"op": "aten.gelu.default", "args": [{"node": "maxpool3"}]}},
            {"op": "flatten"}, {"op": "linear", "name": "b", "shape": [5]}]  # fmt: skip
    content: Any = {"nodes": copy.deepcopy(good)}
    for _ in range(data.draw(st.integers(1, 3))):
        node = data.draw(st.sampled_from(content["nodes"]))
        field = data.draw(st.sampled_from(FIELDS))
        inner = node.get(field)
        if isinstance(inner, dict) and inner and data.draw(st.booleans()):
            inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(JSON)
        else:
            node[field] = data.draw(JSON | st.sampled_from(["relu", "add", "concat", "mean", "torch", "input"]))
    try:
        graph = Graph.from_dict(content)
    except BadFile as error:
        assert "\n" not in str(error)
        return
    assert Graph.from_dict(json.loads(json.dumps(graph.as_dict()))) == graph


def test_tensors_of_other_shapes_are_refused() -> None:
    graph = graph_of(CONV, {"op": "flatten"}, {"op": "linear", "name": "b", "shape": [5]})
    good: dict[str, tuple[int, ...]] = {"a.weight": (4, 3, 3, 3), "a.bias": (4,), "b.weight": (5, 144), "b.bias": (5,)}
    graph.check(good)
    for name, shape in (("a.weight", (4, 3, 3, 1)), ("a.weight", (4, 3, 3)), ("a.bias", (3,)), ("b.weight", (5, 143))):
        with pytest.raises(BadFile):
            graph.check({**good, name: shape})
    with pytest.raises(BadFile, match=r"needs a tensor 'a\.bias'"):
        graph.check({name: shape for name, shape in good.items() if name != "a.bias"})


IMAGES = {"op": "input", "name": "x", "shape": [4, 4, 4]}
X, T = {"node": "x"}, {"tensor": "t"}


@pytest.mark.parametrize(
    "name",
    ["aten.from_file.default", "aten.rand.default", "aten.bernoulli.default", "aten.relu_.default",
     "aten.dropout.default", "aten.empty.memory_format", "aten.add.out", "aten.set_.source_Tensor",
     "aten.no_such.default", "aten.relu.no_such",
     "aten.item.default", "aten.sym_size.int", "aten._cudnn_rnn.default", "aten.as_strided.default",
     "aten.max_pool2d_with_indices_backward.default", "aten.max_unpool2d.default", "aten.embedding_bag.default",
     "aten.take_along_dim.default", "aten.grid_sampler_2d.default", "aten.index_put.default", "aten.gather.default",
     "aten.reflection_pad2d.default", "aten.repeat_interleave.self_int", "aten.native_dropout.default",
     "aten.native_batch_norm.default", "aten.resize.default", "aten.segment_reduce.default", "aten.lstm.input"],
)  # fmt: skip
def test_functions_that_a_file_must_not_call_are_refused(name: str) -> None:
    graph = graph_of({**TORCH, "attributes": {"op": name, "args": [{"node": "input0"}]}})
    with pytest.raises(BadFile):
        reference.check(graph, {})


def test_no_function_that_trusts_its_arguments_is_allowed() -> None:
    """Of all that this torch has, not only of what somebody thought of."""
    words = (
        "backward",
        "unpool",
        "scatter_",
        "rand",
        "resize",
        "strided",
        "file",
        "set_",
        "put",
        "out",
        "unsafe_chunk",
    )
    allowed = set()
    for packet in dir(torch.ops.aten):
        for overload in getattr(getattr(torch.ops.aten, packet), "overloads", list)():
            function = getattr(getattr(torch.ops.aten, packet), overload)
            if is_allowed(function):
                allowed.add(packet)
                assert not function._schema.is_mutable and not packet.endswith("_")
    assert 200 < len(allowed) < 300
    assert not [name for name in allowed if any(word in name for word in words) and name != "outer"]


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "words"),
    [
        ("batch_norm", [X, None, None, None, None, True, 0.1, 1e-5, False], {}, "changes its running"),
        ("instance_norm", [X, None, None, T, T, True, 0.1, 1e-5, False], {}, "changes its running"),
        ("_native_batch_norm_legit_no_training", [X, None, None, T, T, 0.1, 1e-5], {}, "of another size"),
        ("pad", [X, [-4, 9], "reflect"], {}, "a negative padding"),
        ("softmax", [X, 1, 255], {}, "has dtype 255"),
        ("softmax", [X, 1], {"dtype": -1}, "has dtype -1"),
        ("upsample_nearest2d", [X, [8, 8], {"float": "nan"}, 1.0], {}, "resizes images by"),
        ("upsample_bilinear2d", [X, [8, 8], False], {"scales_h": 1e-30}, "resizes images by"),
        ("scaled_dot_product_attention", [X, X, X, None, 0.5], {}, "at random"),
        ("scaled_dot_product_attention", [X, X, X], {"dropout_p": 0.5}, "at random"),
    ],
)
def test_arguments_that_a_file_must_not_give_are_refused(
    op: str, args: list[Any], kwargs: dict[str, Any], words: str
) -> None:
    call: dict[str, Any] = {
        "op": f"aten.{op}.{'int' if op == 'softmax' else 'default'}",
        "args": args,
        "kwargs": kwargs,
    }
    call |= {"pick": 0} if op.startswith("_native") else {}
    graph = Graph.from_dict({"nodes": [IMAGES, {"op": "torch", "shape": [4, 4, 4], "attributes": call}]})
    with pytest.raises(BadFile, match=words):
        reference.check(graph, {"t": Stored((1,), None, torch.zeros(1).numpy())})


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"shape": [3, 7], "attributes": {"op": "aten.gelu.default", "args": [{"node": "input0"}]}}, "stated shape"),
        ({"shape": [9], "attributes": {"op": "aten.full.default", "args": [[1 << 40, 1 << 20], 1.0]}}, "stated shape"),
        ({"shape": [3], "attributes": {"op": "aten.gelu.default", "args": [{"node": "input0"}, 3, 4]}}, "computed"),
        ({"shape": [3], "attributes": {"op": "aten.gelu.default", "args": [{"node": "input0"}], "pick": 1}}, "picks"),
    ],
)  # fmt: skip
def test_functions_must_give_the_stated_shape(node: dict[str, Any], words: str) -> None:
    with pytest.raises(BadFile, match=words):
        reference.check(graph_of({"op": "torch", **node}), {})


# The known architectures.


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: external.import_torchvision().models.get_model(name, weights=None, num_classes=10, **options)


INCEPTION = {"aux_logits": False, "transform_input": True, "init_weights": False}


@pytest.mark.parametrize(
    ("make", "size", "torch_nodes"),
    [
        pytest.param(vision("squeezenet1_1"), 32, 0, id="squeezenet"),
        pytest.param(vision("resnet18"), 32, 0, id="resnet18", marks=pytest.mark.slow),
        pytest.param(vision("mobilenet_v2"), 32, 0, id="mobilenet_v2", marks=pytest.mark.slow),
        pytest.param(vision("densenet121"), 32, 0, id="densenet121", marks=pytest.mark.slow),
        pytest.param(vision("googlenet", **INCEPTION), 64, 6, id="googlenet", marks=pytest.mark.slow),
        pytest.param(vision("convnext_tiny"), 32, None, id="convnext", marks=pytest.mark.slow),
        pytest.param(vision("efficientnet_b0"), 32, None, id="efficientnet", marks=pytest.mark.slow),
        pytest.param(vision("swin_t"), 32, None, id="swin", marks=pytest.mark.slow),
        pytest.param(vision("vit_b_16", image_size=32), 32, None, id="vit", marks=pytest.mark.slow),
    ],
)
def test_known_architectures_are_captured(make: Callable[[], nn.Module], size: int, torch_nodes: int | None) -> None:
    try:
        model = make()
    except (MissingExtra, ImportError):
        pytest.skip("torchvision is not installed")
    torch.manual_seed(0)
    captured = check(randomised(model), torch.rand(2, 3, size, size))
    assert torch_nodes is None or ops(captured.graph)["torch"] == torch_nodes
