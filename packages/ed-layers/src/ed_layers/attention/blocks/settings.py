"""The properties in which attention blocks differ: positions, mask, norms and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flax import nnx

from ed_layers.attention.scoring import Alibi
from ed_layers.context import ALL_LAYERS


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of queries and keys.

    Attributes:
        kind: name of the rotary tables in `Ctx.rope`: a layer type if `rope_parameters` has an
            entry per type, otherwise `ALL_LAYERS`.
        interleaved: rotary pairs are adjacent elements instead of halves.
    """

    kind: str = ALL_LAYERS
    interleaved: bool = False


@dataclass(frozen=True)
class RelativeBuckets:
    """A trained bias per bucket of distances (T5). All layers share the table `Ctx.buckets`.

    Attributes:
        max_distance: distances from here on share the last bucket.
    """

    max_distance: int = 128


@dataclass(frozen=True)
class Disentangled:
    """Scores between contents and relative positions (DeBERTa). `Ctx.buckets` is the table [n, d].

    `ScoreRule.scale` also multiplies the scores of the terms.

    Attributes:
        buckets: number of buckets of one direction; 0 or less = one per distance.
        max_distance: the distance at which the last bucket starts.
        terms: "c2p": the queries of tokens read the keys of positions; "p2c": the queries of
            positions read the keys of tokens.
        shared: whether the projections of tokens also project the table.
    """

    buckets: int
    max_distance: int
    terms: tuple[Literal["c2p", "p2c"], ...] = ("c2p", "p2c")
    shared: bool = True

    @property
    def span(self) -> int:
        """Half the number of rows of the table."""
        return self.buckets if self.buckets > 0 else self.max_distance


#: How a layer encodes positions; None = not at all, or in the embeddings.
Position = Rotary | Alibi | RelativeBuckets | Disentangled | None


@dataclass(frozen=True)
class MaskRule:
    """Which tokens of its own segment a token attends to.

    Attributes:
        causal: only to itself and earlier tokens.
        window: only to the last `window` tokens, including itself.
        chunk: only to its own chunk of `chunk` positions (Llama 4).
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class QKNorm:
    """Norms of queries and keys, and a bound of their elements.

    Attributes:
        make: creates the norms `q_norm` and `k_norm` from the shape of the weights; None = no norm.
        heads: "each": each head is normalized separately, all heads share the weights [k]; "own":
            each head is normalized separately with its weights of [h, k]; "all": all heads are
            normalized together, with weights [h * k].
        last: apply the norms after the rotary positions instead of before.
        clip: clip queries, keys and values to [-clip, clip] (OLMo, DBRX), after a norm over all
            heads (OLMoE).
    """

    make: Callable[..., nnx.Module] | None = None
    heads: Literal["each", "own", "all"] = "each"
    last: bool = False
    clip: float | None = None


@dataclass(frozen=True)
class ScoreRule:
    """The scores of queries and keys.

    Attributes:
        scale: factor on the scores; None = `head_dim ** -0.5`.
        soft_cap: bound of the scores (Gemma 2).
        sinks: the softmax includes a trained logit per head (gpt-oss).
    """

    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
