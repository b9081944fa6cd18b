"""The weights of a model: written, loaded all or none, and their digest."""

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from harp.errors import CheckpointError
from harp.models import foreign
from harp.models.normalize import Normalized
from harp.models.pretrained import local
from harp.models.tensor_names import Match, best_match, is_constant
from harp.system.files import StrPath
from harp.system.tensors import load_tensors, one_line, plain_names, save_tensors

logger = logging.getLogger("harp")


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

    Names and shapes must match, and every number must be finite. All names may have another prefix than in the model,
    such as `module.` or `1.`, which is said in the log. Constants of normalisation that are not in the file stay as
    the model has them. Weights that the model ties may be in the file once or several times.

    Arguments:
        model: the architecture.
        path: a safetensors file, a checkpoint of torch, or `hf:OWNER/NAME`.

    Example:
        harp.save_model(folder / "model.safetensors", model)
        harp.load_weights(model, folder / "model.safetensors")
    """
    path = local(os.fspath(path))
    tensors, _ = load_tensors(path)
    own = model.state_dict()
    names = plain_names(own)
    expected = {plain: own[name] for plain, name in names.items()}
    found = foreign.evened({plain: tensors[name] for plain, name in plain_names(tensors).items()}, expected)
    match = best_match(found, expected, _tied(expected))
    _check_names(path, found, expected, match)
    given = {name: found[source] for name, source in match.renamed.items()}
    given |= {name: expected[name] for name in match.missing}
    _check_values(path, given, expected)
    inside = isinstance(model, Normalized) and (match.old, match.new) == ("", "net.")
    if match.words and not inside:
        kept = f"; the model's own {', '.join(match.missing)}" if match.missing else ""
        logger.info("%s fits the model %s%s", path, match.words, kept)
    try:
        model.load_state_dict({names[plain]: tensor for plain, tensor in given.items()}, strict=True)
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


def _check_names(path: StrPath, given: Mapping[str, Tensor], expected: Mapping[str, Tensor], match: Match) -> None:
    """Raise an error unless all tensors of a file are tensors of the model, and the other way round."""
    left = [name for name in match.left if not _is_known_constant(name, given, expected)]
    missing = [name for name in match.missing if not (match.words and is_constant(name, expected[name]))]
    misshapen = [name for name, source in match.renamed.items() if given[source].shape != expected[name].shape]
    if not (left or missing or misshapen):
        return
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing (first {missing[0]!r})")
    if left:
        problems.append(f"{len(left)} unexpected (first {left[0]!r})")
    if misshapen:
        first = misshapen[0]
        shapes = f"{list(given[match.renamed[first]].shape)} in the file, {list(expected[first].shape)} in the model"
        problems.append(f"{len(misshapen)} of another shape (first {first!r}: {shapes})")
    cause = _cause(given, expected, match, left, missing, misshapen)
    raise CheckpointError(f"{path} doesn't fit the model: tensors {', '.join(problems)}; {cause}")


def _is_known_constant(name: str, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether this is a constant of normalisation in the file that the model has too, under another name."""
    if not is_constant(name, given[name]):
        return False
    values = given[name].reshape(-1)
    own = (tensor.reshape(-1) for other, tensor in expected.items() if is_constant(other, tensor))
    return any(len(tensor) == len(values) and torch.allclose(tensor.float(), values.float()) for tensor in own)


def _cause(
    given: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    match: Match,
    left: Sequence[str],
    missing: Sequence[str],
    misshapen: Sequence[str],
) -> str:
    """The likely cause of a mismatch."""
    if left and not misshapen and all(is_constant(name, given[name]) for name in left):
        values = "/".join(",".join(f"{x:.4g}" for x in given[name].reshape(-1).tolist()) for name in left)
        return f"the file was trained behind a normalisation that the model does not have: --normalize {values}"
    if missing and not misshapen and all(is_constant(name, expected[name]) for name in missing):
        return "the file was trained without the model's normalisation, or it does not hold it"
    if misshapen and not (left or missing):
        last = list(expected)[-2:]
        if all(name in last for name in misshapen):
            return "the last layer differs: is this the same number of classes, and the same image size?"
        return "the names fit: is this the same width, and the same image size?"
    shapes = [[tuple(tensor.shape) for tensor in tensors.values()] for tensors in (given, expected)]
    if shapes[0] == shapes[1]:
        return "all shapes fit in their order: the same architecture with other names of its layers?"
    if match.words and len(match.renamed) > len(expected) / 2:
        return f"{match.words}, {len(match.renamed)} of {len(expected)} names fit: is this the same architecture?"
    return "is this the same architecture?"


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
