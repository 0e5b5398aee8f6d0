"""Which mechanism a call takes where the configuration names none: by shape, mesh and kernel."""

from __future__ import annotations

import logging

from ed_infra.logging import get_logger, once

from ed_layers import devices
from ed_layers.attention.kernel import FULL_SCORES_LIMIT, Cached, Call, Projected
from ed_layers.attention.kernels import decode
from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.registry import MECHANISMS, kernels_here

logger = get_logger(__name__)

# Slots of a row from which a single query goes over what is written instead of scoring every slot.
# Measured on a CPU, whole steps of a 135M model: of 512 slots 32 written, 96 against 134 ms for 8
# rows, 216 against 345 for 32; all of them written, a tie. With fewer slots the score matrix is as
# fast.
LONG_ROW = 256


def choose(mechanism: Mechanism, call: Projected) -> str:
    """The mechanism of a call that reads what is projected; says once what "auto" took."""
    if mechanism.name != "auto":
        return mechanism.name
    name, why = chosen(mechanism, call)
    platform = devices.platform_of(call.config)
    once(logger, f"attention: auto takes {name!r} on {platform}: {why}", level=logging.INFO)
    return name


def chosen(mechanism: Mechanism, call: Projected) -> tuple[str, str]:
    """The mechanism that "auto" takes, and in words why."""
    short = call.q.shape[1] <= FULL_SCORES_LIMIT
    # Blocks of a split sequence would be gathered.
    split = devices.sequence_axes(call.config) is not None
    if split and not short and call.features <= MECHANISMS["ring"].features:
        return "ring", "the mesh splits the sequence"
    name = with_a_kernel(mechanism, call)
    if name is not None:
        return name, "its kernel fits"
    if short:
        return "vanilla", f"at most {FULL_SCORES_LIMIT} queries"
    return "blockwise", f"more than {FULL_SCORES_LIMIT} queries"


def choose_for_cache(mechanism: Mechanism, call: Cached) -> str:
    """The mechanism of a call that reads a contiguous cache.

    Where `decode_attn_mechanism` says nothing, `autoregressive_decodeattn` reads a cache that is
    quantized or split over devices along its slots, and on a CPU a single query of a long row.
    Else one query has a score matrix of one row, which is "vanilla", and a prompt goes by
    `attn_mechanism`. A kernel of the platform that takes the call goes before all of these but a
    name.
    """
    if mechanism.decode not in (None, "auto"):
        return mechanism.decode
    stored = call.stored
    if stored.quantized or stored.sharding is not None:
        return decode.NAME
    name = with_a_kernel(mechanism, call)
    if name is not None:
        return name
    if follows_context(call):
        return decode.NAME
    return "vanilla" if call.q.shape[1] == 1 else choose(mechanism, call.projected())


def with_a_kernel(mechanism: Mechanism, call: Call) -> str | None:
    """The mechanism of the first kernel of the platform that "auto" may take for a call."""
    language = mechanism.settings_of("auto")
    for kernel in kernels_here(call):
        if kernel.platform is None or kernel.auto_from is None:
            continue
        own = mechanism.named(call, kernel.mechanism)
        if (
            call.q.shape[1] >= kernel.auto_from
            and language.allow(kernel.language)
            and own.settings.allow(kernel.language)
            and own.features <= MECHANISMS[kernel.mechanism].features
            and not kernel.refusals(own)
        ):
            return kernel.mechanism
    return None


def follows_context(call: Cached) -> bool:
    """Whether one query goes over what is written of a long row, not over all of its slots."""
    slots = call.stored.keys.shape[-2]
    if call.q.shape[1] > 1 or not call.stored.ordered or slots <= LONG_ROW:
        return False
    return call.scoring.dropout == 0 and devices.platform_of(call.config) == "cpu"
