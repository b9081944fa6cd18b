"""Compile the C++ of the engine into one shared library.

`python -m harp.sparse.build` makes the library beside this file, unless it is there and of the present sources.

The build hook (`hatch_build.py`) loads this file by its path, before anything is installed: it imports the standard
library and nothing else. Python reads the library by ctypes, so that one serves every version of Python; it needs the
C library and threads, and no C++ library.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# A whole compiler in a wheel, for machines without one. Its wheels cover Linux, macOS and Windows.
ZIG = "ziglang==0.16.0"

PACKAGE = Path(__file__).resolve().parent
SOURCES = PACKAGE / "native"
LIBRARY = PACKAGE / ("_native" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so"))

# -ffp-contract=off: what is fused is said in the source, so that every compiler gives the same numbers.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=off",
]
# The kernels are compiled once for each, and the library chooses when it is loaded.
BASELINE: dict[str, list[str]] = {"baseline": []}
X86 = BASELINE | {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
}
# What keeps the C++ library out. GCC knows the first since version 13; before, a library that nobody calls is left out.
WITHOUT_CXX = (["-nostdlib++"], ["-Wl,--as-needed"])
PROBE = """
#include <pthread.h>
#include <stdlib.h>
extern "C" int probe(pthread_t thread) { return pthread_join(thread, nullptr) + abs((int)sizeof(void *)); }
"""
# The library names what it was built from: no time of a file could tell as much.
MARK = """
extern "C" {
extern const char harp_sources[] __attribute__((visibility("default")));
const char harp_sources[] = "%s";
}
"""


class BuildFailed(RuntimeError):
    """The library could not be built; the message says why."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that works: its command, what it links with, and whether it compiles for x86-64."""

    command: tuple[str, ...]
    link: tuple[str, ...]
    x86: bool


def find_compiler(zig: Path | None = None) -> Compiler | None:
    """The compiler `CXX` names, else the first that works of c++, g++, clang++ and zig (installed, or in a folder)."""
    named = named_compiler()
    for command in [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]) and (found := _probed(command)):
            return found
    if named:
        return None
    if zig is None and (spec := importlib.util.find_spec("ziglang")) and spec.origin:
        zig = Path(spec.origin).parent
    if zig is None:
        return None
    # Zig compiles for the CPU it runs on unless told otherwise; the library must run on any.
    command = [str(zig / ("zig.exe" if sys.platform == "win32" else "zig")), "c++", "-mcpu=baseline"]
    with tempfile.TemporaryDirectory() as folder:
        return Compiler(tuple(command), tuple(WITHOUT_CXX[0]), _is_x86(command, Path(folder)))


def working_compiler(zig: Path | None = None) -> Compiler:
    """The compiler that `find_compiler` finds; an error if there is none."""
    if found := find_compiler(zig):
        return found
    if named := named_compiler():
        raise BuildFailed(f"CXX={named} does not compile: name a C++ compiler that does, or leave CXX unset")
    raise BuildFailed("there is no C++ compiler that works, neither c++, g++ and clang++ nor zig")


def named_compiler() -> str:
    """What CXX says: who names a compiler wants that one or none."""
    return os.environ.get("CXX", "").strip()


def is_current(library: Path = LIBRARY, sources: Path = SOURCES) -> bool:
    """Whether the library is there and was built from the sources as they are now."""
    return library.is_file() and _digest(sources).encode() in library.read_bytes()


