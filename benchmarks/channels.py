"""Structured pruning of known architectures: ours against the torch-pruning package.

For every model: whether its channels can be followed, how long that takes, and which share of what its layers read can
be pruned. Then channels are cut out, and the smaller network is held against the same network with the weights that
read these channels set to zero: they must answer the same. Ours cuts a random third of all channels at once; from
torch-pruning some of its groups are taken, one at a time, a third of each. Where it cuts through a layer norm, its
network is another one: the norm's statistics change.
"""

import copy
import json
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.terminal import Parser, positive

import harp.pruning.channels
from harp import models
from harp.errors import ModelError
from harp.models import external
from harp.pruning import masks as mask_ops
from harp.pruning.channels import Channels
from harp.pruning.channels.verify import difference, perturbed

EQUAL = 1e-5
LIMIT = 60
NAMES = {
    "harp": ["vgg16", "resnet18", "resnet50", "wrn-28-4"],
    "torchvision": [
        "resnet18", "vgg11_bn", "densenet121", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0",
        "convnext_tiny", "regnet_x_400mf", "regnet_y_400mf", "shufflenet_v2_x1_0", "googlenet", "inception_v3",
        "squeezenet1_1", "vit_b_16", "swin_t",
    ],
    "timm": ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet26d"],
}  # fmt: skip


def zoo(wanted: list[str]) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for source, names in NAMES.items():
        for name in names:
            full = name if source == "harp" else f"{source}:{name}"
            if not wanted or full in wanted:
                size = 32 if source == "harp" else 299 if name == "inception_v3" else 224
                torch.manual_seed(0)
                model = models.build(full, num_classes=10, shape=(3, size, size), **_options(name))
                yield full, perturbed(model), torch.rand(1, 3, size, size)


def _options(name: str) -> dict[str, Any]:
    return {"init_weights": False, "aux_logits": False} if name in ("googlenet", "inception_v3") else {}


def readable(model: nn.Module) -> int:
    """How many channels all layers read, but for the images'."""
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and getattr(m, "groups", 1) == 1]
    reads = [m.in_features if isinstance(m, nn.Linear) else m.in_channels for m in layers]
    return sum(reads) - 3


def ours(model: nn.Module, example: Tensor, groups: int) -> dict[str, Any]:
    began = time.process_time()
    try:
        units = Channels(model, example)
    except ModelError as error:
        return {"builds": False, "reason": str(error)}
    seconds = time.process_time() - began
    generator = torch.Generator().manual_seed(0)
    kept = [torch.rand(size, generator=generator) > 1 / 3 for size in units.sizes]
    for mask in kept:
        mask[0] = True
    masks = units.expand(kept)
    masked = copy.deepcopy(model)
    mask_ops.apply(masked, masks)
    small = units.slim(masked, masks)
    images = torch.rand(example.shape, generator=generator)
    with torch.no_grad():
        gap = difference(small(images), masked(images))
    read = sum(int((where >= 0).sum()) for where in units._units)
    return {
        "builds": True,
        "seconds": round(seconds, 2),
        "share": round(read / readable(model), 3),
        "tried": len(units.spaces),
        "equal": len(units.spaces) if gap <= EQUAL else 0,
        "gap": gap,
        "parameters_left": round(_count(small) / _count(model), 3),
    }


