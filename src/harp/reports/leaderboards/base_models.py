"""The two base models of the Adversarial Pruning Benchmark, as tables of names and shapes.

A checkpoint that has exactly these tensors loads with `strict=True` into the benchmark's VGG16 and ResNet18 (for 10
classes and 32 x 32 x 3 images, without normalisation). They are the networks `vgg16` and `resnet18` here, but the
tables are written down apart, so that a change of our models shows as one.
"""

from collections.abc import Callable, Iterator

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

_PLAN = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512)  # 0: a pooling


def shapes(architecture: str) -> dict[str, Shape]:
    """The tensors of a base model, by our name of it."""
    return dict(BASES[architecture]())


def _vgg16() -> Named:
    place, channels = 0, 3
    for out in _PLAN:
        if out:
            yield f"features.{place}.weight", (out, channels, 3, 3)
            yield from _norm(f"features.{place + 1}", out)
            channels = out
        place += 3 if out else 1
    for place, (before, after) in zip((0, 2, 4), ((4 * 512, 256), (256, 256), (256, 10)), strict=True):
        yield from _linear(f"classifier.{place}", before, after)


def _resnet18() -> Named:
    yield "conv1.weight", (64, 3, 3, 3)
    yield from _norm("bn1", 64)
    before = 64
    for stage, out in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            yield f"{name}.conv1.weight", (out, before, 3, 3)
            yield from _norm(f"{name}.bn1", out)
            yield f"{name}.conv2.weight", (out, out, 3, 3)
            yield from _norm(f"{name}.bn2", out)
            if before != out:
                yield f"{name}.shortcut.0.weight", (out, before, 1, 1)
                yield from _norm(f"{name}.shortcut.1", out)
            before = out
    yield from _linear("linear", 512, 10)


def _norm(name: str, channels: int) -> Named:
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{part}", (channels,)
    yield f"{name}.num_batches_tracked", ()


def _linear(name: str, before: int, after: int) -> Named:
    yield f"{name}.weight", (after, before)
    yield f"{name}.bias", (after,)


BASES: dict[str, Callable[[], Named]] = {"vgg16": _vgg16, "resnet18": _resnet18}
