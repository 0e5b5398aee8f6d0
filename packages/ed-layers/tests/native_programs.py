"""Compile the C++ programs of `tests/native` with the sources of the library."""

from __future__ import annotations

from pathlib import Path

from ed_layers.native.build import HANDLERS, link

PROGRAMS = Path(__file__).with_name("native")
#: Sanitizers that can be combined in one program.
SANITIZERS = {"memory": "address,undefined", "threads": "thread"}


def compile_kernels(target: Path) -> Path:
    """Compile a program that runs every kernel under the address and undefined-behavior
    sanitizers."""
    sources = ("dispatch.cc", PROGRAMS / "run_kernels.cc")
    return link(target, sources, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover")


def compile_handlers(target: Path, sanitizer: str) -> Path:
    """Compile a program that calls every handler like XLA under a key of `SANITIZERS`."""
    flags = ("-g", "-pthread", f"-fsanitize={SANITIZERS[sanitizer]}", "-fno-sanitize-recover")
    return link(target, (*HANDLERS, PROGRAMS / "call_handlers.cc"), *flags)


def compile_amx_emulation(target: Path) -> Path:
    """Compile a program for Linux on x86-64 that runs the AMX kernels on a processor without AMX,
    and compares products with float64."""
    return link(target, (PROGRAMS / "emulate_amx.cc",), "-g", optimize="-O3")
