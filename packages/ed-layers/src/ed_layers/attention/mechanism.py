"""Which mechanisms a model uses: read off its configuration, and checked, when it is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
from ed_infra.errors import ConfigError, unknown_name
from ed_infra.logging import get_logger, once

from ed_layers import devices
from ed_layers.attention.kernel import CallT, Reads
from ed_layers.attention.kernel import Settings as Settings
from ed_layers.attention.registry import MECHANISMS, kernels

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

logger = get_logger(__name__)


@dataclass(frozen=True)
class Mechanism:
    """A resolved choice, held by the attention layer; hashable, fixed when the model is built.

    Attributes:
        name: "auto" or a key of MECHANISMS that reads what is projected.
        decode: the one that reads a contiguous cache; None = chosen by the number of queries.
        pages: the one that reads the engine's pages.
        settings: kernel settings by mechanism, where they are not `default`.
        default: those of all others.
        dtype: dtype of q, k and v inside attention; None keeps theirs.
        softmax_dtype: dtype of scores and softmax.
        dropout: probability of dropping an attention weight in training.
        config: the model's, for its mesh and for options of single kernels.
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
        """Check the configured mechanism against what the layer needs.

        Args:
            config: of the model: `attn_mechanism`, `decode_attn_mechanism`, `blocksize_q`,
                `blocksize_k`, `platform`, `operation_configs`, `attn_dtype`, `attn_softmax_dtype`,
                and the mesh.
            features: the names of FEATURES that the layer uses.
            dropout: attention dropout probability.

        Raises:
            ConfigError: a mechanism is unknown, reads something else, lacks a feature, or has no
                kernel in the language that `platform` asks for where the model runs.
        """
        names = {
            "attn_mechanism": config.attn_mechanism,
            "decode_attn_mechanism": config.decode_attn_mechanism,
        }
        pages = "ragged_page_attention_v3"
        for option, name in names.items():
            if name in MECHANISMS and MECHANISMS[name].reads == "pages":
                pages = name
                check(option, pages, features - {"cross", "dropout"}, reads=("pages",))
        name, decode = (None if name == pages else name for name in names.values())
        if name is None:
            name = "auto"
            once(
                logger,
                f"attn_mechanism={pages!r} is what the engine does over its pages; training and "
                "generate() choose for themselves, as with 'auto'",
                level=logging.INFO,
            )
        needed = features | ({"dropout"} if dropout else set())
        check("attn_mechanism", name, needed, reads=("projected",))
        if decode is not None:
            needed = features - {"dropout"}
            check("decode_attn_mechanism", decode, needed, reads=("projected", "cache"))
        own_settings = config.operation_configs or {}
        default = Settings(config.blocksize_q, config.blocksize_k, config.platform)
        settings = {
            operation: Settings(
                own.block_q or default.block_q,
                own.block_k or default.block_k,
                own.platform or default.platform,
                own=True,
            )
            for operation, own in own_settings.items()
        }
        language = settings.get(config.attn_mechanism, default).platform
        check_language("attn_mechanism", config.attn_mechanism, language, config)
        decode_name = config.decode_attn_mechanism
        if decode_name is not None and decode_name in own_settings:
            asked = own_settings[decode_name].platform
            check_language("decode_attn_mechanism", decode_name, asked, config)
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

    def settings_of(self, name: str) -> Settings:
        """Kernel settings of a mechanism."""
        return dict(self.settings).get(name, self.default)

    def named(self, call: CallT, name: str) -> CallT:
        """A call for another mechanism, with its settings."""
        return replace(call, name=name, settings=self.settings_of(name))


def check(
    option: str,
    name: str,
    needed: frozenset[str] | set[str],
    *,
    reads: tuple[Reads, ...],
) -> None:
    """Raise ConfigError unless the mechanism is known, fits its place and has the features.

    Args:
        option: the field of the configuration that names it, for the message.
        needed: the names of FEATURES that the model or call uses.
        reads: what it may read in this place.
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
        others = [m for m in able if m in fitting]
        where = "" if others else f"nothing that reads {' or '.join(reads)} can; outside of it "
        raise ConfigError(
            f"{option}={name!r} cannot do {', '.join(missing)}, which this model "
            f"needs; {where}these can: {', '.join(others or able)}"
        )


def check_language(option: str, name: str, language: str | None, config: EasyDeLBaseConfig) -> None:
    """Raise ConfigError unless a mechanism has a kernel in a language where the model runs.

    Args:
        option: the field of the configuration that names the mechanism, for the message.
        language: of the kernel; every mechanism has None and "jax".
    """
    if language in (None, "jax"):
        return
    platform = devices.platform_of(config)
    speaking = [k for k in kernels() if k.language == language]
    here = [
        kernel
        for kernel in speaking
        if kernel.platform == platform
        and (kernel.mechanism == name or (name == "auto" and kernel.reads == "projected"))
    ]
    if not here:
        others = dict.fromkeys(f"{k.mechanism} on {k.platform}" for k in speaking)
        known = f"mechanisms that have one: {', '.join(others)}" if others else "none has one"
        raise ConfigError(
            f"platform={language!r}: {option}={name!r} has no {language} kernel on {platform}; "
            f"{known}. platform='jax' or None runs everywhere"
        )
    if not any(kernel.available() for kernel in here):
        raise ConfigError(
            f"platform={language!r}: the {language} kernel of {here[0].mechanism!r} needs "
            f"{here[0].needs}, which is not installed: pip install {here[0].needs}, or leave "
            "platform out"
        )
