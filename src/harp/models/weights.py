"""The weights of a model: written, loaded all or none, and their digest."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from harp.errors import CheckpointError
from harp.models.normalize import Normalized
from harp.system.files import StrPath
from harp.system.tensors import load_tensors, one_line, plain_names, save_tensors


def save_model(path: StrPath, model: nn.Module, metadata: Mapping[str, str] | None = None) -> None:
    """Write a model's parameters and buffers as safetensors, atomically.

    Arguments:
        path: the file.
        model: whose tensors are written.
        metadata: texts that go into the file.

    Example:
        harp.save_model(folder / "model.safetensors", model)
    """
    save_tensors(path, model.state_dict(), metadata)


def load_weights(model: nn.Module, path: StrPath) -> None:
    """Load a file's tensors into `model`: all of them, or the model is left as it was.

    Names and shapes must match exactly, and every number must be finite. A `Normalized` model also takes the
    weights of the network inside it. Weights that the model ties may be in the file once or several times.

    Arguments:
        model: the architecture.
        path: a safetensors file, or a checkpoint of torch.

    Example:
        harp.save_model(folder / "model.safetensors", model)
        harp.load_weights(model, folder / "model.safetensors")
    """
    tensors, _ = load_tensors(path)
    given = {plain: tensors[name] for plain, name in plain_names(tensors).items()}
    targets = [model, model.net] if isinstance(model, Normalized) else [model]
    target = min(targets, key=lambda module: len(given.keys() ^ plain_names(module.state_dict()).keys()))
    own = target.state_dict()
    names = plain_names(own)
    expected = {plain: own[name] for plain, name in names.items()}
    for group in _tied(expected):
        present = [name for name in group if name in given]
        given |= {name: given[present[0]] for name in group if present and name not in given}
    _check_fit(path, given, expected)
    _check_values(path, given, expected)
    try:
        target.load_state_dict({names[plain]: tensor for plain, tensor in given.items()}, strict=True)
    except Exception as error:  # a model may bring hooks of its own
        raise CheckpointError(f"the model refuses the weights of {path}: {one_line(error)}") from error


def fingerprint(model: nn.Module) -> str:
    """A digest of a network's parameters and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tied(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The groups of names that stand for one and the same weight."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            groups.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _check_fit(path: StrPath, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in given]
    unexpected = [name for name in given if name not in expected]
    misshapen = [name for name in expected if name in given and given[name].shape != expected[name].shape]
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing (first {missing[0]!r})")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected (first {unexpected[0]!r})")
    if misshapen:
        first = misshapen[0]
        shapes = f"{list(given[first].shape)} in the file, {list(expected[first].shape)} in the model"
        problems.append(f"{len(misshapen)} of another shape (first {first!r}: {shapes})")
    if problems:
        raise CheckpointError(
            f"{path} doesn't fit the model: tensors {', '.join(problems)}; is this the same architecture?"
        )


def _check_values(path: StrPath, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in given.items():
        dtype = expected[name].dtype
        if tensor.is_complex() != dtype.is_complex or tensor.is_floating_point() != dtype.is_floating_point:
            raise CheckpointError(f"{path} has {name!r} as {tensor.dtype}, the model has it as {dtype}")
        # As the model will hold it: a large float64 is finite only until it becomes a float32.
        if not bool(tensor.to(dtype).isfinite().all()):
            raise CheckpointError(f"{path} has NaN or infinite numbers in {name!r}")
    for first, *others in _tied(expected):
        for name in others:
            if not torch.equal(given[name], given[first]):
                raise CheckpointError(f"{path} has {first!r} and {name!r} apart, which the model ties together")
