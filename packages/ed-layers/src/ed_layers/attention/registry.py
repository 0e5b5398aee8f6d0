"""The tables of mechanisms and kernels.

The valid values of options, the choice of "auto" and the tables of docs/attention.md follow from
these tables.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import jax
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.logging import get_logger, once

from ed_layers import devices
from ed_layers.attention.kernel import Cached, Call, Kernel, Reads
from ed_layers.attention.scoring import FEATURES

logger = get_logger(__name__)

#: Entry point group of the kernels of other packages; an entry point is a Kernel or a tuple.
GROUP = "easydel.kernels"

ALL = frozenset(FEATURES)
PAGED = frozenset(
    {"ahead", "window", "chunk", "soft_cap", "sinks", "value_dim", "alibi", "relative"}
)


@dataclass(frozen=True)
class Ability:
    """The abilities of a mechanism, which are the same on every platform.

    Attributes:
        features: names of the supported FEATURES.
        reads: source of keys and values.
        doc: one line for generated tables.
    """

    features: frozenset[str]
    reads: Reads
    doc: str


#: The names are those of `ed_infra.enums.AVAILABLE_ATTENTION_MECHANISMS`.
MECHANISMS: dict[str, Ability] = {
    "vanilla": Ability(ALL, "projected", "full score matrix; the exact reference, any feature"),
    "blockwise": Ability(
        ALL,
        "projected",
        "online softmax over key blocks, masked blocks skipped; memory linear in length",
    ),
    "ring": Ability(
        ALL - {"ahead", "relative"},
        "projected",
        "context parallelism: keys travel around the devices that split the sequence, in zig-zag "
        "order if causal",
    ),
    "flash_attn2": Ability(
        ALL, "projected", "the platform's flash attention kernel; otherwise equal to blockwise"
    ),
    "blocksparse": Ability(
        ALL - {"bias", "dropout"},
        "projected",
        "splash attention, which skips blocks outside the mask; otherwise equal to blockwise",
    ),
    "cudnn": Ability(
        ALL - {"soft_cap", "sinks", "dropout"},
        "projected",
        "cuDNN's flash attention in bfloat16 and float16; otherwise equal to blockwise",
    ),
    "sdpa": Ability(
        ALL - {"soft_cap", "sinks", "dropout"},
        "projected",
        "jax.nn.dot_product_attention in XLA, with the mask as an array",
    ),
    "autoregressive_decodeattn": Ability(
        ALL - {"dropout"},
        "cache",
        "few queries over the written part of a long cache, in parallel splits on accelerators",
    ),
    "ragged_page_attention_v3": Ability(
        PAGED, "pages", "mixed prefill and decode over pages; the engine's mechanism"
    ),
    "ragged_page_attention_v2": Ability(
        PAGED,
        "pages",
        "another name of ragged_page_attention_v3, because jax has one such kernel",
    ),
    "page_attention": Ability(
        PAGED,
        "pages",
        "another name of ragged_page_attention_v3, which includes decoding of single tokens",
    ),
}


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
    installed = (k for point in entry_points(group=GROUP) for k in kernels_of_entry(point))
    return (*installed, *built_in())


def kernels_of_entry(point: EntryPoint) -> Iterator[Kernel[Any]]:
    """Yield the validated kernels of one entry point."""
    source = f"the entry point {point.name!r} = {point.value!r} of {GROUP}"
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
    readable_kernels = [k for k in kernels() if k.reads == call.reads and k.available()]
    return [k for k in readable_kernels if k.platform == platform] + [
        k for k in readable_kernels if k.platform is None
    ]


def run(call: Call) -> jax.Array:
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
            return kernel.run(call)
        refused.append(f"{kernel.title} does not support {', '.join(refusals)}")
    if isinstance(call, Cached):
        return run(call.to_projected())
    raise ConfigError(f"no kernel of {call.name!r} supports the call: {'; '.join(refused)}")


def tell(call: Call, kernel: Kernel[Any], refused: list[str]) -> None:
    """Log once which kernel runs, and why the preceding kernels do not."""
    # A kernel in another language than the configured one is worth a warning.
    ignored = call.settings.platform not in (None, kernel.language)
    message = f"attention: {call.name!r} runs {kernel.title}"
    level = logging.WARNING if ignored else logging.INFO
    once(logger, "; ".join([message, *refused]), level=level)
