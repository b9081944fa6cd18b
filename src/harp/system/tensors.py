"""Tensors on disk, loaded without running code from the file.

Tensors are saved as safetensors. Files of torch are read too, but only tensors and plain values are loaded from them,
never objects, so an untrusted checkpoint can't run code. Every problem with a file raises a `CheckpointError` with a
message of one line.
"""

import errno
import logging
import os
import pickle
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from harp.errors import CheckpointError
from harp.system import digest, pickle_scan
from harp.system.files import StrPath, atomic, reason, write_bytes

logger = logging.getLogger("harp")

# Keys under which training scripts save the weights, the most likely first.
_WRAPPERS = (
    "state_dict",
    "model",
    "net",
    "model_state_dict",
    "ema",
    "model_ema",
    "ema_state_dict",
    "state_dict_ema",
    "module",
)
# What a pickle of tensors and plain values may name, beside storages and types.
_NAMES = frozenset(
    {
        ("__builtin__", "set"),
        ("_codecs", "encode"),
        ("builtins", "set"),
        ("collections", "Counter"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_parameter_with_state"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.serialization", "_get_layout"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "UntypedStorage"),
    }
)
_OLD_PICKLES = 5  # at the start of a file of torch before 1.6, before the numbers
# Exact types, because a subclass pickles as a class (numpy's float64 is a subclass of float).
_PLAIN = (bool, int, float, str, type(None))


