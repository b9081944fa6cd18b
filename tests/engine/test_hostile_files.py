"""Well-formed files with valid checksums and any content: `harp.load` and one call answer or refuse, nothing else."""

import json
import math
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harp.engine.format import coding, reader
from harp.engine.format.reader import BadFile
from harp.engine.graph import reference
from harp.engine.graph.nodes import Node, complete, mentioned, result_shape
from support import victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of a process are those of Linux")

SMALL = st.integers(1, 9)
ANY = st.one_of(
    st.integers(0, 70), st.sampled_from([100, 255, 1000, 4096, 1 << 14, 1 << 18, (1 << 20) - 1, 1 << 20, 1 << 28])
)
ODD = st.one_of(
    st.sampled_from(
        [-1, 0, 1 << 31, 1 << 40, 1 << 63, -(1 << 63), 10**30, 1e300, -1e-300, True, None, "", "x", [], {}]
    ),
    st.sampled_from([{"node": "x"}, {"tensor": "t0"}, {"batch": 1}, {"batch": 1 << 19}, {"dtype": "int64"}]),
    st.sampled_from(
        [{"dtype": "complex64"}, {"dtype": "Tensor"}, {"float": "nan"}, {"float": "-inf"}, {"float": "no"}]
    ),
    st.lists(st.integers(-9, 9), max_size=5),
    ANY,
)
NUMBER = st.one_of(*[SMALL] * 12, ANY)
FLOAT = st.sampled_from([0.0, 1.0, -2.5, 1e-30, 3e38, -3e38, math.nan, math.inf])
POINTWISE = ("relu", "leaky", "clip", "add", "concat", "flatten", "mean", "affine")
CALLS = {
    "aten.gelu.default": (1, 0), "aten.softmax.int": (1, 1), "aten.matmul.default": (2, 0), "aten.cat.default": (0, 2),
    "aten.reshape.default": (1, 1), "aten.permute.default": (1, 1), "aten.pad.default": (1, 3),
    "aten.index.Tensor": (1, 1), "aten.index_select.default": (1, 2), "aten.embedding.default": (2, 1),
    "aten.repeat.default": (1, 1), "aten.expand.default": (1, 1), "aten.slice.Tensor": (1, 4),
    "aten.select.int": (1, 2), "aten.unfold.default": (1, 3), "aten.roll.default": (1, 2),
    "aten.sum.dim_IntList": (1, 2),
    "aten.conv2d.default": (2, 5), "aten.conv1d.default": (2, 5), "aten.conv_transpose2d.input": (2, 6),
    "aten.max_pool2d.default": (1, 5), "aten.avg_pool2d.default": (1, 6), "aten.adaptive_avg_pool2d.default": (1, 1),
    "aten.upsample_nearest2d.default": (1, 3), "aten.upsample_bicubic2d.default": (1, 4),
    "aten.upsample_bilinear2d.vec": (1, 3), "aten.layer_norm.default": (1, 4), "aten.group_norm.default": (1, 4),
    "aten._native_batch_norm_legit_no_training.default": (1, 6), "aten.batch_norm.default": (1, 8),
    "aten.instance_norm.default": (1, 8), "aten.native_group_norm.default": (1, 7),
    "aten.scaled_dot_product_attention.default": (3, 3), "aten.einsum.default": (0, 2), "aten.arange.default": (0, 1),
    "aten.full.default": (0, 2), "aten.zeros.default": (0, 1), "aten.to.dtype": (1, 1), "aten.topk.default": (1, 4),
    "aten.split.Tensor": (1, 2), "aten.im2col.default": (1, 4), "aten.col2im.default": (1, 5),
    "aten.pixel_shuffle.default": (1, 1), "aten.where.self": (3, 0), "aten.pow.Tensor_Tensor": (2, 0),
    "aten.remainder.Tensor": (2, 0), "aten.argmax.default": (1, 1), "aten.cumsum.default": (1, 1),
    "aten.masked_fill.Scalar": (2, 1), "aten.linear.default": (2, 1), "aten.prelu.default": (2, 0),
    "aten.max_unpool2d.default": (2, 1), "aten.empty.memory_format": (0, 1),
}  # fmt: skip


