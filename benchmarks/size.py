"""How large a pruned network is on disk: as it usually is stored, and as a compact file.

The network is one of ours with random weights (normal, as wide as the usual initialisation), a random mask with the
counts that a strategy allots, and batch norms folded into biases, which are random too: neither weights nor masks have
any structure that a file could use but the counts. `bound` is what no code can beat on average for such masks, the sum
of log2 C(n, k) bits, with 2 bytes for every kept weight, and the biases. The compact file holds the network's graph
too, and may be smaller all the same: the exponents of weights are not spread evenly over the values of a float16, and
biases of channels that no kept weight reads are left out.
"""

import argparse
import json
import math
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pruned import CLASSES, SHAPE, built, random_masks
from benchmarks.terminal import Parser

import harp
from harp.engine import format
from harp.engine.capture.capture import capture
from harp.engine.graph.nodes import Graph
from harp.engine.store import pack
from harp.errors import HarpError
from harp.pruning.masks import Masks


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table and the JSON object."""
    options = _parser().parse_args(arguments)
    try:
        result = measure(options)
    except HarpError as error:
        print(f"size.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Prune, store in every format, print the table; return the JSON object."""
    graph, tensors, masks = network(options)
    header = {"architecture": {"name": options.model}, "input_shape": list(SHAPE), "classes": CLASSES}
    dense = safetensors.torch.save(tensors)
    ours = {coding: pack(graph, tensors, masks, header, coding, options.others) for coding in ("f32", "f16", "int8")}
    positions = sum(log2_choose(mask.numel(), int(mask.sum())) for mask in masks.values()) / 8
    kept = sum(int(mask.sum()) for mask in masks.values())
    others = sum(tensor.numel() for name, tensor in tensors.items() if name not in masks)
    bound = positions + 2 * kept + others * (4 if options.others == "f32" else 2)
    entries = [entry for entry in format.read_sparse(ours["f16"])[0]["tensors"] if entry["name"] in masks]
    sizes = {
        "dense": len(dense),
        "zlib": len(zlib.compress(dense, 9)),
        "csr": csr(masks) + 4 * others,
        "ours_f32": len(ours["f32"]),
        "ours_f16": len(ours["f16"]),
        "ours_int8": len(ours["int8"]),
        "bound": math.ceil(bound),
    }
    for name, size in sizes.items():
        print(f"{name:<10} {size:>12,} bytes   dense / {len(dense) / size:8.1f}")
    return {
        "benchmark": "size",
        "model": options.model,
        "keep": options.keep,
        "strategy": options.strategy,
        "others": options.others,
        "kept": kept,
        "bytes": sizes,
        "ratio_size": round(len(dense) / sizes["ours_f16"], 2),
        "ratio_to_bound": round(sizes["ours_f16"] / bound, 4),
        "ratio_positions": round(sum(entry.get("index", 0) for entry in entries) / positions, 4),
        "versions": {"harp": harp.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }


def network(options: argparse.Namespace) -> tuple[Graph, dict[str, Tensor], Masks]:
    """A folded network's graph, tensors and masks, from a seed."""
    model = built(options.model, options.width)
    captured = capture(model, torch.rand(2, *SHAPE))
    tensors = captured.tensors(model)
    masks = random_masks(options.model, model, options.keep, options.strategy)
    for name, mask in masks.items():
        tensors[name] = tensors[name].masked_fill(~mask, 0)  # a product would leave negative zeros
    return captured.graph, tensors, masks


def csr(masks: Mapping[str, Tensor]) -> int:
    """Bytes of compressed rows: 4 for the end of every row, 4 for every column, 4 for every value."""
    return sum(4 * (len(mask) + 1) + 8 * int(mask.sum()) for mask in masks.values())


def log2_choose(n: int, k: int) -> float:
    """The bits that it takes to say which k of n."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="size.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A table and, as the last line of standard output, one JSON object.\n"
        "Example: python benchmarks/size.py --model vgg16 --keep 0.01 --strategy uniform",
    )
    parser.add_argument("--model", default="vgg16", help="a name (`harp list models`; default: vgg16)")
    parser.add_argument("--width", type=float, help="factor of the model's width")
    parser.add_argument("--keep", default=0.01, type=float, help="share of the weights (default: 0.01)")
    parser.add_argument(
        "--strategy",
        default="uniform",
        help="counts of the layers: uniform, igq, ..., harp or harp-like (default: uniform)",
    )
    parser.add_argument(
        "--others",
        default="f16",
        choices=("f32", "f16"),
        help="how biases are stored (default: f16, as by harp export)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
