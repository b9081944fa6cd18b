"""The networks HARP knows by name, and `build`, which makes one of them or one of yours.

Every model maps images in [0, 1] to logits, and knows nothing of training or pruning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harp.errors import ModelError
from harp.models import external, input_size, preact_resnet, resnet, small, swish, vgg, weights, wide_resnet, zoo
from harp.models.modes import evaluating
from harp.models.normalize import Normalized
from harp.models.pretrained import fetched, has_weights, local, written_out

__all__ = [
    "MODELS",
    "ModelEntry",
    "Normalized",
    "agreement",
    "build",
    "expected_size",
    "external",
    "fetched",
    "has_weights",
    "inputs",
    "local",
    "modes",
    "normalize",
    "source_file",
    "usual",
    "weights",
    "written_out",
    "zoo",
]


@dataclass(frozen=True)
class ModelEntry:
    """A network of the table: what makes it, and one line about it."""

    factory: Callable[..., nn.Module]
    description: str
    classes: int = 10  # what it is usually built for, where no data set says it
    shape: tuple[int, int, int] = (3, 32, 32)


_IMAGENET = (1000, (3, 224, 224))

MODELS: dict[str, ModelEntry] = {
    "vgg16": ModelEntry(vgg.vgg16, "VGG16 with batch norm for 32x32 images, as in the HARP paper (15.3 M weights)"),
    "resnet18": ModelEntry(resnet.resnet18, "ResNet-18 for 32x32 images, as in the HARP paper (11.2 M weights)"),
    "resnet50": ModelEntry(resnet.resnet50, "ResNet-50 for ImageNet (25.5 M weights)", *_IMAGENET),
    "wrn-28-4": ModelEntry(wide_resnet.wrn_28_4, "WideResNet-28-4 for 32x32 images (5.8 M weights)"),
    "wrn-28-10": ModelEntry(wide_resnet.wrn_28_10, "WideResNet-28-10 for 32x32 images (36.5 M weights)"),
    "wrn": ModelEntry(wide_resnet.wrn, "WideResNet of any depth and widen factor, by default 34 and 10"),
    "preact-resnet18": ModelEntry(preact_resnet.preact_resnet18, "pre-activation ResNet-18 (11.2 M weights)"),
    "swish-preact-resnet18": ModelEntry(
        swish.swish_preact_resnet18, "the same with Swish and 3x3 shortcuts, as Gowal 2021 (12.6 M weights)"
    ),
    "swish-wrn": ModelEntry(swish.swish_wrn, "WideResNet with Swish, by default of depth 28 and widen factor 10"),
    "vgg8": ModelEntry(small.vgg8, "a small VGG, five convolutions (0.7 M weights)"),
    "resnet8": ModelEntry(small.resnet8, "a small ResNet, three blocks (0.1 M weights)"),
    "convnet": ModelEntry(small.convnet, "four convolutions and two linear layers for small grey images"),
    "tinynet": ModelEntry(small.tinynet, "four strided convolutions, two linear layers: the quickest on a CPU"),
}


def usual(spec: str) -> tuple[int, tuple[int, int, int]]:
    """The classes and image shape that a model is usually built for, where no data set says it."""
    if spec in MODELS:
        return MODELS[spec].classes, MODELS[spec].shape
    if (name := zoo.name_in(spec)) is not None:
        facts = zoo.card(name)
        return facts["classes"], tuple(facts["shape"])
    return _IMAGENET if spec.startswith(("torchvision:", "timm:")) else (10, (3, 32, 32))


def expected_size(spec: str, num_classes: int, options: Mapping[str, Any]) -> int | None:
    """The side of the images that a model is made for; None if it takes images of any size, or nothing says it."""
    if spec in MODELS:
        return MODELS[spec].shape[1]
    library, _, name = spec.partition(":")
    if library == "torchvision":
        return input_size.of_torchvision(name)
    if library == "timm":
        return input_size.of_timm(name, options)
    with external.importable(spec):
        return input_size.of_module(lambda shape: _construct(spec, num_classes, shape, dict(options)))


def source_file(spec: str) -> str | None:
    """The Python file that a spec names, if it names one."""
    path, colon, _ = spec.rpartition(":")
    return path if colon and path.endswith(".py") else None


def build(
    spec: str,
    *,
    num_classes: int,
    shape: tuple[int, int, int],
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    **options: Any,
) -> nn.Module:
    """Make the model that `spec` names, for images of `shape` (channels, height, width).

    `spec` is a name in `MODELS`, `torchvision:NAME`, `timm:NAME`, `robustbench:NAME:FILE`, `hf:OWNER/NAME`,
    `zoo:NAME` or `path/to/file.py:function`; a file is Python code, and it runs. `normalize` is (mean, std) per
    channel, which goes inside the model. `options` go to the model's factory. The weights come from torch's random
    generator, which the caller seeds and which is left as construction leaves it. Raises `ModelError` for anything that
    doesn't give `num_classes` finite logits an image.

    Arguments:
        spec: which model.
        num_classes: the number of logits.
        shape: channels, height and width of an image.
        normalize: mean and standard deviation of each channel, or one for all; None: none.
        options: of the factory.

    Example:
        model = harp.build_model("tinynet", num_classes=10, shape=(1, 28, 28))
    """
    _check_data(num_classes, shape)
    given = written_out(spec)
    if given is not None:
        return _pretrained(spec, given, num_classes, shape, normalize, options)
    with external.importable(spec):
        model = _construct(spec, num_classes, shape, options)
        if normalize is not None:
            mean, std = normalize
            if len(mean) not in (1, shape[0]):
                raise ModelError(f"normalisation is for {len(mean)} channels, the data has {shape[0]}")
            model = Normalized(model, mean, std)
        _check_logits(model, spec, num_classes, shape)
    return model


def _pretrained(
    spec: str, given: dict[str, Any], classes: int, shape: tuple[int, int, int], normalize: object, options: object
) -> nn.Module:
    if normalize is not None or options:
        raise ModelError(f"{spec} has its own normalisation and options: give none")
    name, file = given.pop("name"), given.pop("weights")
    model = build(name, num_classes=classes, shape=shape, **given)
    weights.load_weights(model, file)
    return model


def _check_data(num_classes: int, shape: tuple[int, int, int]) -> None:
    if type(num_classes) is not int or num_classes < 1:
        raise ModelError(f"num_classes is {num_classes!r}; it must be a whole number from 1 up")
    if len(shape) != 3 or not all(type(size) is int and size > 0 for size in shape):
        raise ModelError(f"shape is {shape!r}; it must be (channels, height, width), like (3, 32, 32)")


def _construct(spec: str, num_classes: int, shape: tuple[int, int, int], options: dict[str, Any]) -> nn.Module:
    if spec in MODELS:
        with external.explained(f"can't build {spec}"):
            model: nn.Module = external.call(MODELS[spec].factory, spec, num_classes, shape, options)
            return model
    library, _, name = spec.partition(":")
    if library == "torchvision":
        return external.from_torchvision(name, num_classes, shape, options)
    if library == "timm":
        return external.from_timm(name, num_classes, shape, options)
    file = external.file_of(spec)
    if file is not None:
        return external.from_file(file, spec, num_classes, shape, options)
    known = [*MODELS, "torchvision:", "timm:", "robustbench:", "hf:"]
    raise ModelError(
        f"there is no model {spec!r}{external.nearest(spec, known)}: "
        f"HARP has {', '.join(MODELS)}; torchvision:NAME, timm:NAME, robustbench:NAME:FILE, "
        "hf:OWNER/NAME and path/to/file.py:function work too"
    )


def _check_logits(model: nn.Module, spec: str, num_classes: int, shape: tuple[int, int, int]) -> None:
    """Check one forward pass, before hours of training."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    images = torch.linspace(0, 1, 2 * shape[0] * shape[1] * shape[2], device=device).view(2, *shape)
    problem = external.explained(f"{spec} fails on a batch of shape {[2, *shape]}", external.file_of(spec))
    # A model may draw random numbers even in eval mode: the check must not change the random state of the caller.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), problem, evaluating(model):
        logits: object = model(images)
    if not isinstance(logits, Tensor):
        raise ModelError(f"{spec} gives a {type(logits).__name__}, not a tensor of logits")
    if logits.dim() != 2 or len(logits) != 2:
        shapes = f"{list(logits.shape)} for two images; logits have shape [2, {num_classes}]"
        raise ModelError(f"{spec} gives shape {shapes}")
    if logits.shape[1] != num_classes:
        counts = f"{logits.shape[1]} logits, the data has {num_classes} classes"
        raise ModelError(f"{spec} gives {counts}: pass num_classes on to the model")
    if not logits.is_floating_point() or not bool(logits.isfinite().all()):
        raise ModelError(f"{spec} gives logits that are not finite numbers, for images between 0 and 1")