class Forger:
    """Writes a file node by node; what fits is drawn more often than what does not, or little would be computed."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.numbers = draw(st.sampled_from([SMALL, SMALL, NUMBER]))
        self.nodes: list[dict[str, Any]] = []
        self.known: dict[str, Node] = {}
        self.entries: list[dict[str, Any]] = []
        self.data = b""

    def tensor(self, shape: list[int], dtype: str = "float32") -> str:
        """A tensor of any shape with a few entries."""
        shape, name = [max(1, abs(size)) for size in shape], f"t{len(self.entries)}"
        size = min(math.prod(shape), 1 << 40)
        count = self.draw(st.integers(0, min(size, 6)))
        indices = np.array(
            sorted(self.draw(st.sets(st.integers(0, size - 1), min_size=count, max_size=count))), np.int64
        )
        values = np.array([self.draw(FLOAT) for _ in indices])
        with np.errstate(all="ignore"):
            section = coding.positions(indices) + coding.planes(values.astype(dtype))
        index = len(coding.positions(indices))
        entry = {"name": name, "shape": shape, "dtype": dtype, "coding": "plain", "nonzeros": count, "index": index}
        entry |= {"offset": len(self.data), "length": len(section), "crc": zlib.crc32(section)}
        self.entries.append(entry)
        self.data += section
        return name

    def add(self, op: str, inputs: list[str], shape: list[int] | None = None, **more: Any) -> None:
        """A node, known to others if its shape can be found."""
        name = f"n{len(self.nodes)}"
        entry = {"op": op, "name": name, "inputs": inputs, **more} | ({"shape": shape} if shape else {})
        self.nodes.append(entry)
        attributes = complete(op, more.get("attributes", {}))
        try:
            follows = result_shape(op, attributes, [self.known[name].shape for name in inputs])
        except (BadFile, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
            return
        self.known[name] = Node(name, op, tuple(inputs), follows or tuple(shape or ()), {}, attributes)

    def some(self) -> str:
        return self.draw(st.sampled_from(list(self.known)))

    def pair(self) -> list[int]:
        return [self.draw(self.numbers), self.draw(self.numbers)]

    def layer(self) -> None:
        """A convolution or a linear layer whose shape is right if there is any."""
        source = self.some()
        given = self.known[source].shape
        outputs = max(1, self.draw(self.numbers))
        if len(given) != 3:
            tensors = {"weight": self.tensor([outputs, given[0] if given else 1])}
            self.add("linear", [source], [outputs], tensors=tensors)
            return
        groups = self.draw(st.sampled_from([1, 1, given[0], self.draw(self.numbers)])) or 1
        kernel, stride, padding, dilation = ([max(1, size) for size in self.pair()] for _ in range(4))
        if self.draw(st.booleans()):
            stride = [1, 1]
        if self.draw(st.booleans()):
            padding = [step * (size - 1) // 2 for step, size in zip(dilation, kernel, strict=True)]
        if self.draw(st.integers(0, 5)):  # windows that fit
            room = [
                (length + 2 * pad - 1) // far + 1 for length, pad, far in zip(given[1:], padding, dilation, strict=True)
            ]
            kernel = [min(size, most) for size, most in zip(kernel, room, strict=True)]
        windows = zip(given[1:], kernel, stride, padding, dilation, strict=True)
        size = [(length + 2 * pad - far * (tall - 1) - 1) // step + 1 for length, tall, step, pad, far in windows]
        outputs = max(1, outputs // groups) * groups
        tensors = {"weight": self.tensor([outputs, max(1, given[0] // groups), *kernel])}
        if self.draw(st.booleans()):
            tensors["bias"] = self.tensor([outputs])
        how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        self.add("conv", [source], [outputs, *(max(1, length) for length in size)], tensors=tensors, attributes=how)

    def pool(self) -> None:
        op, source = self.draw(st.sampled_from(["maxpool", "avgpool"])), self.some()
        kernel, stride = ([max(1, size) for size in self.pair()] for _ in range(2))
        given = self.known[source].shape
        if len(given) == 3 and self.draw(st.integers(0, 5)):
            kernel = [min(length, size) for length, size in zip(kernel, given[1:], strict=True)]
        how: dict[str, Any] = {"kernel": kernel, "stride": stride, "ceil": self.draw(st.booleans())}
        how["padding"] = [self.draw(st.sampled_from([0, length // 2])) for length in kernel]
        if op == "maxpool" and self.draw(st.booleans()):
            how["dilation"] = [max(1, size) for size in self.pair()]
        self.add(op, [source], attributes=how)

    def plain(self) -> None:
        op = self.draw(st.sampled_from(POINTWISE))
        inputs = [self.some() for _ in range({"add": 2, "concat": self.draw(st.integers(1, 4))}.get(op, 1))]
        if op == "add" and self.draw(st.booleans()):
            inputs = inputs[:1] * 2
        how: dict[str, Any] = {}
        if op == "clip":
            how = {"low": self.draw(st.floats(-3, 0)), "high": self.draw(st.floats(0, 1e30))}
        if op == "affine":
            channels = (self.known[inputs[0]].shape or (1,))[0]
            self.add(op, inputs, tensors={"scale": self.tensor([channels]), "shift": self.tensor([channels])})
            return
        self.add(op, inputs, **({"attributes": how} if how else {}))

    def call(self) -> None:
        """A call of torch, with the shape that torch gives it where it takes the arguments.

        What is drawn after it must not depend on that shape, or examples could not be drawn again.
        """
        op = self.draw(st.sampled_from(list(CALLS)))
        first, rest = CALLS[op]
        args = [self.reference() for _ in range(first)]
        args += [self.draw(st.one_of(ODD, st.builds(self.reference))) for _ in range(self.draw(st.integers(0, rest)))]
        attributes = complete("torch", {"op": op, "args": args})
        if self.draw(st.booleans()) and ("norm" in op or "topk" in op or "split" in op):
            attributes["pick"] = self.draw(st.integers(0, 3))
        name = f"n{len(self.nodes)}"
        shape = self.draw(st.lists(NUMBER, max_size=4))
        inputs = mentioned(attributes, "node")
        node = Node(name, "torch", inputs, (), {}, attributes)
        few = [entry for entry in self.entries if math.prod(entry["shape"]) < 1 << 40]
        types = {entry["name"]: reference.dtype(entry["dtype"]) for entry in few}
        shells = {
            entry["name"]: torch.empty(entry["shape"], dtype=types[entry["name"]], device="meta") for entry in few
        }
        try:
            given = [torch.empty(3, *self.known[name].shape, device="meta") for name in inputs]
            result = reference.step(node, given, shells, torch.empty(3, device="meta"))
            sizes = list(result.shape)
            shape = sizes[1:] if sizes[0] == 3 else [-1 if size == 3 else size for size in sizes]
        except Exception:  # then the file is wrong, which is as good
            pass
        self.known[name] = Node(name, "torch", inputs, tuple(shape), {}, attributes)
        self.nodes.append({"op": "torch", "name": name, "shape": shape, "attributes": attributes})

    def reference(self) -> Any:
        if self.draw(st.integers(0, 3)) or not self.known:
            return {"node": self.some()}
        dtype = self.draw(st.sampled_from(["float32", "float64", "int64", "bool", "uint8"]))
        return {"tensor": self.tensor(self.draw(st.lists(st.integers(1, 5), max_size=4)), dtype)}


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a JSON value something is."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(item, (*path, key))


@st.composite
def forged(draw: st.DrawFn) -> bytes:
    forger = Forger(draw)
    shape = draw(st.one_of(st.tuples(SMALL, SMALL, SMALL), st.tuples(SMALL), st.tuples(SMALL, ANY, ANY)))
    forger.add("input", [], [max(1, size) for size in shape])
    del forger.nodes[0]["inputs"]
    forger.nodes[0]["name"] = "x"
    forger.known = {"x": forger.known.pop("n0")}
    makers = [forger.layer, forger.layer, forger.pool, forger.plain, forger.plain]
    for _ in range(draw(st.integers(0, 6))):
        draw(st.sampled_from(makers))()
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        forger.call()
    last, after = next(reversed(forger.known)), draw(st.sampled_from(["", "relu", "flatten", "mean"]))
    if after:
        forger.nodes.append({"op": after, "name": "last", "inputs": [last]})
    graph: dict[str, Any] = {"nodes": forger.nodes, "output": "last" if after else last}
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 2]))):
        places = list(paths(graph))[1:]
        *path, key = places[draw(st.integers(0, 9999)) % len(places)]
        inner: Any = graph
        for step in path:
            inner = inner[step]
        inner[key] = draw(ODD)
        graph = json.loads(json.dumps(graph))
    header = json.dumps({"tensors": forger.entries, "graph": graph}).encode()
    start = reader.PRELUDE.pack(b"HARP", 1, 0, len(header), 24 + len(header) + len(forger.data), 0)[:-4]
    return start + zlib.crc32(header, zlib.crc32(start)).to_bytes(4, "little") + header + forger.data


class Victim:
    """The other process, started again where it was killed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.answers = self.calls = 0

    def asked(self, content: bytes) -> str:
        if self.process is None:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen([sys.executable, victim.__file__], text=True, **pipes)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(content.hex() + "\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline().strip()
        self.calls += 1
        self.answers += said.startswith("answer")
        if not said:
            said, self.process = f"defect: it was ended by {-self.process.wait()}", None
        return said

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()
            self.process = None


@pytest.fixture(scope="module")
def other_process() -> Iterator[Victim]:
    started = Victim()
    yield started
    started.close()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=forged())
def test_any_file_gives_an_answer_or_is_refused(content: bytes, other_process: Victim) -> None:
    said = other_process.asked(content)
    assert said.startswith(("answer", "refused")), f"{said}\n{content!r}"


def test_some_of_these_files_can_be_computed(other_process: Victim) -> None:
    assert other_process.answers >= other_process.calls / 10
