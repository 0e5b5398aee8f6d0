"""The compiled library: loaded and registered with XLA at the first use."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import jax
from ed_infra.errors import ConfigError
from ed_infra.forked_children import guard_forked_children
from ed_infra.logging import get_logger, once

from ed_layers import fixed_order
from ed_layers.native.build import LIBRARY, VERSION

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

logger = get_logger(__name__)

#: "0" disables the kernels; "1" also enables them on several devices, each of which then has whole
#: arrays.
VARIABLE = "ED_LAYERS_NATIVE"
#: Functions of the library, and their names in XLA. A cached program contains the names, so the
#: names contain the version of the interface.
TARGETS = {
    f"ed_{name}": f"ed_layers_{name}_{VERSION}"
    for name in (
        "product",
        "product_of_codes",
        "product_of_code_panels",
        "take",
        "gradients",
        "attention",
        "attention_back",
        "attention_cached",
        "attention_paged",
        "put",
        "first_largest",
        "rotary",
        "recurrence",
    )
}


def in_use() -> bool:
    """Return whether kernels may be used: the library is loaded and enabled, and the process has
    one CPU device, or calls are divided over devices."""
    return usable() and (fixed_order.several_devices() or on_whole_arrays())


def on_whole_arrays() -> bool:
    """Return whether kernels may be used, and every device has whole arrays: the partitioner cannot
    split a call of a library."""
    one = jax.device_count() == 1 or os.environ.get(VARIABLE) == "1" or fixed_order.in_part()
    return one and not fixed_order.several_devices() and usable()


def usable() -> bool:
    """Return whether the library is loaded and enabled."""
    if (
        os.environ.get(VARIABLE) == "0"
        or not fixed_order.KernelChoice.get_current().allowed
        or jax.default_backend() != "cpu"
    ):
        return False
    return level() is not None


def level() -> str | None:
    """Return the level of instructions that the loaded library uses; None without a library."""
    return _load_library().level


class Loaded(NamedTuple):
    """The outcome of loading: the level of instructions, or None and the reason."""

    level: str | None
    reason: str = ""


@cache
def _load_library() -> Loaded:
    """Load the library and register its functions, once per process."""
    build = "python -m ed_layers.native build"
    if not LIBRARY.exists():
        said = f"native kernels: not built, plain XLA computes every product; {build} compiles them"
        once(logger, f"{said} (some seconds, a C++ compiler)", level=logging.INFO)
        return Loaded(None, f"not built ({build})")
    # XLA defers registrations until the backend exists. The error of a deferred registration, such
    # as a newer version of the FFI, would appear as an error of the backend.
    guard_forked_children()
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
    once(logger, f"native kernels: products, attention and recurrences, {name}", level=logging.INFO)
    return Loaded(name)


def require_fixed_order(config: EasyDeLBaseConfig) -> None:
    """Raise ConfigError unless the library can compute a model's sums in one order."""
    platform = config.mesh.devices.flat[0].platform
    with fixed_order.chosen_by(config):
        reason = f"the model is on {platform}" if platform != "cpu" else describe()
        if platform == "cpu" and usable():
            return
    raise ConfigError(
        f"batch_invariant=True of a model needs the native kernels of CPUs ({reason}). The option "
        "of the same name of the engine needs no kernels"
    )


def describe() -> str:
    """Describe the kernels in one line: the level of instructions, or the reason why none is
    used."""
    setting = os.environ.get(VARIABLE, "")
    if setting == "0":
        return f"native kernels: turned off by {VARIABLE}=0"
    if not fixed_order.KernelChoice.get_current().allowed:
        return "native kernels: turned off by native_kernels of the configuration"
    if jax.default_backend() != "cpu":
        return f"native kernels: none for {jax.default_backend()}"
    name = level()
    if name is None:
        return f"native kernels: {_load_library().reason}"
    if not in_use():
        return f"native kernels: {name}, not taken on {jax.device_count()} devices"
    return f"native kernels: products, attention and recurrences, {name}"
