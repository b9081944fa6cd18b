"""Checkpoints: tensors on disk, read without running anything that is in them.

Tensors are kept as safetensors. Files of torch are read too, but only tensors and plain values are taken from
them, never objects: what a stranger put in a checkpoint doesn't run. Whatever is wrong with a file is a
`CheckpointError` of one line.
"""

import errno
import hashlib
import os
import pickle
import re
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from harp import seal
from harp.errors import CheckpointError
from harp.files import StrPath, atomic, reason, write_bytes
from harp.normalize import Normalized
from harp.plain import plain_state, size_of

# Under which keys training scripts keep the weights beside other things, the likeliest first.
WRAPPERS = ("state_dict", "model", "net", "model_state_dict", "ema")


def save_tensors(path: StrPath, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors and text as safetensors, atomically. Tensors that share memory are each written in full.

    The format keeps names, not their order.
    """
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(f"can't write {path}: {name!r} is not a dense tensor with values")
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        separate[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    if "__metadata__" in separate:
        raise CheckpointError(f"can't write {path}: a tensor can't be named '__metadata__'")
    try:
        data = safetensors.torch.save(separate, dict(metadata) if metadata else None)
    except Exception as error:  # of several unrelated types, one for each kind of value it can't hold
        raise CheckpointError(f"can't write {path}: {_reason(error)}") from error
    write_bytes(path, data)


def load_tensors(path: StrPath) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its text (nothing but safetensors has any).

    safetensors come back as they were saved. In a torch file, the weights are found inside the usual
    wrappers, and the prefixes of `DataParallel` and `torch.compile` are taken off their names.
    """
    if _is_safetensors(path):
        return _read_safetensors(path)
    found = _unwrapped(path, _read_torch(path))
    return {plain: found[name].detach() for plain, name in _plain_names(found).items()}, {}


def save_model(path: StrPath, model: nn.Module, metadata: Mapping[str, str] | None = None) -> None:
    """Write a model's parameters and buffers as safetensors, atomically."""
    save_tensors(path, model.state_dict(), metadata)


def load_weights(model: nn.Module, path: StrPath) -> None:
    """Load a file's tensors into `model`: all of them, or the model is left as it was.

    Names and shapes must match exactly, and every number must be finite. A `Normalized` model also takes the
    weights of the network inside it. Weights that the model ties may be in the file once or several times.
    """
    tensors, _ = load_tensors(path)
    given = {plain: tensors[name] for plain, name in _plain_names(tensors).items()}
    targets = [model, model.net] if isinstance(model, Normalized) else [model]
    target = min(targets, key=lambda module: len(given.keys() ^ _plain_names(module.state_dict()).keys()))
    own = target.state_dict()
    names = _plain_names(own)
    expected = {plain: own[name] for plain, name in names.items()}
    for group in _tied(expected):
        present = [name for name in group if name in given]
        given |= {name: given[present[0]] for name in group if present and name not in given}
    _check_fit(path, given, expected)
    _check_values(path, given, expected)
    try:
        target.load_state_dict({names[plain]: tensor for plain, tensor in given.items()}, strict=True)
    except Exception as error:  # a model may bring hooks of its own
        raise CheckpointError(f"the model refuses the weights of {path}: {_reason(error)}") from error


def fingerprint(model: nn.Module) -> str:
    """A digest of a network's parameters and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_state(path: StrPath, state: dict[str, Any], before: Callable[[], None] = lambda: None) -> None:
    """Write the state of a training that is to go on later, atomically, and read it back before it takes its place.

    It may hold tensors, numbers, strings, None, lists, tuples and dicts: what `load_state` can read without
    unpickling objects. `before` is called when the new file is known to be good, just before it is `path`.
    """
    try:
        content = plain_state(state, "state")
    except (TypeError, RecursionError) as error:
        raise CheckpointError(f"can't write {path}: {_reason(error)}") from error
    with atomic(path, size_of(content)) as temporary:
        with temporary.open("xb") as file:
            sealed = seal.Sealed(file)
            try:
                torch.save(content, sealed)  # type: ignore[arg-type]  # all that it needs of a file
            except Exception as error:  # a tensor that has no values to save, of several kinds
                raise CheckpointError(f"can't write {path}: {_reason(error)}") from error
            sealed.close()
        if seal.intact(temporary, from_disk=True) is not True:
            raise OSError(errno.EIO, "the disk gives back other bytes than were written")
        before()


def load_state(path: StrPath) -> dict[str, Any]:
    """Read what `save_state` wrote; tensors come back on the CPU."""
    _beginning(path)
    try:
        seal.check(Path(path))
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {_reason(error)}") from error
    state = _read_torch(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not the state of a training")
    return state


def _beginning(path: StrPath) -> bytes:
    """The first bytes of a file that is worth a closer look."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                beginning = file.read(64)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {path}: {_reason(error)}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"can't read {path}: it is a {'directory' if stat.S_ISDIR(mode) else 'device'}")
    if not beginning:
        raise CheckpointError(f"{path} is empty; it should hold a checkpoint")
    if beginning.lstrip()[:1] == b"<":
        raise CheckpointError(f"{path} is a web page, not a checkpoint: the download was probably refused")
    if beginning.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a pointer of Git LFS, not the checkpoint itself: run `git lfs pull`")
    return beginning


def _is_safetensors(path: StrPath) -> bool:
    """By content: eight bytes of length, then JSON; or by name, so that a damaged one is reported as such."""
    return _beginning(path)[8:9] == b"{" or os.fspath(path).endswith(".safetensors")


def _read_safetensors(path: StrPath) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # Cloned, because these are views of the file, which somebody may overwrite while they are used.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
            return tensors, dict(file.metadata() or {})
    except Exception as error:  # the file is a stranger's: anything may go wrong, and it means one thing
        raise CheckpointError(f"{path} is damaged or not safetensors: {_reason(error)}") from error


def _read_torch(path: StrPath) -> object:
    """What a torch file holds, if that is nothing but tensors and plain values."""
    _beginning(path)
    try:
        size = os.path.getsize(path)
        if zipfile.is_zipfile(path):
            _check_archive(path, size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats, which are read all the same
            content: object = torch.load(path, map_location="cpu", weights_only=True)
        _check_sizes(content, size)
    except CheckpointError:
        raise
    except Exception as error:  # the file is a stranger's: anything may go wrong, and it means one thing
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {_reason(error)}") from error
    return content


def _check_archive(path: StrPath, size: int) -> None:
    """torch stores without compressing; an archive that would unpack to more than itself is not torch's."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > size or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(f"{path} is not a checkpoint: an archive of {size} bytes that unpacks to {unpacked}")


def _check_sizes(content: object, size: int) -> None:
    """No tensor may have more elements than the file has bytes for, whatever its header says."""
    pending = [content]
    seen: set[int] = set()  # a file can refer to one list many times over
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_meta:
                raise ValueError("it has a tensor that is sparse or has no values")
            if value.numel() * value.element_size() > size:
                raise ValueError(f"it claims a tensor of shape {list(value.shape)} in {size} bytes")
        elif isinstance(value, (dict, list, tuple)):
            seen.add(id(value))
            pending.extend(value.values() if isinstance(value, dict) else value)


def _unwrapped(path: StrPath, content: object) -> dict[str, Tensor]:
    """The state dict in what a training script saved."""
    for _ in range(3):  # wrappers within wrappers, as in {"state_dict": {"model": ...}}
        if isinstance(content, dict):
            content = next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path} holds a {type(content).__name__} without tensors, not a model's weights")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path} is not a model's weights: {name!r} is a {type(value).__name__}, not a tensor"
            )
    return content


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the prefixes of `torch.compile` and `DataParallel`, and the name it stands for."""
    original = list(names)
    plain = [".".join(part for part in name.split(".") if part != "_orig_mod") for name in original]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    if len(set(plain)) < len(plain):  # then they were no prefixes
        plain = original
    return dict(zip(plain, original, strict=True))


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


def _reason(error: BaseException) -> str:
    """An error's message in one short line."""
    if not isinstance(error, pickle.UnpicklingError):
        return reason(error)
    # torch's advice here is to switch its protection off; ours is not.
    refused = re.search(r"GLOBAL (\S+)", " ".join(str(error).split()))
    if refused:
        return f"it holds a {refused[1]}, and only tensors and plain values are read; save a state_dict"
    return "it can't be read as tensors and plain values"
