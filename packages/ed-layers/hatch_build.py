"""Puts the native library into wheels and editable installs where it can be compiled.

Without a C++ compiler, or jaxlib's headers, the wheel is pure Python, and the build
prints one line about it. `ED_LAYERS_NATIVE=0` builds no library, and with
`ED_LAYERS_NATIVE=1` a build without the library fails.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):
    """Compiles `native/` with the package's own `build.py`."""

    PLUGIN_NAME = "custom"
    library: Path | None = None  # in a temporary folder

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        if self.target_name != "wheel":
            return
        path = Path(self.root) / "src" / "ed_layers" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("native_build", path)
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        choice = os.environ.get("ED_LAYERS_NATIVE")
        if choice == "0":
            return
        # An editable install uses the package and its library in place.
        editable = version == "editable"
        folder = native.LIBRARY.parent if editable else Path(tempfile.mkdtemp())
        try:
            library = native.build(folder / native.LIBRARY.name)
        except native.CannotBuild as error:
            if choice == "1":
                raise
            print(f"ed-layers: without native kernels: {str(error).splitlines()[0]}")
            return
        if editable:
            return
        self.library = library
        build_data["force_include"][str(library)] = f"ed_layers/native/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling after it wrote the wheel."""
        if self.library is not None:
            shutil.rmtree(self.library.parent)


def platform_tag() -> str:
    """The platform of a wheel: on Linux by the C library that it was linked with."""
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    name, version = platform.libc_ver()
    if sys.platform == "linux" and name == "glibc":
        return f"manylinux_{version.replace('.', '_')}_{platform.machine()}"
    return tag