def theirs(model: nn.Module, example: Tensor, groups: int) -> dict[str, Any]:
    import torch_pruning

    began = time.process_time()
    try:
        with limited():
            graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=example, verbose=False)
            all_groups = list(graph.get_all_groups(ignored_layers=_last(model)))
    except Exception as error:
        return {"builds": False, "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    seconds = time.process_time() - began
    names = {id(module): name for name, module in model.named_modules()}
    read = {
        (names[id(item.dep.target.module)], index)
        for group in all_groups
        for item in group
        if _reads(item)
        for index in item.idxs
    }
    step = max(1, len(all_groups) // groups)
    results = [_one_group(torch_pruning, model, example, number) for number in range(0, len(all_groups), step)]
    gaps = [gap for gap in results if gap is not None]
    return {
        "builds": True,
        "seconds": round(seconds, 2),
        "share": round(len(read) / readable(model), 3),
        "tried": len(results),
        "equal": sum(gap <= EQUAL for gap in gaps),
        "broken": len(results) - len(gaps),
        "gap": max(gaps, default=None),
    }


@contextmanager
def limited() -> Iterator[None]:
    """Give up after a minute of CPU time: some graphs grow until the memory is full."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {LIMIT} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _one_group(package: Any, model: nn.Module, example: Tensor, number: int) -> float | None:
    """How far a network without a third of one group is off the masked one; None if it doesn't run."""
    small, masked = copy.deepcopy(model), copy.deepcopy(model)
    graph = package.DependencyGraph().build_dependency(small, example_inputs=example, verbose=False)
    group = list(graph.get_all_groups(ignored_layers=_last(small)))[number]
    names = {id(module): name for name, module in small.named_modules()}
    root = group[0]
    indices = list(range(0, len(root.idxs), 3))
    if len(indices) == len(root.idxs):
        return 0.0
    group = graph.get_pruning_group(root.dep.target.module, root.dep.handler, indices)
    with torch.no_grad():
        for item in group:
            if _reads(item):
                layer = masked.get_submodule(names[id(item.dep.target.module)])
                axis = 0 if isinstance(layer, nn.ConvTranspose2d) else 1
                layer.weight.index_fill_(axis, torch.tensor(item.idxs), 0.0)
        try:
            group.prune()
            return difference(small(example), masked(example))
        except Exception:
            return None


def _last(model: nn.Module) -> list[nn.Module]:
    """The layer that gives the answer, which must keep its size."""
    return [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))][-1:]


def _reads(item: Any) -> bool:
    layer = item.dep.target.module
    depthwise = getattr(layer, "groups", 1) > 1
    return (
        isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear))
        and not depthwise
        and "in_channels" in str(item.dep.handler)
    )


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def lines_of(folder: Path, names: list[str]) -> int:
    """Lines of code, without blank ones and comments."""
    files = [
        path for name in names for path in ([folder / name] if name.endswith(".py") else (folder / name).glob("*.py"))
    ]
    rows = [row.strip() for path in files for row in path.read_text(encoding="utf-8").splitlines()]
    return sum(bool(row) and not row.startswith("#") for row in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="channels.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[], help="names as HARP writes them; all by default")
    parser.add_argument("--groups", type=positive, default=8, help="of torch-pruning's groups, about so many a model")
    options = parser.parse_args(arguments)
    known = [name if source == "harp" else f"{source}:{name}" for source, names in NAMES.items() for name in names]
    for name in options.models:
        if name not in known:
            parser.error(f"no model {name!r}: one of {', '.join(known)}")
    torch.set_num_threads(1)
    external._import_torchvision()
    variants: dict[str, Callable[[nn.Module, Tensor, int], dict[str, Any]]] = {"ours": ours}
    own = Path(harp.pruning.channels.__file__).parent
    names = "labels traces operations labelled_run rules tracing forward spaces verify cutting rebuild attention"
    lines = {"ours": lines_of(own, [f"{name}.py" for name in names.split()])}
    try:
        import torch_pruning

        variants["torch-pruning"] = theirs
        package = Path(torch_pruning.__file__).parent
        lines["torch-pruning"] = lines_of(package, ["dependency", "ops.py", "pruner/function.py"])
        print(f"torch-pruning {version('torch-pruning')}")
    except (ImportError, PackageNotFoundError):
        print("torch-pruning is not installed (pip install torch-pruning): ours only")
    print(f"{'model':38}{'way':15}{'builds':>7}{'seconds':>9}{'share':>7}{'equal':>9}{'gap':>9}")
    table = []
    for name, model, example in zoo(options.models):
        for variant, follow in variants.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = {"model": name, "way": variant, **follow(model, example, options.groups)}
            table.append(row)
            if row["builds"]:
                gap = "-" if row["gap"] is None else f"{row['gap']:.0e}"
                equal = f"{row['equal']}/{row['tried']}"
                print(
                    f"{name:38}{variant:15}{'yes':>7}{row['seconds']:9.1f}{row['share']:7.0%}{equal:>9}{gap:>9}",
                    flush=True,
                )
            else:
                print(f"{name:38}{variant:15}{'no':>7}  {row['reason'][:60]}", flush=True)
    versions = {name: version(name) for name in ("torch", "torchvision", "timm")}
    if "torch-pruning" in variants:
        versions["torch-pruning"] = version("torch-pruning")
    print(json.dumps({"rows": table, "lines": lines, "versions": versions, "cpu": platform.processor()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
