"""The build hook: compiles the engine's C++ when a wheel or an editable install is built.

HARP_NATIVE=0 leaves the C++ out, HARP_NATIVE=require makes a failure fatal. Otherwise the package is installed without
the library if it can't be built; it then computes in torch.
"""

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def load_build(root: str) -> Any:
    """The module that compiles, by its path: the package and its dependencies are not installed yet."""
    spec = importlib.util.spec_from_file_location("harp_native_build", Path(root, "src/harp/engine/native/build.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeHook(BuildHookInterface):
    """Puts the library into the wheel, or beside its Python files for an editable install."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """A compiler in a wheel, on machines that have none of their own."""
        if self.wish() == "0":
            return []
        build = load_build(self.root)
        return [] if build.named_compiler() or build.find_compiler() else [build.ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel with a library is for one platform and any Python."""
        wish = self.wish()
        if wish == "0":
            self.app.display_warning("harp: built without native code, since HARP_NATIVE is 0; it computes in torch")
            return
        build = load_build(self.root)
        try:
            if version == "editable":
                if not build.is_current():
                    build.build(build.working_compiler())
                return
            self.folder = tempfile.TemporaryDirectory()
            library = Path(self.folder.name, build.LIBRARY.name)
            build.build(build.working_compiler(), library)
        except Exception as failure:
            self.finalize(version, build_data, "")
            if wish == "require":
                raise
            self.app.display_warning(f"harp: built WITHOUT native code; it computes in torch, more slowly: {failure}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{build.wheel_platform()}"
        build_data["force_include"][str(library)] = f"harp/engine/native/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The library is in the wheel by now."""
        if folder := getattr(self, "folder", None):
            folder.cleanup()

    @staticmethod
    def wish() -> str:
        """What HARP_NATIVE says."""
        wish = os.environ.get("HARP_NATIVE", "")
        if wish not in ("", "0", "1", "require"):
            raise ValueError(f"HARP_NATIVE is {wish!r}: 0 builds without native code, require makes a failure fatal")
        return wish
