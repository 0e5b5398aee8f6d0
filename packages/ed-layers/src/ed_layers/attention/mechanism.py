"""The table of attention mechanisms, and the choice of one when a model is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp
from ed_infra.errors import ConfigError, unknown_name
from ed_infra.logging import get_logger, once

from ed_layers.attention.hardware import has_tokamax, platform_of
from ed_layers.attention.scoring import FEATURES

logger = get_logger(__name__)

#: What a mechanism reads: "projected" keys and values of the same call (training, and prompts too),
#: a contiguous "cache", or the engine's "pages".
Reads = Literal["projected", "cache", "pages"]

ALL = frozenset(FEATURES)

#: What every mechanism over pages can do.
PAGED_FEATURES = frozenset({"window", "chunk", "soft_cap", "sinks", "value_dim"})


@dataclass(frozen=True)
class Ability:
    """What a mechanism can do; the same on every platform.

    Attributes:
        features: the names of FEATURES that it carries out.
        reads: where its keys and values are.
        doc: one line for error messages and generated tables.
        kernels: its native kernels, as (platform of the devices, language of the kernel); where it
            has none, or the kernel cannot take a call, plain XLA computes the same.
    """

    features: frozenset[str]
    reads: Reads
    doc: str
    kernels: tuple[tuple[str, str], ...] = ()


#: What each can do; `ed_layers.attention.dispatch` says which function does it.
MECHANISMS: dict[str, Ability] = {
    "vanilla": Ability(
        ALL,
        "projected",
        "full score matrix; the exact reference, any feature",
    ),
    "blockwise": Ability(
        ALL,
        "projected",
        "online softmax over key blocks, masked blocks skipped; memory linear in length",
    ),
    "ring": Ability(
        ALL,
        "projected",
        "context parallelism: keys go round the devices that split the sequence, zig-zag if causal",
    ),
    "flash_attn2": Ability(
        ALL,
        "projected",
        "flash attention by the kernel of the platform; elsewhere as blockwise",
        (("tpu", "pallas"), ("gpu", "triton")),
    ),
    "blocksparse": Ability(
        ALL - {"bias", "dropout"},
        "projected",
        "splash attention: blocks outside the mask are skipped; elsewhere as blockwise",
        (("tpu", "pallas"),),
    ),
    "cudnn": Ability(
        ALL - {"soft_cap", "sinks", "dropout"},
        "projected",
        "cuDNN's flash attention in bfloat16 and float16; elsewhere as blockwise",
        (("gpu", "cudnn"),),
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
        PAGED_FEATURES,
        "pages",
        "mixed prefill and decode over pages; the engine's mechanism",
        (("tpu", "pallas"),),
    ),
    "ragged_page_attention_v2": Ability(
        PAGED_FEATURES,
        "pages",
        "another name of ragged_page_attention_v3: jax ships one such kernel",
        (("tpu", "pallas"),),
    ),
    "page_attention": Ability(
        PAGED_FEATURES,
        "pages",
        "another name of ragged_page_attention_v3: decode is the case of one token a sequence",
        (("tpu", "pallas"),),
    ),
}


@dataclass(frozen=True)
class Settings:
    """Kernel settings of one mechanism.

    Attributes:
        block_q, block_k: tokens per block; None leaves the choice to the mechanism.
        platform: language of its kernel ("jax", "triton" or "pallas"); None = the best there is.
    """

    block_q: int | None = None
    block_k: int | None = None
    platform: str | None = None


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
        config: the model's, for its mesh and what single mechanisms are configured by.
    """

    name: str = "vanilla"
    decode: str | None = None
    pages: str = "ragged_page_attention_v3"
    settings: tuple[tuple[str, Settings], ...] = ()
    default: Settings = Settings()
    dtype: Any = None
    softmax_dtype: Any = jnp.float32
    dropout: float = 0.0
    config: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def resolve(
        cls, config: Any, *, features: frozenset[str] = frozenset(), dropout: float = 0.0
    ) -> Mechanism:
        """Check the configured mechanism against what the layer needs.

        Args:
            config: an EasyDeLBaseConfig (`attn_mechanism`, `decode_attn_mechanism`, `blocksize_q`,
                `blocksize_k`, `platform`, `operation_configs`, `attn_dtype`, `attn_softmax_dtype`,
                and the mesh).
            features: the names of FEATURES that the layer uses.
            dropout: attention dropout probability.

        Raises:
            ConfigError: a mechanism is unknown, reads something else, lacks a feature, or has no
                kernel in the language that `platform` asks for where the model runs.
        """
        name, decode = config.attn_mechanism, config.decode_attn_mechanism
        pages = "ragged_page_attention_v3"
        for field_name, given in (("attn_mechanism", name), ("decode_attn_mechanism", decode)):
            if given in MECHANISMS and MECHANISMS[given].reads == "pages":
                pages = given
                check(field_name, pages, features - {"cross", "dropout"}, reads=("pages",))
        if name == pages:
            name = "auto"
            once(
                logger,
                f"attn_mechanism={pages!r} is what the engine does over its pages; training and "
                "generate() choose for themselves, as with 'auto'",
                level=logging.INFO,
            )
        decode = None if decode == pages else decode
        needed = features | ({"dropout"} if dropout else set())
        check("attn_mechanism", name, needed, reads=("projected",))
        if decode is not None:
            needed = features - {"dropout"}
            check("decode_attn_mechanism", decode, needed, reads=("projected", "cache"))
        default = Settings(config.blocksize_q, config.blocksize_k, config.platform)
        settings = {
            operation: Settings(
                given.block_q or default.block_q,
                given.block_k or default.block_k,
                given.platform or default.platform,
            )
            for operation, given in (config.operation_configs or {}).items()
        }
        language = settings.get(config.attn_mechanism, default).platform
        check_language("attn_mechanism", config.attn_mechanism, language, config)
        if (own := (config.operation_configs or {}).get(config.decode_attn_mechanism)) is not None:
            given = config.decode_attn_mechanism
            check_language("decode_attn_mechanism", given, own.platform, config)
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

    def blocks(self, name: str, s: int, t: int) -> tuple[int, int]:
        """Queries and keys per block of a mechanism, not more than there are."""
        settings = self.settings_of(name)
        return min(settings.block_q or 128, s), min(settings.block_k or 128, t)


