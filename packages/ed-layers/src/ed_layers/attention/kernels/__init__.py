"""Kernels of attention: the list of all kernels, and the choice of one for a call."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import jax
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.logging import get_logger, once

from ed_layers import devices
from ed_layers.attention.kernel import MECHANISMS, Cached, Call, Kernel
from ed_layers.fixed_order import KernelChoice

logger = get_logger(__name__)

#: Entry point group of the kernels of other packages; an entry point is a Kernel or a tuple.
KERNEL_GROUP = "easydel.kernels"


@cache
def built_in() -> tuple[Kernel[Any], ...]:
    """Return the kernels of this package: those of a platform before those of plain XLA.

    The kernels of one mechanism are tried in this order. They are imported at the first call,
    so the import of a model does not import them.
    """
    from ed_layers.attention.kernels import (
        blockwise,
        decode,
        flash_tpu,
        gpu,
        native,
        packed_gpu,
        paged,
        paged_gpu,
        paged_tpu,
        ring,
        sdpa,
        splash,
        vanilla,
    )

    return (
        *flash_tpu.KERNELS,
        *splash.KERNELS,
        *paged_tpu.KERNELS,
        *paged_gpu.KERNELS,
        *gpu.KERNELS,
        *packed_gpu.KERNELS,
        *native.KERNELS,
        *vanilla.KERNELS,
        *blockwise.KERNELS,
        *ring.KERNELS,
        *sdpa.KERNELS,
        *decode.KERNELS,
        *paged.KERNELS,
    )


@cache
def kernels() -> tuple[Kernel[Any], ...]:
    """Return the kernels of installed packages in the order of their entry points, then `built_in`.

    Raises:
        ConfigError: an entry point cannot be imported, or is not a kernel of a known mechanism.
    """
    installed = (k for point in entry_points(group=KERNEL_GROUP) for k in kernels_of_entry(point))
    return (*installed, *built_in())


def kernels_of_entry(point: EntryPoint) -> Iterator[Kernel[Any]]:
    """Yield the validated kernels of one entry point."""
    source = f"the entry point {point.name!r} = {point.value!r} of {KERNEL_GROUP}"
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{source} cannot be loaded: {error}; repair or uninstall the package that declares it"
        ) from error
    for kernel in loaded if isinstance(loaded, Iterable) else (loaded,):
        if not isinstance(kernel, Kernel):
            raise ConfigError(
                f"{source} is {kernel!r}; it must be a Kernel of ed_layers.attention.kernel, or a "
                "tuple of kernels"
            )
        if kernel.mechanism not in MECHANISMS:
            raise ConfigError(
                f"{source} is a kernel of {kernel.mechanism!r}, which is not a mechanism"
                f"{did_you_mean(kernel.mechanism, MECHANISMS)} (known: {', '.join(MECHANISMS)})"
            )
        yield kernel


def kernels_here(call: Call) -> list[Kernel[Any]]:
    """Return the available kernels for a call, those of the model's platform before plain XLA.

    The result always includes plain XLA, which is the fallback for every setting of the language.
    """
    platform = devices.get_platform(call.config)
    readable_kernels = [k for k in kernels() if k.reads == call.reads]
    return [
        kernel
        for place in (platform, None)
        for kernel in readable_kernels
        if kernel.platform == place and kernel.available()
    ]


def run_chosen_kernel(call: Call) -> jax.Array:
    """Run the first kernel of the mechanism that supports a call, and log the kernel once.

    If no kernel reads the cache, the kernels for projected keys read the stored keys.
    """
    refused: list[str] = []
    for kernel in kernels_here(call):
        is_platform_kernel = kernel.platform is not None
        if kernel.mechanism != call.name or (
            is_platform_kernel and not call.settings.allow(kernel.language)
        ):
            continue
        refusals = kernel.refusals(call)
        if not refusals:
            if is_platform_kernel or refused:
                tell(call, kernel, refused)
            KernelChoice.note("attention", kernel, call)
            return kernel.run(call)
        refused.append(f"{kernel.title} does not support {', '.join(refusals)}")
    if isinstance(call, Cached):
        return run_chosen_kernel(call.to_projected())
    raise ConfigError(f"no kernel of {call.name!r} supports the call: {'; '.join(refused)}")


def tell(call: Call, kernel: Kernel[Any], refused: list[str]) -> None:
    """Log once which kernel runs, and why the preceding kernels do not."""
    # A kernel in another language than the configured one is worth a warning.
    ignored = call.settings.platform not in (None, kernel.language)
    message = f"attention: {call.name!r} runs {kernel.title}"
    level = logging.WARNING if ignored else logging.INFO
    once(logger, "; ".join([message, *refused]), level=level)