def build(compiler: Compiler, library: Path = LIBRARY, sources: Path = SOURCES, flags: Sequence[str] = ()) -> None:
    """Compile the sources into a library that takes the place of the old one at once, whoever has that open.

    Without flags of your own the library is also loaded and called once, in another process, before it takes its place.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mark = folder / "digest.cpp"
        mark.write_text(MARK % _digest(sources))
        common = [*compiler.command, *FLAGS, *_system_flags(), *(["-DHARP_X86=1"] if compiler.x86 else []), *flags]
        commands, objects = [], []
        for source in [*sorted(sources.resolve().glob("*.cpp")), mark]:
            sets = (X86 if compiler.x86 else BASELINE) if source.stem.startswith("kernels") else {"": []}
            for isa, isa_flags in sets.items():
                objects.append(str(folder / f"{source.stem}{isa}.o"))
                define = [f"-DISA={isa}"] if isa else []
                commands.append([*common, *define, *isa_flags, "-c", str(source), "-o", objects[-1]])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for warnings in pool.map(lambda command: _run(command, folder), commands):
                print(warnings, end="", file=sys.stderr)
        made = folder / library.name
        link = ["-shared", "-O3", "-pthread", *compiler.link, *_system_flags(), *flags]
        _run([*compiler.command, *link, *objects, "-o", str(made)], folder)
        if not flags:
            call = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).harp_abi()"
            _run([sys.executable, "-I", "-c", call, str(made)], folder)
        _move(made, library)


def wheel_platform() -> str:
    """The platform in the name of a wheel that holds the library.

    On Linux it is plain `linux_x86_64` or the like: the library is linked with the C library of this machine, and what
    other machines can load it is for auditwheel to find out.
    """
    if sys.platform == "darwin":
        return f"macosx_{_oldest_macos().replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the library if it is not current; fetch a compiler for the time if there is none."""
    parser = argparse.ArgumentParser(prog="python -m harp.sparse.build", description="Compile the engine's C++.")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="the library (default: in the package)")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="the folder of the C++ (default: the package's)")
    parser.add_argument("--flags", default="", help="further flags of the compiler, such as '-fsanitize=address'")
    chosen = parser.parse_args(arguments)
    flags = shlex.split(chosen.flags)
    if os.environ.get("HARP_NATIVE") == "0":
        print("harp: nothing is compiled, since HARP_NATIVE is 0", file=sys.stderr)
        return 0
    if not flags and is_current(chosen.output, chosen.sources):
        return 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            compiler = working_compiler(None if find_compiler() or named_compiler() else _fetched_zig(Path(folder)))
            build(compiler, chosen.output, chosen.sources, flags)
    except BuildFailed as failure:
        print(f"harp: {failure}", file=sys.stderr)
        return 1
    print(f"harp: built {chosen.output} with {shlex.join(compiler.command)}", file=sys.stderr)
    return 0


def _digest(sources: Path) -> str:
    """Of the C++ and of this file, which says how it is compiled."""
    total = hashlib.sha256()
    for path in [Path(__file__), *sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])]:
        total.update(hashlib.sha256(path.name.encode()).digest() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _probed(command: list[str]) -> Compiler | None:
    """A command on the path need not have headers or a linker: compile and link something small."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "probe.cpp").write_text(PROBE)
        for link in WITHOUT_CXX:
            try:
                _run([*command, *FLAGS, *link, "-shared", "-pthread", "probe.cpp", "-o", "probe"], folder)
                return Compiler(tuple(command), tuple(link), _is_x86(command, folder))
            except BuildFailed:
                continue
    return None


def _is_x86(command: list[str], folder: Path) -> bool:
    """The compiler knows best what it compiles for: a 32-bit Python may run on a 64-bit CPU."""
    (folder / "empty.cpp").touch()
    macros = _run([*command, "-dM", "-E", "empty.cpp"], folder, wanted=True)
    return "__x86_64__" in macros


def _system_flags() -> list[str]:
    return [f"-mmacosx-version-min={_oldest_macos()}"] if sys.platform == "darwin" else []


def _oldest_macos() -> str:
    return "11.0" if platform.machine() == "arm64" else sysconfig.get_platform().split("-")[1]


def _move(made: Path, library: Path) -> None:
    """Beside its place first: only within one file system is a file replaced at once."""
    beside = library.with_name(f"{library.name}.{os.getpid()}.tmp")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, beside)
        os.replace(beside, library)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise BuildFailed(f"{library} cannot be written: {error}") from None


def _fetched_zig(folder: Path) -> Path:
    print(f"harp: no C++ compiler here; fetching {ZIG} for this build", file=sys.stderr)
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), ZIG], folder)
    return folder / "ziglang"


def _run(command: list[str], folder: Path, wanted: bool = False) -> str:
    """What a command says: its output if that is wanted, else its warnings."""
    # Zig keeps what it compiled of its own libraries in the folder of this build, not in the home of the user.
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-40:])
        raise BuildFailed(f"this ended with status {done.returncode}:\n{shlex.join(command)}\n{said}")
    return done.stdout if wanted else done.stderr


if __name__ == "__main__":
    sys.exit(main())
