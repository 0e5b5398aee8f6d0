"""The compiled library: loaded and registered with XLA at the first use."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from ed_infra.errors import ConfigError
from ed_infra.forked_children import guard_forked_children
from ed_infra.logging import get_logger, once

from ed_layers import fixed_order
from ed_layers.native.build import LIBRARY, VERSION
from ed_layers.ordered_program import round_operations

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


_ALLOWED = ContextVar("native kernels are allowed", default=True)


@contextmanager
def chosen_by(config: EasyDeLBaseConfig) -> Iterator[None]:
    """Trace the block with the kernels of a configuration: none with `native_kernels: false`, and
    kernels for every size with `batch_invariant: true`."""
    token = _ALLOWED.set(config.native_kernels and _ALLOWED.get())
    try:
        with fixed_order.chosen_by(config):
            yield
    finally:
        _ALLOWED.reset(token)


class KernelChoice(NamedTuple):
    """The choice of `chosen_by`, a static argument of functions with a gradient.

    jax may trace the forward pass of such a function after the block of `chosen_by`.
    """

    allowed: bool
    ordered: EasyDeLBaseConfig | None

    @classmethod
    def get_current(cls) -> KernelChoice:
        """Return the present choice."""
        return cls(_ALLOWED.get(), fixed_order.get_active_config())

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Trace the block with this choice."""
        token = _ALLOWED.set(self.allowed)
        try:
            with fixed_order.restore_config(self.ordered):
                yield
        finally:
            _ALLOWED.reset(token)

    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of trees of arrays that is always traced with this choice."""

        def call_with_choice(*arguments: object) -> Any:
            with self.restore():
                if self.ordered is None:
                    return function(*arguments)
                return round_operations(function)(*arguments)

        return call_with_choice


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
    if os.environ.get(VARIABLE) == "0" or not _ALLOWED.get() or jax.default_backend() != "cpu":
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
    with chosen_by(config):
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
    if not _ALLOWED.get():
        return "native kernels: turned off by native_kernels of the configuration"
    if jax.default_backend() != "cpu":
        return f"native kernels: none for {jax.default_backend()}"
    name = level()
    if name is None:
        return f"native kernels: {_load_library().reason}"
    if not in_use():
        return f"native kernels: {name}, not taken on {jax.device_count()} devices"
    return f"native kernels: products, attention and recurrences, {name}"
