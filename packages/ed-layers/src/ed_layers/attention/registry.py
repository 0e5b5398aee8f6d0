"""The table of mechanisms and the table of kernels, from which everything else is derived: what a
configuration may ask for, what "auto" takes, what runs, and the tables of docs/attention.md."""

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

#: Entry points of this group are kernels of other packages: each names a Kernel, or several.
GROUP = "easydel.kernels"

ALL = frozenset(FEATURES)
PAGED = frozenset({"window", "chunk", "soft_cap", "sinks", "value_dim", "alibi", "relative"})


@dataclass(frozen=True)
class Ability:
    """What a mechanism promises; the same on every platform.

    Attributes:
        features: the names of FEATURES that it computes.
        reads: where its keys and values are.
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
        ALL - {"relative"},
        "projected",
        "context parallelism: keys go round the devices that split the sequence, zig-zag if causal",
    ),
    "flash_attn2": Ability(
        ALL, "projected", "flash attention by the kernel of the platform; elsewhere as blockwise"
    ),
    "blocksparse": Ability(
        ALL - {"bias", "dropout"},
        "projected",
        "splash attention: blocks outside the mask are skipped; elsewhere as blockwise",
    ),
    "cudnn": Ability(
        ALL - {"soft_cap", "sinks", "dropout"},
        "projected",
        "cuDNN's flash attention in bfloat16 and float16; elsewhere as blockwise",
    ),
    "sdpa": Ability(
        ALL - {"soft_cap", "sinks", "dropout"},
        "projected",
        "jax.nn.dot_product_attention in XLA, with the mask as an array",
    ),
    "autoregressive_decodeattn": Ability(
        ALL - {"dropout"},
        "cache",
        "few queries to a long cache: as much of it as is written, by splits on accelerators",
    ),
    "ragged_page_attention_v3": Ability(
        PAGED, "pages", "mixed prefill and decode over pages; the engine's mechanism"
    ),
    "ragged_page_attention_v2": Ability(
        PAGED,
        "pages",
        "another name of ragged_page_attention_v3: jax ships one such kernel",
    ),
    "page_attention": Ability(
        PAGED,
        "pages",
        "another name of ragged_page_attention_v3: decode is the case of one token a sequence",
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
    """All kernels: those that were installed, in the order of their entry points, then our own.

    Raises:
        ConfigError: an entry point cannot be imported, or names something else than kernels of
            known mechanisms.
    """
    installed = (k for point in entry_points(group=GROUP) for k in kernels_of_entry(point))
    return (*installed, *built_in())


def kernels_of_entry(point: EntryPoint) -> Iterator[Kernel[Any]]:
    """The kernels of one entry point, checked."""
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
                f"{source} names {kernel!r}; it should name a Kernel of "
                "ed_layers.attention.kernel, or a tuple of them"
            )
        if kernel.mechanism not in MECHANISMS:
            raise ConfigError(
                f"{source} is a kernel of {kernel.mechanism!r}, which is no mechanism"
                f"{did_you_mean(kernel.mechanism, MECHANISMS)} (known: {', '.join(MECHANISMS)})"
            )
        yield kernel


def kernels_here(call: Call) -> list[Kernel[Any]]:
    """The kernels that read what a call reads, where its model runs; those of the platform first.

    Plain XLA is always among them: it is the last resort of every mechanism, whatever language the
    settings ask for.
    """
    platform = devices.platform_of(call.config)
    own = [k for k in kernels() if k.reads == call.reads and k.available()]
    return [k for k in own if k.platform == platform] + [k for k in own if k.platform is None]


def run(call: Call) -> jax.Array:
    """Compute a call by the first kernel of its mechanism that takes it; says once which.

    What no kernel over a cache takes is read as if it were projected.
    """
    refused: list[str] = []
    for kernel in kernels_here(call):
        of_platform = kernel.platform is not None
        if kernel.mechanism != call.name or (
            of_platform and not call.settings.allow(kernel.language)
        ):
            continue
        refusals = kernel.refusals(call)
        if not refusals:
            if of_platform or refused:
                tell(call, kernel, refused)
            return kernel.run(call)
        refused.append(f"{kernel.title} does not take {', '.join(refusals)}")
    if isinstance(call, Cached):
        return run(call.projected())
    raise ConfigError(f"no kernel of {call.name!r} takes the call: {'; '.join(refused)}")


def tell(call: Call, kernel: Kernel[Any], refused: list[str]) -> None:
    """Say once which kernel runs, and why no other."""
    # Whoever asks for a language is told more loudly that another one runs.
    ignored = call.settings.platform not in (None, kernel.language)
    message = f"attention: {call.name!r} runs {kernel.title}"
    level = logging.WARNING if ignored else logging.INFO
    once(logger, "; ".join([message, *refused]), level=level)
