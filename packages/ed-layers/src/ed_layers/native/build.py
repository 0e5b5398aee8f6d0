"""Compile the C++ sources. Standard library only, because the build of a wheel also runs this
file."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Folder of the sources: in the repository, or next to this file in a wheel.
SOURCE_FOLDERS = (HERE.parents[2] / "native", HERE / "source")
#: Version of the interface between C++ and Python.
VERSION = 17
#: Name of the compiled library.
LIBRARY = HERE / f"libed_layers_{VERSION}.so"

COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *AVX2)
VNNI = (*AVX512, "-mavx512vnni")
BF16 = (*VNNI, "-mavx512bf16")
#: Levels of instructions by machine: the name in C++, the name in messages, the compiler's flags.
LEVELS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "x86_64": (
        ("kBaseLevel", "base", ()),
        ("kAvx2Level", "avx2", AVX2),
        ("kAvxVnniLevel", "avx_vnni", (*AVX2, "-mavxvnni")),
        ("kAvx512Level", "avx512", AVX512),
        ("kAvx512VnniLevel", "avx512_vnni", VNNI),
        ("kAvx512Bf16Level", "avx512_bf16", BF16),
        ("kAmxLevel", "amx", (*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    ),
    "aarch64": (
        ("kBaseLevel", "base", ()),
        ("kDotprodLevel", "dotprod", ("-march=armv8.2-a+dotprod",)),
    ),
}
#: The handlers that XLA calls, compiled once.
HANDLERS = (
    "dispatch.cc",
    "gemm_handlers.cc",
    "attention_handlers.cc",
    "cache_attention_handlers.cc",
    "rotary_handler.cc",
    "recurrence_handler.cc",
)


class CannotBuild(RuntimeError):
    """The library cannot be compiled on this machine; the message contains the reason."""


def build(target: Path = LIBRARY, optimize: str = "-O3") -> Path:
    """Compile the library.

    Args:
        target: file to write; another process that has loaded the file keeps the old version.
        optimize: the compiler's flag for kernels; "-O0" needs a fifth of the time.

    Raises:
        CannotBuild: no sources, no compiler, no headers of jaxlib, or the compiler failed.
    """
    strip = () if sys.platform == "darwin" else ("-Wl,-s",)
    return link(target, HANDLERS, "-shared", *strip, optimize=optimize)


def link(target: Path, sources: Sequence[str | Path], *flags: str, optimize: str = "-O1") -> Path:
    """Compile the levels and `sources` in parallel, and link them.

    Args:
        target: file to write.
        sources: names of C++ files of the library, or paths of other C++ files.
        flags: flags of the linker; `-f...` flags are also passed to the compiler.
        optimize: the compiler's flag for kernels.

    Raises:
        CannotBuild: see `build`.
    """
    folder = next((path for path in SOURCE_FOLDERS if path.is_dir()), None)
    if folder is None:
        raise CannotBuild(f"no C++ sources in {' or '.join(map(str, SOURCE_FOLDERS))}")
    requested = os.environ.get("CXX")
    compiler = requested or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler is None or shutil.which(compiler) is None:
        raise CannotBuild(f"no C++ compiler ({requested or 'g++'} is not there; CXX names one)")
    machine = platform.machine().replace("AMD64", "x86_64").replace("arm64", "aarch64")
    sanitize = tuple(flag for flag in flags if flag.startswith("-f"))
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        # GCC 12 prints warnings for its own AVX-512 headers.
        kernels = (optimize, "-Wno-maybe-uninitialized", "-Wno-uninitialized")
        units: list[tuple[Path, tuple[str, ...]]] = [
            (
                folder / "level.cc",
                (
                    *kernels,
                    *extensions,
                    f"-DED_LEVEL={symbol}",
                    f'-DED_LEVEL_NAME="{name}"',
                ),
            )
            for symbol, name, extensions in LEVELS.get(machine, (("kBaseLevel", "base", ()),))
        ]
        includes = ("-I", str(folder), "-isystem", str(headers()))
        units += [(folder / source, ("-O2", *includes)) for source in sources]
        objects = [str(directory / f"{i}.o") for i in range(len(units))]

        def compile_unit(unit: tuple[Path, tuple[str, ...]], output: str) -> None:
            source, options = unit
            _run(compiler, *COMMON, *options, *sanitize, "-c", str(source), "-o", output)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(compile_unit, units, objects))
        linked = directory / "linked"
        _run(compiler, *flags, *objects, "-o", str(linked))
        # The rename is atomic, so that no process loads a partial file.
        copy = target.with_suffix(f".{os.getpid()}")
        shutil.copy(linked, copy)
        copy.replace(target)
    return target


def headers() -> Path:
    """Return the folder of XLA's headers, which jaxlib contains, without importing jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (include := Path(place) / "include").is_dir():
            return include
    raise CannotBuild("jaxlib, whose headers are needed, is not installed here")


def _run(*command: str) -> None:
    """Run the compiler."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
