"""Mechanisms of a model: resolved from its configuration, validated, and chosen for each call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError, unknown_name
from ed_infra.logging import get_logger, once
from flax import nnx

from ed_layers import devices
from ed_layers.attention.kernel import (
    FULL_SCORES_LIMIT,
    MECHANISMS,
    Cached,
    Call,
    CallT,
    Projected,
    Reads,
    Settings,
)
from ed_layers.attention.kernels import kernels, kernels_here

logger = get_logger(__name__)

# Slots of a row from which a single query visits only the written slots instead of scoring all.
# Measured on a CPU, whole steps of a 135M model: of 512 slots 32 written, 96 against 134 ms for 8
# rows, 216 against 345 for 32; all of them written, equal times. With fewer slots the score matrix
# is equally fast.
LONG_ROW = 256


@dataclass(frozen=True)
class Mechanism:
    """The mechanisms of one attention layer, fixed when the model is built; hashable.

    Attributes:
        name: "auto", or a key of MECHANISMS that reads projected keys and values.
        decode: the mechanism for contiguous caches; None = chosen by the number of queries.
        pages: the mechanism for the engine's pages.
        settings: kernel settings by mechanism, if they differ from `default`.
        default: kernel settings of all other mechanisms.
        dtype: dtype of q, k and v inside attention; None = unchanged.
        softmax_dtype: dtype of scores and softmax.
        dropout: probability that training drops an attention weight.
        config: the model's configuration, for its mesh and for options of single kernels.
    """

    name: str = "vanilla"
    decode: str | None = None
    pages: str = "ragged_page_attention_v3"
    settings: tuple[tuple[str, Settings], ...] = ()
    default: Settings = field(default_factory=Settings)
    dtype: jnp.dtype | None = None
    softmax_dtype: jnp.dtype = field(default=jnp.dtype("float32"))
    dropout: float = 0.0
    config: EasyDeLBaseConfig | None = field(default=None, compare=False, repr=False)

    @classmethod
    def resolve(
        cls,
        config: EasyDeLBaseConfig,
        *,
        features: frozenset[str] = frozenset(),
        dropout: float = 0.0,
    ) -> Mechanism:
        """Resolve the mechanisms of a layer, and check that they have the layer's features.

        Args:
            config: the model's configuration: `attn_mechanism`, `decode_attn_mechanism`,
                `blocksize_q`, `blocksize_k`, `platform`, `operation_configs`, `attn_dtype`,
                `attn_softmax_dtype`, and the mesh.
            features: names of FEATURES that the layer uses.
            dropout: attention dropout probability.

        Raises:
            ConfigError: a mechanism is unknown, does not read the keys of its option, lacks a
                feature, or has no kernel in the language `platform` on the model's devices.
        """
        names = {
            "attn_mechanism": config.attn_mechanism,
            "decode_attn_mechanism": config.decode_attn_mechanism,
        }
        pages = "ragged_page_attention_v3"
        for option, name in names.items():
            if name in MECHANISMS and MECHANISMS[name].reads == "pages":
                pages = name
                check_mechanism(option, pages, features - {"cross", "dropout"}, reads=("pages",))
        name, decode = (None if name == pages else name for name in names.values())
        if name is None:
            name = "auto"
            once(
                logger,
                f"attn_mechanism={pages!r} applies to the pages of the engine; training and "
                "generate() use 'auto'",
                level=logging.INFO,
            )
        needed = features | ({"dropout"} if dropout else set())
        check_mechanism("attn_mechanism", name, needed, reads=("projected",))
        if decode is not None:
            needed = features - {"dropout"}
            check_mechanism("decode_attn_mechanism", decode, needed, reads=("projected", "cache"))
        own_settings = config.operation_configs or {}
        default = Settings(config.blocksize_q, config.blocksize_k, config.platform)
        settings = {
            operation: Settings(
                operation_config.block_q or default.block_q,
                operation_config.block_k or default.block_k,
                operation_config.platform or default.platform,
                is_explicit=True,
            )
            for operation, operation_config in own_settings.items()
        }
        language = settings.get(config.attn_mechanism, default).platform
        check_language("attn_mechanism", config.attn_mechanism, language, config)
        decode_name = config.decode_attn_mechanism
        if decode_name is not None and decode_name in own_settings:
            decode_language = own_settings[decode_name].platform
            check_language("decode_attn_mechanism", decode_name, decode_language, config)
        return cls(
            name=name,
            decode=decode,
            pages=pages,
            settings=tuple(settings.items()),
            default=default,
            dtype=None if config.attn_dtype is None else jnp.dtype(config.attn_dtype),
            softmax_dtype=jnp.dtype(config.attn_softmax_dtype),
            dropout=dropout,
            config=config,
        )

    def get_settings(self, name: str) -> Settings:
        """Return the kernel settings of a mechanism."""
        return dict(self.settings).get(name, self.default)

    def replace_mechanism(self, call: CallT, name: str) -> CallT:
        """Return the call with another mechanism and its settings."""
        return replace(call, name=name, settings=self.get_settings(name))


def check_mechanism(
    option: str,
    name: str,
    needed: frozenset[str] | set[str],
    *,
    reads: tuple[Reads, ...],
) -> None:
    """Raise ConfigError unless the mechanism is known, reads the right keys and has the features.

    Args:
        option: the field of the configuration that names the mechanism, for the message.
        name: the mechanism.
        needed: names of FEATURES that the model or call uses.
        reads: the kinds of keys and values that the option allows.
    """
    if name == "auto":
        return
    if name not in MECHANISMS:
        raise unknown_name("attention mechanism", name, ["auto", *MECHANISMS])
    ability = MECHANISMS[name]
    fitting = {m: a for m, a in MECHANISMS.items() if a.reads in reads}
    if name not in fitting:
        raise ConfigError(
            f"{option}={name!r} reads {ability.reads} only; choose one of: "
            f"auto, {', '.join(fitting)}"
        )
    if missing := sorted(needed - ability.features):
        able = {m: a for m, a in MECHANISMS.items() if needed <= a.features}
        alternatives = [m for m in able if m in fitting]
        prefix = (
            ""
            if alternatives
            else f"no mechanism that reads {' or '.join(reads)} can; of the others "
        )
        raise ConfigError(
            f"{option}={name!r} cannot do {', '.join(missing)}, which this model "
            f"needs; {prefix}these can: {', '.join(alternatives or able)}"
        )


def check_language(option: str, name: str, language: str | None, config: EasyDeLBaseConfig) -> None:
    """Raise ConfigError unless a mechanism has a kernel in a language on the model's devices.

    Args:
        option: the field of the configuration that names the mechanism, for the message.
        name: the mechanism.
        language: the language of the kernel; every mechanism has None and "jax".
        config: the model's configuration.
    """
    if language in (None, "jax"):
        return
    platform = devices.get_platform(config)
    speaking = [k for k in kernels() if k.language == language]
    fitting_kernels = [
        kernel
        for kernel in speaking
        if kernel.platform == platform
        and (kernel.mechanism == name or (name == "auto" and kernel.reads == "projected"))
    ]
    if not fitting_kernels:
        reads = "projected" if name == "auto" else MECHANISMS[name].reads
        similar_kernels = [k for k in speaking if MECHANISMS[k.mechanism].reads == reads]
        listing = dict.fromkeys(f"{k.mechanism} on {k.platform}" for k in similar_kernels)
        hint = f"mechanisms with one: {', '.join(listing)}" if listing else "no mechanism has one"
        raise ConfigError(
            f"platform={language!r}: {option}={name!r} has no {language} kernel on {platform}; "
            f"{hint}. platform='jax' or None runs everywhere"
        )
    if not any(kernel.available() for kernel in fitting_kernels):
        raise ConfigError(
            f"platform={language!r}: the {language} kernel of {fitting_kernels[0].mechanism!r} "
            "needs "
            f"{fitting_kernels[0].needs}, which is not installed: pip install "
            f"{fitting_kernels[0].needs}, or omit "
            "platform"
        )


def choose(mechanism: Mechanism, call: Projected) -> str:
    """Return the mechanism of a call with projected keys; the log states once what "auto" chose."""
    if mechanism.name != "auto":
        return mechanism.name
    name, reason = resolve_auto(mechanism, call)
    platform = devices.get_platform(call.config)
    once(logger, f"attention: auto takes {name!r} on {platform}: {reason}", level=logging.INFO)
    return name


def resolve_auto(mechanism: Mechanism, call: Projected) -> tuple[str, str]:
    """Return the mechanism that "auto" chooses, and the reason for the log."""
    short = call.q.shape[1] <= FULL_SCORES_LIMIT
    # Other mechanisms would gather the blocks of a split sequence.
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
    """Return the mechanism of a call that reads a contiguous cache.

    The first rule that applies decides:

    1. `vanilla` for a mask that only the matrix of scores can have;
    2. `decode_attn_mechanism`;
    3. `autoregressive_decodeattn` for a quantized cache, and for slots split over devices;
    4. the mechanism of a platform kernel that accepts the call;
    5. `autoregressive_decodeattn` for a single query of a long row on a CPU;
    6. `vanilla` for a single query, whose score matrix has one row;
    7. `attn_mechanism` for prompts.
    """
    stored = call.stored
    if stored.mask_info.needs_matrix:
        return "vanilla"
    if mechanism.decode not in (None, "auto"):
        return mechanism.decode
    if stored.quantized or stored.sharding is not None:
        return "autoregressive_decodeattn"
    name = with_a_kernel(mechanism, call)
    if name is not None:
        return name
    if follows_context(call):
        return "autoregressive_decodeattn"
    return "vanilla" if call.q.shape[1] == 1 else choose(mechanism, call.to_projected())


def with_a_kernel(mechanism: Mechanism, call: Call) -> str | None:
    """Return the mechanism of the first platform kernel that "auto" may use for a call."""
    language = mechanism.get_settings("auto")
    for kernel in kernels_here(call):
        if kernel.platform is None or kernel.auto_from is None:
            continue
        kernel_call = mechanism.replace_mechanism(call, kernel.mechanism)
        if (
            call.q.shape[1] >= kernel.auto_from
            and language.allow(kernel.language)
            and kernel_call.settings.allow(kernel.language)
            and kernel_call.features <= MECHANISMS[kernel.mechanism].features
            and not kernel.refusals(kernel_call)
        ):
            return kernel.mechanism
    return None


def follows_context(call: Cached) -> bool:
    """Return whether one query visits only the written slots of a long row."""
    slots = call.stored.keys.shape[-2]
    if call.q.shape[1] > 1 or not call.stored.ordered or slots <= LONG_ROW:
        return False
    return call.scoring.dropout == 0 and devices.get_platform(call.config) == "cpu"


def change_configurations(
    model: nnx.Module, change: Callable[[EasyDeLBaseConfig], EasyDeLBaseConfig]
) -> None:
    """Replace each configuration of a model by a changed copy, also in its attention.

    Args:
        change: returns a changed copy, which is sealed.
    """
    changed: dict[int, EasyDeLBaseConfig] = {}

    def copy(config: EasyDeLBaseConfig) -> EasyDeLBaseConfig:
        if id(config) not in changed:
            changed[id(config)] = change(config).seal()
        return changed[id(config)]

    for _, module in nnx.iter_modules(model):
        node = cast(Any, module)
        if isinstance(config := getattr(node, "config", None), EasyDeLBaseConfig):
            node.config = copy(config)
        mechanism = getattr(node, "mechanism", None)
        if isinstance(mechanism, Mechanism) and mechanism.config is not None:
            node.mechanism = replace(mechanism, config=copy(mechanism.config))
