"""Files: written whole or not at all."""

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

from harp.errors import CheckpointError, DiskError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module has no optional type

StrPath = str | os.PathLike[str]

_HOST = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:32] or "host"
_FORGOTTEN = 24 * 3600.0  # seconds after which nobody is writing a temporary any more, whoever began it


@contextlib.contextmanager
def atomic(path: StrPath, size: int | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to, which takes the place of `path` when the block ends well.

    At every moment, even if the process is killed or the power fails, `path` is either the old file or the
    whole new one. Missing folders are made, links are followed, and temporaries that killed processes left
    are removed. The temporary is named after the machine and the process, so a path has one writer a process at a
    time. What the system refuses is a `DiskError`, which names `size`, the bytes that are to be written.
    """
    if "\0" in os.fspath(path):
        raise CheckpointError(f"can't write {os.fspath(path)!r}: a path can't have a null character in it")
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{_HOST}.{os.getpid()}.tmp")
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
        raise DiskError(f"can't write {path}: {reason(error)}{_room(error, target, size)}", full=full(error)) from error
    # The file is in place by now; a file system that can't sync a folder is no reason to say otherwise.
    with contextlib.suppress(OSError):
        _sync(target.parent)


def write_text(path: StrPath, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    # What UTF-8 can't hold (undecodable bytes in a file name) becomes an escape, which in JSON stays exact.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: StrPath, value: object) -> None:
    """Write `value` as JSON, atomically. JSON knows no NaN or infinity: they become null."""
    try:
        text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"can't write {path}: {reason(error)}") from error
    write_text(path, text + "\n")


def full(error: OSError) -> bool:
    """Whether the system refused for want of room, which may change."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def remove(path: Path) -> None:
    """Remove a file, if it is there, and what killed processes left of writing it."""
    path.unlink(missing_ok=True)
    if path.parent.is_dir():
        _sweep(path)


def _prepare(target: Path, temporary: Path) -> None:
    """Make room for a write, and refuse what `os.replace` would silently do away with."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is a device, not a file")
    if target.exists() and not os.access(target, os.W_OK):
        number = errno.EROFS if _read_only(target) else errno.EACCES
        raise OSError(number, os.strerror(number))
    temporary.unlink(missing_ok=True)
    _sweep(target)


def _read_only(path: Path) -> bool:
    return hasattr(os, "statvfs") and bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _room(error: OSError, target: Path, size: int | None) -> str:
    """Where there is no room: how much is needed, and how much there is."""
    if not full(error):
        return ""
    facts = [] if size is None else [f"{amount(size)} needed"]
    if error.errno == errno.ENOSPC:  # a quota leaves less than the disk has
        with contextlib.suppress(OSError):
            facts.append(f"{amount(shutil.disk_usage(target.parent).free)} free")
    return f" ({', '.join(facts)})" if facts else ""


def existing(path: Path) -> Path:
    """The path, or the first folder above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def amount(size: float) -> str:
    """A number of bytes for people."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} bytes"


def _sweep(target: Path) -> None:
    """Remove the temporaries of `target` whose processes are gone; those of other machines when they are old."""
    left = re.compile(re.escape(f".{target.name}.") + r"([A-Za-z0-9-]+)\.(\d{1,9})\.tmp")
    for name in os.listdir(target.parent):
        match = left.fullmatch(name)
        if match is None:
            continue
        with contextlib.suppress(OSError):
            mine = match[1] == _HOST
            if not _alive(int(match[2])) if mine else time.time() - target.with_name(name).stat().st_mtime > _FORGOTTEN:
                target.with_name(name).unlink()


def _alive(pid: int) -> bool:
    if os.name == "nt":
        return True  # there is no harmless signal there: asking would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _sync(path: Path) -> None:
    """Have the system put a file or a folder on the disk itself."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: StrPath, data: bytes | memoryview) -> None:
    """Write bytes, atomically."""
    with atomic(path, len(data)) as temporary, temporary.open("xb") as file:
        file.write(data)


@contextlib.contextmanager
def lock(path: StrPath, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Be the only process that is in a block of this path; `waiting` is called again and again while another one is.

    The lock ends with the process, however that ends. There is none on Windows and where a file system has no locks.
    """
    descriptor = None if fcntl is None else _take(Path(path), waiting)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)  # while it is held: who opened it meanwhile sees that it is gone and opens it anew
            os.close(descriptor)


def _take(path: Path, waiting: Callable[[], None]) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise DiskError(f"can't write {path}: {reason(error)}") from error
        try:
            while not _locked(descriptor):
                waiting()
                time.sleep(0.2)  # asked now and then and not waited for, so that Ctrl-C is heard in between
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the one who held it has removed it: what is locked now is not what others will find


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def reason(error: BaseException) -> str:
    """An error's message in one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
