"""The native build: one library for any CPU, from any compiler, and an install that works without one."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from harp.engine.native import build
from support.paths import ROOT

# PEP 517 builds see the same folders as a release; a wheel that is installed has no hook.
pytestmark = pytest.mark.skipif(not (ROOT / "hatch_build.py").exists(), reason="not a checkout")

HEADER = "typedef int (*Width)();\n#define ANSWER 41\n"
KERNELS = """
#include "engine.h"
#define JOINED(a, b) a##b
#define NAMED(isa) JOINED(width_, isa)
extern const Width NAMED(ISA);
const Width NAMED(ISA) = [] {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  return 512;
#elif defined(__AVX2__) && defined(__FMA__)
  return 256;
#elif defined(__AVX__)
  return -1;
#else
  return 128;
#endif
};
"""
ENGINE = """
#include "engine.h"
#include <pthread.h>
extern const Width width_baseline;
#if HARP_X86
extern const Width width_avx2, width_avx512;
#endif
#define API extern "C" __attribute__((visibility("default")))
static void *one(void *number) { ++*(int *)number; return nullptr; }
API int harp_abi() {
  int number = ANSWER;
  pthread_t thread;
  if (!pthread_create(&thread, nullptr, one, &number)) pthread_join(thread, nullptr);
  return number;
}
API int width(int i) {
#if HARP_X86
  if (i) return i == 1 ? width_avx2() : width_avx512();
#endif
  return width_baseline();
}
extern "C" int hidden() { return 0; }
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small engine."""
    folder = tmp_path / "native"
    folder.mkdir()
    for name, text in {"engine.h": HEADER, "kernels.cpp": KERNELS, "engine.cpp": ENGINE}.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def compiler() -> build.Compiler:
    working = build.find_compiler()
    if working is None:
        pytest.skip("this machine has no C++ compiler")
    return working


def command_in(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_one_library_holds_every_instruction_set_and_needs_no_cxx_library(
    compiler: build.Compiler, sources: Path, tmp_path: Path
) -> None:
    library = tmp_path / "made" / "native.so"
    build.build(compiler, library, sources)
    assert [path.name for path in library.parent.iterdir()] == ["native.so"]
    loaded = ctypes.CDLL(str(library))
    assert loaded.harp_abi() == 42
    assert [loaded.width(i) for i in range(3)] == ([128, 256, 512] if compiler.x86 else [128] * 3)
    assert not hasattr(loaded, "hidden")
    code = library.read_bytes()
    assert b"libstdc++" not in code and b"libc++" not in code and str(tmp_path).encode() not in code


def test_the_library_is_current_until_its_sources_change(
    compiler: build.Compiler, sources: Path, tmp_path: Path
) -> None:
    library = tmp_path / "native.so"
    assert not build.is_current(library, sources)
    build.build(compiler, library, sources)
    first = library.read_bytes()
    os.utime(sources / "engine.cpp")  # a checkout makes files young without changing them
    assert build.is_current(library, sources)
    (sources / "engine.h").write_text(HEADER.replace("41", "7"))
    os.utime(sources / "engine.h", (0, 0))  # nor does an old file mean an unchanged one
    assert not build.is_current(library, sources)
    (sources / "engine.h").write_text(HEADER)
    assert build.is_current(library, sources)
    build.build(compiler, library, sources)
    assert library.read_bytes() == first, "the same sources give the same bytes"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("int f( {", "engine.cpp:"),
        ('extern "C" int nowhere(); int f() { return nowhere(); }', "nowhere"),
        ("", "harp_abi"),
    ],
)
def test_a_failed_build_says_why_and_leaves_the_old_library(
    compiler: build.Compiler, sources: Path, tmp_path: Path, wrong: str, said: str
) -> None:
    library = tmp_path / "native.so"
    library.write_bytes(b"old")
    engine = sources / "engine.cpp"
    engine.write_text(ENGINE + wrong if wrong else ENGINE.replace("harp_abi", "another"))
    with pytest.raises(build.BuildFailed, match=said):
        build.build(compiler, library, sources)
    assert library.read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"native", "native.so"}


def test_an_output_that_cannot_be_written_fails_in_one_line(
    compiler: build.Compiler, sources: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildFailed, match="cannot be written"):
        build.build(compiler, tmp_path / "file" / "native.so", sources)


def test_a_command_that_does_not_compile_is_no_compiler(
    compiler: build.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which(compiler.command[0])
    command_in(tmp_path / "bin", "c++", "exit 1")
    path = os.environ["PATH"]
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert build.find_compiler() is None
    with pytest.raises(build.BuildFailed, match="no C\\+\\+ compiler"):
        build.working_compiler()
    command_in(tmp_path / "bin", "g++", f'PATH={path} exec {real} "$@"')
    chosen = build.find_compiler()
    assert chosen is not None and chosen.command == ("g++",) and chosen.x86 == compiler.x86
    monkeypatch.setenv("CXX", f"{real} -O0")
    chosen = build.find_compiler()
    # Its parts are looked for on the path, which is empty here; what matters is that nobody else is taken.
    assert chosen is None or chosen.command == (real, "-O0")
    monkeypatch.setenv("CXX", "c++ -O0")
    assert build.find_compiler() is None
    with pytest.raises(build.BuildFailed, match=r"CXX=c\+\+ -O0 does not compile"):
        build.working_compiler()


def test_zig_compiles_for_any_cpu_not_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command_in(tmp_path / "ziglang", "zig", "echo '#define __x86_64__ 1'")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    chosen = build.find_compiler(tmp_path / "ziglang")
    assert chosen is not None and chosen.x86
    assert chosen.command[1:] == ("c++", "-mcpu=baseline") and chosen.link == ("-nostdlib++",)


def test_the_command_builds_unless_the_library_is_current(
    compiler: build.Compiler, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    library = tmp_path / "native.so"
    arguments = ["--sources", str(sources), "--output", str(library)]
    monkeypatch.setenv("HARP_NATIVE", "0")
    assert build.main(arguments) == 0 and not library.exists()
    monkeypatch.delenv("HARP_NATIVE")
    capfd.readouterr()
    assert build.main(arguments) == 0 and library.exists()
    assert f"built {library}" in capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(build, "build", None)
        assert build.main(arguments) == 0, "nothing is to do, and nothing is done"
    assert capfd.readouterr().err == ""
    (sources / "engine.cpp").write_text("#error no such machine")
    assert build.main(arguments) == 1
    assert "no such machine" in capfd.readouterr().err


def test_without_a_compiler_the_command_fetches_one(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(command: list[str], **options: Any) -> None:
        ran.append(command)
        raise OSError("no network")

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(build.subprocess, "run", run)
    assert build.main(["--sources", str(sources), "--output", str(tmp_path / "native.so")]) == 1
    ((*pip, package),) = ran
    assert pip[1:4] == ["-m", "pip", "install"] and package == build.ZIG


def test_the_command_needs_nothing_but_python(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "src/harp/engine/native/build.py"), "--help"]
    assert "--flags" in subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout


def test_the_library_of_this_checkout_is_current() -> None:
    if os.environ.get("HARP_NATIVE") == "0" or not build.LIBRARY.exists():
        pytest.skip("no native code here")
    assert build.is_current(), "make native"


def test_platforms_of_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        assert build.wheel_platform() == "linux_" + os.uname().machine
    monkeypatch.setattr(build.sys, "platform", "darwin")
    for python, machine, wanted in [
        ("macosx-10.13-universal2", "arm64", "macosx_11_0_arm64"),
        ("macosx-10.13-universal2", "x86_64", "macosx_10_13_x86_64"),
        ("macosx-14.0-arm64", "arm64", "macosx_11_0_arm64"),
    ]:
        monkeypatch.setattr(sysconfig, "get_platform", lambda python=python: python)
        monkeypatch.setattr(build.platform, "machine", lambda machine=machine: machine)
        assert build.wheel_platform() == wanted


class Hook:
    """What hatchling gives a hook, as far as ours looks at it."""

    def __init__(self, root: Path) -> None:
        self.root, self.warnings = str(root), []
        self.app = types.SimpleNamespace(display_warning=self.warnings.append)


@pytest.fixture
def checkout(sources: Path, tmp_path: Path) -> Path:
    sparse = tmp_path / "checkout" / "src" / "harp" / "engine" / "native"
    shutil.copytree(sources, sparse)
    shutil.copy(ROOT / "src/harp/engine/native/build.py", sparse)
    return tmp_path / "checkout"


@pytest.fixture
def hook(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    name = "hatchling.builders.hooks.plugin.interface"
    for depth in range(1, 6):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:depth]), types.ModuleType("hatchling"))
    sys.modules[name].BuildHookInterface = Hook  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("HARP_NATIVE", raising=False)
    return module.NativeHook(checkout)


def fresh() -> dict[str, Any]:
    return {"pure_python": True, "force_include": {}}


def test_a_wheel_with_a_library_is_for_one_platform_and_any_python(
    compiler: build.Compiler, hook: Any, checkout: Path
) -> None:
    assert hook.dependencies() == []
    data = fresh()
    hook.initialize("standard", data)
    ((library, place),) = data["force_include"].items()
    assert ctypes.CDLL(library).harp_abi() == 42 and place == f"harp/engine/native/{build.LIBRARY.name}"
    assert data["pure_python"] is False and data["tag"] == f"py3-none-{build.wheel_platform()}"
    assert not (checkout / "src/harp/engine/native" / build.LIBRARY.name).exists(), "the checkout stays as it was"
    hook.finalize("standard", data, "")
    assert not Path(library).exists() and hook.warnings == []


def test_an_editable_install_has_its_library_in_the_checkout(
    compiler: build.Compiler, hook: Any, checkout: Path
) -> None:
    data = fresh()
    hook.initialize("editable", data)
    library = checkout / "src/harp/engine/native" / build.LIBRARY.name
    assert data == fresh() and ctypes.CDLL(str(library)).harp_abi() == 42
    before = library.stat().st_mtime_ns
    hook.initialize("editable", data)
    assert library.stat().st_mtime_ns == before


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_what_cannot_be_built_is_left_out_unless_it_is_required(
    hook: Any, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("CXX", "false")
    data = fresh()
    assert hook.dependencies() == []
    hook.initialize(version, data)
    hook.finalize(version, data, "")
    assert data == fresh()
    (warning,) = hook.warnings
    assert "WITHOUT native code" in warning and "CXX=false" in warning
    monkeypatch.setenv("HARP_NATIVE", "require")
    with pytest.raises(RuntimeError, match="CXX=false"):
        hook.initialize(version, data)
    monkeypatch.setenv("HARP_NATIVE", "0")
    hook.initialize(version, data)
    assert data == fresh() and "HARP_NATIVE is 0" in hook.warnings[-1]
    monkeypatch.setenv("HARP_NATIVE", "yes")
    with pytest.raises(ValueError, match="'yes'"):
        hook.initialize(version, data)


def test_only_a_machine_without_compiler_asks_for_zig(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert hook.dependencies() == [build.ZIG]
    monkeypatch.setenv("HARP_NATIVE", "0")
    assert hook.dependencies() == []


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution of this checkout, by an isolated hatchling; needs a package index."""
    folder = tmp_path_factory.mktemp("sdist")
    tools = folder / "tools"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", tools, "hatchling>=1.26"], check=True)
    code = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    environment = os.environ | {"PYTHONPATH": str(tools)}
    subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, env=environment, check=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def installed(sdist: Path, folder: Path, environment: dict[str, str]) -> tuple[str, Path]:
    """The name of the wheel that pip makes of a source distribution, and where it was unpacked."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(sdist)]
    subprocess.run(pip, env=os.environ | environment, check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return wheel.name, folder / "unpacked" / "harp" / "engine" / "native"


@pytest.mark.slow
@pytest.mark.parametrize("compilers", ["those of this machine", "none"])
def test_one_command_makes_a_wheel_with_or_without_a_compiler(compilers: str, sdist: Path, tmp_path: Path) -> None:
    name, sparse = installed(sdist, tmp_path, {"PATH": str(tmp_path)} if compilers == "none" else {})
    assert name.endswith(f"-py3-none-{build.wheel_platform()}.whl")
    library = sparse / build.LIBRARY.name
    assert ctypes.CDLL(str(library)).harp_abi() > 0 and b"libstdc++" not in library.read_bytes()
    assert (b"GCC" in library.read_bytes() and b"clang" not in library.read_bytes()) or compilers == "none"
    # Whoever installed it can build it anew, and need not.
    again = subprocess.run(
        [sys.executable, str(sparse / "build.py")], env=os.environ | {"CXX": "false"}, capture_output=True, text=True
    )
    assert (again.returncode, again.stderr) == (0, "")


@pytest.mark.slow
def test_a_wheel_without_native_code_is_pure(sdist: Path, tmp_path: Path) -> None:
    name, sparse = installed(sdist, tmp_path, {"HARP_NATIVE": "0"})
    assert name.endswith("-py3-none-any.whl") and not list(sparse.glob("_native.*"))
