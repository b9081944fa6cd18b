"""Atomic writes, locks and JSON files."""

import contextlib
import errno
import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harp.errors import CheckpointError, DiskError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module has no optional type

StrPath = str | os.PathLike[str]

HOST = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:32] or "host"
"""The name of this machine in the names of temporary files."""

_ABANDONED = 24 * 3600.0  # seconds after which a temporary file of another machine counts as left over


@contextlib.contextmanager
def atomic(path: StrPath, size: int | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces `path` if the block succeeds.

    `path` is always either the old file or the complete new one, even if the process is killed or the power fails.
    Missing folders are created, links are followed, and temporary files of killed processes are removed. The temporary
    file is named after the machine and the process, so only one thread of a process may write to a path at a time. An
    error of the system becomes a `DiskError`; if the disk is full, it reports `size`, the number of bytes to write.
    """
    if "\0" in os.fspath(path):
        raise CheckpointError(f"can't write {os.fspath(path)!r}: a path can't have a null character in it")
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{HOST}.{os.getpid()}.tmp")
    try:
        _prepare(target, temporary)
        try:
            yield temporary
            _sync(temporary)
            if target.exists():
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        space = _disk_space(error, target, size)
        raise DiskError(f"can't write {path}: {reason(error)}{space}", full=full(error)) from error
    # The file is in place. Some file systems can't sync a folder, which is not an error.
    with contextlib.suppress(OSError):
        _sync(target.parent)


def write_bytes(path: StrPath, data: bytes | memoryview) -> None:
    """Write bytes, atomically."""
    with atomic(path, len(data)) as temporary, temporary.open("xb") as file:
        file.write(data)


def write_text(path: StrPath, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    # Undecodable bytes of a file name become escapes, from which JSON restores them exactly.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: StrPath, value: object) -> None:
    """Write `value` as JSON, atomically. JSON has no NaN or infinity: they become null."""
    try:
        text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"can't write {path}: {reason(error)}") from error
    write_text(path, text + "\n")


def full(error: OSError) -> bool:
    """Whether the disk or the quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def remove(path: Path) -> None:
    """Remove a file if it exists, and the temporary files that killed processes left of it."""
    path.unlink(missing_ok=True)
    if path.parent.is_dir():
        _remove_temporaries(path)


def _prepare(target: Path, temporary: Path) -> None:
    """Create the folder and remove old temporary files; refuse targets that `os.replace` would silently replace."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        if not target.is_file() and not target.is_dir():
            raise OSError(errno.EINVAL, "it is a device, not a file")
        os.close(os.open(target, os.O_WRONLY))  # raises for a folder, or if it is read-only
    temporary.unlink(missing_ok=True)
    _remove_temporaries(target)


def _disk_space(error: OSError, target: Path, size: int | None) -> str:
    """If the disk is full: how much space is needed, and how much is free."""
    if not full(error):
        return ""
    sizes = [] if size is None else [f"{amount(size)} needed"]
    if error.errno == errno.ENOSPC:  # not for a quota, which may leave less than the free space of the disk
        with contextlib.suppress(OSError):
            sizes.append(f"{amount(shutil.disk_usage(target.parent).free)} free")
    return f" ({', '.join(sizes)})" if sizes else ""


def existing(path: Path) -> Path:
    """The path, or its nearest parent folder that exists."""
    return next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())


def amount(size: float) -> str:
    """A number of bytes as readable text."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} bytes"


def _remove_temporaries(target: Path) -> None:
    """Remove the temporary files of `target` whose processes have ended, and old ones of other machines."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"([A-Za-z0-9-]+)\.(\d{1,9})\.tmp")
    for name in os.listdir(target.parent):
        match = pattern.fullmatch(name)
        if match is None:
            continue
        file = target.with_name(name)
        with contextlib.suppress(OSError):
            this_host = match[1] == HOST
            if not _alive(int(match[2])) if this_host else time.time() - file.stat().st_mtime > _ABANDONED:
                file.unlink()


def _alive(pid: int) -> bool:
    if os.name == "nt":
        return True  # on Windows every signal would end the process
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lock(path: StrPath, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Lock a path against other processes; `waiting` is called repeatedly while another process holds the lock.

    The system releases the lock when the process ends. There is no locking on Windows and on file systems without it.
    """
    descriptor = None if fcntl is None else _acquire(Path(path), waiting)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)  # while locked: a process that has opened the file notices this and opens it again
            os.close(descriptor)


def _acquire(path: Path, waiting: Callable[[], None]) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise DiskError(f"can't write {path}: {reason(error)}") from error
        try:
            while not _try_lock(descriptor):
                waiting()
                time.sleep(0.2)  # polling instead of a blocking lock, so that Ctrl-C is handled
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous holder has removed this file: lock the one that is there now


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # other errors: a file system without locks
    return True


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def read_json(path: Path, largest: float = math.inf) -> dict[str, Any]:
    """The object in a JSON file of at most `largest` bytes."""
    try:
        size = path.stat().st_size
        content = json.loads(path.read_text("utf-8")) if size <= largest else None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {reason(error)}") from error
    if size > largest:
        raise CheckpointError(f"{path} is too large: {size} bytes, expected at most {largest}")
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def reason(error: BaseException) -> str:
    """The message of an error in one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."


def user_cache() -> Path:
    """The folder for files that can be created again; one that can't be written if the user has no home folder."""
    home = os.path.expanduser("~")  # "~" if there is none, which must not become a folder of that name
    base = os.environ.get("XDG_CACHE_HOME") or Path(os.devnull if home == "~" else home, ".cache")
    return Path(base) / "harp"