def check(
    field_name: str,
    name: str,
    needed: frozenset[str] | set[str],
    *,
    reads: tuple[Reads, ...],
) -> None:
    """Raise ConfigError unless the mechanism is known, fits its place and has the features."""
    if name == "auto":
        return
    if name not in MECHANISMS:
        raise unknown_name("attention mechanism", name, ["auto", *MECHANISMS])
    ability = MECHANISMS[name]
    fitting = {m: a for m, a in MECHANISMS.items() if a.reads in reads}
    if name not in fitting:
        raise ConfigError(
            f"{field_name}={name!r} reads {ability.reads} only; choose one of: "
            f"auto, {', '.join(fitting)}"
        )
    if missing := sorted(needed - ability.features):
        able = {m: a for m, a in MECHANISMS.items() if needed <= a.features}
        others = [m for m in able if m in fitting]
        where = "" if others else f"nothing that reads {' or '.join(reads)} can; outside of it "
        raise ConfigError(
            f"{field_name}={name!r} cannot do {', '.join(missing)}, which this model "
            f"needs; {where}these can: {', '.join(others or able)}"
        )


def check_language(field_name: str, name: str, language: str | None, config: Any) -> None:
    """Raise ConfigError unless a mechanism has a kernel in a language where the model runs.

    Args:
        language: of the kernel; None and "jax" are had by all.
    """
    if language in (None, "jax"):
        return
    speak = {
        m: [p for p, its in a.kernels if its == language]
        for m, a in MECHANISMS.items()
        if name != "auto" or a.reads == "projected"
    }
    platforms = {p for ps in speak.values() for p in ps} if name == "auto" else set(speak[name])
    platform = platform_of(config)
    if platform not in platforms:
        able = "; ".join(f"{m} on {' and '.join(ps)}" for m, ps in speak.items() if ps)
        raise ConfigError(
            f"platform={language!r}: {field_name}={name!r} has no {language} kernel on {platform}. "
            f"Such kernels have: {able}. platform='jax' or None runs everywhere"
        )
    if language == "triton" and not has_tokamax():
        raise ConfigError(
            f"platform='triton': the Triton kernel of {name!r} is tokamax's, which is not "
            "installed: pip install tokamax, or leave platform out"
        )
