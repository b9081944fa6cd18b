"""Files: written whole or not at all."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from harp.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module has no optional type

StrPath = str | os.PathLike[str]


@contextlib.contextmanager
def atomic(path: StrPath) -> Iterator[Path]:
    """Yield a temporary path to write to, which takes the place of `path` when the block ends well.

    At every moment, even if the process is killed or the power fails, `path` is either the old file or the
    whole new one. Missing folders are made, links are followed, and temporaries that killed processes left
    are removed. The temporary is named after the process, so a path has one writer a process at a time.
    """
    if "\0" in os.fspath(path):
        raise CheckpointError(f"can't write {os.fspath(path)!r}: a path can't have a null character in it")
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
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
        raise CheckpointError(f"can't write {path}: {reason(error)}") from error
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


def _prepare(target: Path, temporary: Path) -> None:
    """Make room for a write, and refuse what `os.replace` would silently do away with."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is a device, not a file")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    temporary.unlink(missing_ok=True)
    _sweep(target)


def _sweep(target: Path) -> None:
    """Remove the temporaries of `target` whose processes are gone."""
    left = re.compile(re.escape(f".{target.name}.") + r"(\d{1,9})\.tmp")
    for name in os.listdir(target.parent):
        match = left.fullmatch(name)
        if match and not _alive(int(match[1])):
            with contextlib.suppress(OSError):
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
    with atomic(path) as temporary, temporary.open("xb") as file:
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
            raise CheckpointError(f"can't write {path}: {reason(error)}") from error
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
