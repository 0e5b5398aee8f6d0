"""The compiled library: loaded and registered with XLA at the first use."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import jax
from ed_infra.logging import get_logger, once

from ed_layers.native.build import LIBRARY

logger = get_logger(__name__)

#: "0" disables the kernels; "1" also enables them on several devices, each of which then has whole
#: arrays.
VARIABLE = "ED_LAYERS_NATIVE"
#: Functions that XLA calls. A cached program contains the names, so the names contain the version
#: of the interface.
TARGETS = {
    "ed_product": "ed_layers_product_6",
    "ed_product_of_codes": "ed_layers_codes_6",
    "ed_attention": "ed_layers_attention_6",
    "ed_attention_back": "ed_layers_attention_back_6",
    "ed_attention_cached": "ed_layers_attention_cached_6",
    "ed_attention_paged": "ed_layers_attention_paged_6",
    "ed_put": "ed_layers_put_6",
    "ed_rotary": "ed_layers_rotary_6",
}


_ALLOWED = ContextVar("native kernels are allowed", default=True)


@contextmanager
def allowed(choice: bool) -> Iterator[None]:
    """Trace the block without kernels, for a configuration with `native_kernels: false`."""
    token = _ALLOWED.set(choice and _ALLOWED.get())
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def in_use() -> bool:
    """Return whether kernels may be used: the library is loaded and enabled, and the process has
    one CPU device."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "0" or not _ALLOWED.get() or jax.default_backend() != "cpu":
        return False
    # The partitioner cannot split a call of a library.
    return (asked == "1" or jax.device_count() == 1) and level() is not None


def level() -> str | None:
    """Return the level of instructions that the loaded library uses; None without a library."""
    return _loaded().level


class Loaded(NamedTuple):
    """The outcome of loading: the level of instructions, or None and the reason."""

    level: str | None
    reason: str = ""


@cache
def _loaded() -> Loaded:
    """Load the library and register its functions, once per process."""
    build = "python -m ed_layers.native build"
    if not LIBRARY.exists():
        said = f"native kernels: not built, plain XLA computes every product; {build} compiles them"
        once(logger, f"{said} (some seconds, a C++ compiler)", level=logging.INFO)
        return Loaded(None, f"not built ({build})")
    # XLA defers registrations until the backend exists. The error of a deferred registration, such
    # as a newer version of the FFI, would appear as an error of the backend.
    jax.default_backend()
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for symbol, target in TARGETS.items():
            function = jax.ffi.pycapsule(getattr(library, symbol))
            jax.ffi.register_ffi_target(target, function, platform="cpu")
        library.ed_level.restype = ctypes.c_char_p
        name = library.ed_level().decode()
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as error:
        once(
            logger,
            f"native kernels: {LIBRARY} cannot be loaded ({error}), plain XLA computes every "
            f"product; {build} compiles the library again",
            level=logging.WARNING,
        )
        return Loaded(None, f"cannot be loaded ({error}); {build} compiles the library again")
    once(logger, f"native kernels: products and attention, {name}", level=logging.INFO)
    return Loaded(name)


def describe() -> str:
    """Describe the kernels in one line: the level of instructions, or the reason why none is
    used."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "0":
        return f"native kernels: turned off by {VARIABLE}=0"
    if not _ALLOWED.get():
        return "native kernels: turned off by native_kernels of the configuration"
    if jax.default_backend() != "cpu":
        return f"native kernels: none for {jax.default_backend()}"
    name = level()
    if name is None:
        return f"native kernels: {_loaded().reason}"
    if not in_use():
        return f"native kernels: {name}, not taken on {jax.device_count()} devices"
    return f"native kernels: products and attention, {name}"