def save_tensors(path: StrPath, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors and text as safetensors, atomically. Tensors that share memory are written separately.

    The format does not keep the order of the names.
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
    except Exception as error:  # safetensors raises several unrelated types for unsupported values
        raise CheckpointError(f"can't write {path}: {one_line(error)}") from error
    write_bytes(path, data)


def load_tensors(path: StrPath) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its text metadata (only safetensors has any).

    safetensors are returned as they were saved. In a torch file, the weights are searched inside the usual wrappers,
    and the prefixes of `DataParallel` and `torch.compile` are removed from their names.
    """
    if _is_safetensors(path):
        return _read_safetensors(path)
    tensors = _unwrapped(path, _read_torch(path))
    return {plain: tensors[name].detach() for plain, name in plain_names(tensors).items()}, {}


def save_state(path: StrPath, state: dict[str, Any], before: Callable[[], None] = lambda: None) -> None:
    """Write the state of a training atomically, and verify the new file before it replaces the old one.

    A state may hold tensors, numbers, strings, None, lists, tuples and dicts: everything that `load_state` can read
    without unpickling objects. `before` is called after the verification, just before the new file becomes `path`.
    """
    try:
        content = _plain_state(state, "state")
    except (TypeError, RecursionError) as error:
        raise CheckpointError(f"can't write {path}: {one_line(error)}") from error
    with atomic(path, _size_of(content)) as temporary:
        with temporary.open("xb") as file:
            sealed = digest.Sealed(file)
            try:
                torch.save(content, sealed)  # type: ignore[arg-type]  # it needs no other methods of a file
            except Exception as error:  # torch raises several types for tensors that can't be saved
                raise CheckpointError(f"can't write {path}: {one_line(error)}") from error
            sealed.close()
        if digest.intact(temporary, from_disk=True) is not True:
            raise OSError(errno.EIO, "the disk gives back other bytes than were written")
        before()


def _plain_state(value: object, where: str) -> object:
    """`value` in plain containers; a TypeError says where it is not plain.

    A tensor that is a view of a larger one is copied, because the file would hold all of the larger one otherwise.
    """
    if isinstance(value, Tensor):
        tensor = value.detach()
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(f"{where} is not a dense tensor with values")
        fills_storage = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return tensor if fills_storage else tensor.clone()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        for key in value:
            if type(key) not in _PLAIN:
                raise TypeError(f"{where} has the key {key!r}; keys are numbers or strings")
        return {key: _plain_state(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        items = [_plain_state(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise TypeError(f"{where} is a {type(value).__name__}; only tensors, numbers, strings, lists and dicts are kept")


def _size_of(value: object) -> int:
    """The approximate size of a plain state in a file, in bytes."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() + 500  # for its name and position
    if isinstance(value, dict):
        return sum(map(_size_of, value.values()))
    return sum(map(_size_of, value)) if isinstance(value, (list, tuple)) else 20


def load_state(path: StrPath) -> dict[str, Any]:
    """Read a state that `save_state` wrote; its tensors are on the CPU."""
    _first_bytes(path)
    try:
        damaged = digest.intact(Path(path)) is False
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {one_line(error)}") from error
    if damaged:
        raise CheckpointError(f"{path} is damaged: it is not what was written, by the digest at its end")
    state = _read_torch(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not the state of a training")
    return state


def _first_bytes(path: StrPath) -> bytes:
    """The first bytes of a file; raises `CheckpointError` for files that are clearly not checkpoints."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                first = file.read(64)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {path}: {one_line(error)}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"can't read {path}: it is a {'directory' if stat.S_ISDIR(mode) else 'device'}")
    if not first:
        raise CheckpointError(f"{path} is empty; it should hold a checkpoint")
    if first.lstrip()[:1] == b"<":
        raise CheckpointError(f"{path} is a web page, not a checkpoint: the download was probably refused")
    if first.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a pointer of Git LFS, not the checkpoint itself: run `git lfs pull`")
    return first


def _is_safetensors(path: StrPath) -> bool:
    """Whether a file starts like safetensors (eight bytes of length, then JSON) or has its suffix.

    With the suffix, a damaged file is reported as damaged safetensors.
    """
    return _first_bytes(path)[8:9] == b"{" or os.fspath(path).endswith(".safetensors")


def _read_safetensors(path: StrPath) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # Cloned, because these are views of the file, which may be overwritten while they are in use.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
            return tensors, dict(file.metadata() or {})
    except Exception as error:  # an untrusted file can raise any error
        raise CheckpointError(f"{path} is damaged or not safetensors: {one_line(error)}") from error


def _read_torch(path: StrPath) -> object:
    """The content of a torch file that holds only tensors and plain values."""
    try:
        size = os.path.getsize(path)
        if zipfile.is_zipfile(path):
            _check_archive(path, size)
        else:
            with open(path, "rb") as file:
                for _ in range(_OLD_PICKLES):
                    _check_pickle(path, file, size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats, which can still be read
            content: object = torch.load(path, map_location="cpu", weights_only=True)
        _check_sizes(content, size)
    except CheckpointError:
        raise
    except Exception as error:  # an untrusted file can raise any error
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {one_line(error)}") from error
    return content


def _check_archive(path: StrPath, size: int) -> None:
    """Refuse a compressed archive, which may unpack to any size (torch does not compress), and check its pickles."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        if unpacked > size or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise CheckpointError(f"{path} is not a checkpoint: an archive of {size} bytes that unpacks to {unpacked}")
        for entry in entries:
            if entry.filename.lower().endswith(".pkl"):
                _check_pickle(path, archive.read(entry), size)


def _check_pickle(path: StrPath, data: bytes | IO[bytes], size: int) -> None:
    """Refuse a pickle that names more than plain tensors need: torch would call some functions that allocate."""
    for module, name in sorted(pickle_scan.globals_of(data, size)):
        storage = module in ("torch", "torch.cuda") and name.endswith("Storage")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (storage or dtype or (module, name) in _NAMES):
            held = f"it holds a {module}.{name}, and only tensors and plain values are read; save a state_dict"
            raise CheckpointError(f"{path} is damaged or not a checkpoint: {held}")


def _check_sizes(content: object, size: int) -> None:
    """Refuse tensors that are larger than the file."""
    pending = [content]
    seen: set[int] = set()  # a file can refer to the same list many times
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
    """The state dict inside the content of a checkpoint."""
    for _ in range(3):  # wrappers may be nested, as in {"state_dict": {"model": ...}}
        keys = [key for key in _WRAPPERS if isinstance(content.get(key), dict)] if isinstance(content, dict) else []
        if isinstance(content, dict) and keys:
            if len(keys) > 1:
                logger.info("%s: the weights are those of %r, not of %s", path, keys[0], ", ".join(map(repr, keys[1:])))
            content = content[keys[0]]
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path} holds a {type(content).__name__} without tensors, not a model's weights")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path} is not a model's weights: {name!r} is a {type(value).__name__}, not a tensor"
            )
    return content


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """A mapping from names without the prefixes of `torch.compile` and `DataParallel` to the original names."""
    original = list(names)
    plain = [".".join(part for part in name.split(".") if part != "_orig_mod") for name in original]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    if len(set(plain)) < len(plain):  # not unique: these parts of the names are not prefixes
        plain = original
    return dict(zip(plain, original, strict=True))


def one_line(error: BaseException) -> str:
    """The message of an error in one short line."""
    if not isinstance(error, pickle.UnpicklingError):
        return reason(error)
    # torch's message advises to switch off weights_only, which is unsafe.
    return "it can't be read as tensors and plain values"
