"""The table of attention mechanisms, and the choice of one when a model is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from ed_infra.errors import ConfigError, unknown_name

# What a layer may ask of attention beyond q, k, v and a mask.
FEATURES = ("window", "chunk", "soft_cap", "sinks", "bias", "dropout")


@dataclass(frozen=True)
class Ability:
    """What a mechanism can do; the same on every platform.

    Attributes:
        features: the names of FEATURES it carries out.
        paged: it reads the paged cache of the engine.
        doc: one line for error messages and generated tables.
    """

    features: frozenset[str]
    paged: bool
    doc: str


MECHANISMS: dict[str, Ability] = {
    "vanilla": Ability(
        frozenset(FEATURES), paged=False, doc="full score matrix; exact reference, any feature"
    ),
    "blockwise": Ability(
        frozenset({"window", "chunk", "soft_cap"}),
        paged=False,
        doc="online softmax over key blocks, masked blocks skipped; memory linear in length",
    ),
    "ragged_page_attention_v3": Ability(
        frozenset({"window", "chunk", "soft_cap"}),
        paged=True,
        doc="mixed prefill and decode over pages; the engine's mechanism",
    ),
}

# "auto" leaves the score matrix to be materialised up to this many query tokens.
AUTO_VANILLA_LIMIT = 512


@dataclass(frozen=True)
class Mechanism:
    """A resolved choice, held by the attention layer; hashable, fixed when the model is built.

    Attributes:
        name: "auto" or a key of MECHANISMS.
        decode: the one that reads a contiguous cache; None = chosen by the number of queries.
        block_q, block_k: block sizes of `blockwise`.
        dtype: dtype of q, k and v inside attention; None keeps theirs.
        softmax_dtype: dtype of scores and softmax.
        dropout: probability of dropping an attention weight in training.
    """

    name: str = "vanilla"
    decode: str | None = None
    block_q: int = 128
    block_k: int = 128
    dtype: Any = None
    softmax_dtype: Any = jnp.float32
    dropout: float = 0.0

    @classmethod
    def resolve(
        cls, config: Any, *, features: frozenset[str] = frozenset(), dropout: float = 0.0
    ) -> Mechanism:
        """Check the configured mechanism against what the layer needs.

        Args:
            config: an EasyDeLBaseConfig (`attn_mechanism`, `decode_attn_mechanism`, `blocksize_q`,
                `blocksize_k`, `operation_configs`, `attn_dtype`, `attn_softmax_dtype`).
            features: the names of FEATURES that the layer uses.
            dropout: attention dropout probability.

        Raises:
            ConfigError: the mechanism is unknown, needs the engine's pages, or lacks a feature.
        """
        name, decode = config.attn_mechanism, config.decode_attn_mechanism
        needed = features | ({"dropout"} if dropout else set())
        check("attn_mechanism", name, needed)
        if decode == "ragged_page_attention_v3":  # what the engine does in any case
            decode = None
        elif decode is not None:
            check("decode_attn_mechanism", decode, features)
        blocks = (config.operation_configs or {}).get("blockwise")
        return cls(
            name=name,
            decode=decode,
            block_q=(blocks and blocks.block_q) or config.blocksize_q,
            block_k=(blocks and blocks.block_k) or config.blocksize_k,
            dtype=None if config.attn_dtype is None else jnp.dtype(config.attn_dtype),
            softmax_dtype=jnp.dtype(config.attn_softmax_dtype),
            dropout=dropout,
        )

    def pick(self, q_len: int, asked: frozenset[str], cached: bool = False) -> str:
        """The mechanism for this call: by length where the config says "auto".

        Args:
            q_len: queries of each row.
            asked: the names of FEATURES that the call uses.
            cached: keys and values come from a contiguous cache. One query has a score matrix of
                one row, so only `decode_attn_mechanism` takes it away from "vanilla".
        """
        name = self.name
        if cached:
            named = name if name != "auto" and q_len > 1 else "vanilla"
            name = self.decode or named
        if name != "auto":
            return name
        if asked <= MECHANISMS["blockwise"].features and q_len > AUTO_VANILLA_LIMIT:
            return "blockwise"
        return "vanilla"


def check(field: str, name: str, needed: frozenset[str] | set[str]) -> None:
    """Raise ConfigError unless the mechanism is known, works without pages and has the features."""
    if name == "auto":
        return
    if name not in MECHANISMS:
        raise unknown_name("attention mechanism", name, ["auto", *MECHANISMS])
    ability = MECHANISMS[name]
    if ability.paged:
        raise ConfigError(
            f"{field}={name!r} works on the engine's pages only; choose "
            "'auto', 'vanilla' or 'blockwise' for training and generate()"
        )
    if missing := sorted(needed - ability.features):
        able = [m for m, a in MECHANISMS.items() if needed <= a.features and not a.paged]
        raise ConfigError(
            f"{field}={name!r} cannot do {', '.join(missing)}, which this model "
            f"needs; these can: {', '.join(able)}"
        )
