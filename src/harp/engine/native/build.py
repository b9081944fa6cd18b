"""Compile the C++ of the engine into one shared library.

`python -m harp.engine.native.build` builds the library beside this file, unless it is up to date.

The build hook (`hatch_build.py`) loads this file by its path before anything is installed, so it imports the standard
library only. Python loads the library with ctypes, so one library works for every version of Python. It needs the C
library and threads, but no C++ library.
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

# A compiler in a wheel, for machines without one. There are wheels for Linux, macOS and Windows.
ZIG = "ziglang==0.16.0"

SOURCES = Path(__file__).resolve().parent
LIBRARY = SOURCES / ("_native" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so"))

# -ffp-contract=off: the source says what is fused, so that every compiler gives the same numbers.
FLAGS = [
    "-std=c++17", "-O3", "-g0", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-math-errno",
    "-ffp-contract=off",
]  # fmt: skip
# The kernels are compiled once for each instruction set, and the library chooses one when it is loaded.
X86: dict[str, list[str]] = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
}
# Flags to link without the C++ library. GCC has the first since version 13; the second drops libraries that are not
# used.
WITHOUT_CXX = (["-nostdlib++"], ["-Wl,--as-needed"])
PROBE = """
#include <pthread.h>
#include <stdlib.h>
extern "C" int probe(pthread_t thread) { return pthread_join(thread, nullptr) + abs((int)sizeof(void *)); }
"""
# The library contains a digest of its sources, which is more reliable than file times.
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
    """A working C++ compiler: its command, its linker flags, and whether it compiles for x86-64."""

    command: tuple[str, ...]
    link: tuple[str, ...]
    x86: bool


def find_compiler(zig: Path | None = None) -> Compiler | None:
    """The compiler of `CXX`, else the first working one of c++, g++, clang++, and zig (installed or in a folder)."""
    named = named_compiler()
    for command in [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]) and (compiler := _probed(command)):
            return compiler
    if named:
        return None
    if zig is None and (spec := importlib.util.find_spec("ziglang")) and spec.origin:
        zig = Path(spec.origin).parent
    if zig is None:
        return None
    # By default Zig compiles for the CPU it runs on; the library must run on any.
    command = [str(zig / ("zig.exe" if sys.platform == "win32" else "zig")), "c++", "-mcpu=baseline"]
    with tempfile.TemporaryDirectory() as folder:
        return Compiler(tuple(command), tuple(WITHOUT_CXX[0]), _is_x86(command, Path(folder)))


def working_compiler(zig: Path | None = None) -> Compiler:
    """The compiler that `find_compiler` finds; an error if there is none."""
    if compiler := find_compiler(zig):
        return compiler
    if named := named_compiler():
        raise BuildFailed(f"CXX={named} does not compile: name a C++ compiler that does, or leave CXX unset")
    raise BuildFailed("there is no C++ compiler that works, neither c++, g++ and clang++ nor zig")


def named_compiler() -> str:
    """The value of CXX. If it is set, no other compiler is tried."""
    return os.environ.get("CXX", "").strip()


def is_current(library: Path = LIBRARY, sources: Path = SOURCES) -> bool:
    """Whether the library is there and was built from the sources as they are now."""
    return library.is_file() and _digest(sources).encode() in library.read_bytes()


def build(compiler: Compiler, library: Path = LIBRARY, sources: Path = SOURCES, flags: Sequence[str] = ()) -> None:
    """Compile the sources into a library, which atomically replaces the old one, even if that is in use.

    Without extra flags the new library is first loaded and called once in another process.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digest_source = folder / "digest.cpp"
        digest_source.write_text(MARK % _digest(sources))
        system = [f"-mmacosx-version-min={_oldest_macos()}"] if sys.platform == "darwin" else []
        common = [*compiler.command, *FLAGS, *system, *(["-DHARP_X86=1"] if compiler.x86 else []), *flags]
        commands, objects = [], []
        for source in [*sorted(sources.resolve().glob("*.cpp")), digest_source]:
            sets = X86 if compiler.x86 else {"baseline": []}
            for isa, isa_flags in sets.items() if source.stem.startswith("kernels") else [("", [])]:
                objects.append(str(folder / f"{source.stem}{isa}.o"))
                define = [f"-DISA={isa}"] if isa else []
                commands.append([*common, *define, *isa_flags, "-c", str(source), "-o", objects[-1]])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for warnings in pool.map(lambda command: _run(command, folder), commands):
                print(warnings, end="", file=sys.stderr)
        built = folder / library.name
        link = ["-shared", "-O3", "-pthread", *compiler.link, *system, *flags]
        _run([*compiler.command, *link, *objects, "-o", str(built)], folder)
        if not flags:
            call = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).harp_abi()"
            _run([sys.executable, "-I", "-c", call, str(built)], folder)
        _move(built, library)


def wheel_platform() -> str:
    """The platform in the name of a wheel that holds the library.

    On Linux it is plain `linux_x86_64` or the like: the library is linked with the C library of this machine, and
    auditwheel has to determine which other machines can load it.
    """
    if sys.platform == "darwin":
        return f"macosx_{_oldest_macos().replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the library if it is not up to date; without a compiler, fetch one for this build."""
    parser = argparse.ArgumentParser(prog="python -m harp.engine.native.build", description="Compile the engine's C++.")
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
    """The digest of the C++ sources and of this file, which defines how they are compiled."""
    total = hashlib.sha256()
    for path in [Path(__file__), *sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])]:
        total.update(hashlib.sha256(path.name.encode()).digest() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _probed(command: list[str]) -> Compiler | None:
    """The compiler of a command if it works. Headers or a linker may be missing, so a small program is built."""
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
    """Whether a compiler compiles for x86-64. The platform of Python can't tell: it may be 32-bit on a 64-bit CPU."""
    (folder / "empty.cpp").touch()
    macros = _run([*command, "-dM", "-E", "empty.cpp"], folder, output=True)
    return "__x86_64__" in macros


def _oldest_macos() -> str:
    return "11.0" if platform.machine() == "arm64" else sysconfig.get_platform().split("-")[1]


def _move(built: Path, library: Path) -> None:
    """Move the library to its place atomically: copy it into the folder first, as only a rename is atomic."""
    beside = library.with_name(f"{library.name}.{os.getpid()}.tmp")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, beside)
        os.replace(beside, library)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise BuildFailed(f"{library} cannot be written: {error}") from None


def _fetched_zig(folder: Path) -> Path:
    print(f"harp: no C++ compiler here; fetching {ZIG} for this build", file=sys.stderr)
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), ZIG], folder)
    return folder / "ziglang"


def _run(command: list[str], folder: Path, output: bool = False) -> str:
    """Run a command and return its output, or its warnings if `output` is false."""
    # Zig caches its compiled libraries in the folder of this build, not in the home of the user.
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}
    try:
        finished = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error}") from None
    if finished.returncode:
        errors = "\n".join(finished.stderr.strip().splitlines()[-40:])
        raise BuildFailed(f"a command failed with status {finished.returncode}:\n{shlex.join(command)}\n{errors}")
    return finished.stdout if output else finished.stderr


if __name__ == "__main__":
    sys.exit(main())
