"""Pooling of the hidden states of a row into one vector, as in sentence-transformers.

Source: https://sbert.net/docs/package_reference/sentence_transformer, module `Pooling`.

Legend: b batch, s sequence, d hidden, n segments, m pooling modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError, unknown_name
from jaxtyping import Array, Bool, Float, Int

PoolingMode = Literal["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]
#: Alias -> mode.
POOLING_ALIASES: dict[str, PoolingMode] = {"last": "lasttoken", "weighted": "weightedmean"}


@dataclass(frozen=True)
class Pooling:
    """A pooling method.

    Attributes:
        mode: `cls`: the first token; `lasttoken`: the last token; `max` and `mean` over the tokens;
            `mean_sqrt_len_tokens`: the sum divided by the square root of the number of tokens;
            `weightedmean`: the mean in which token n of a row has weight n. The vectors of several
            modes are concatenated.
        normalize: whether vectors are normalized to length one.
    """

    mode: PoolingMode | tuple[PoolingMode, ...] = "mean"
    normalize: bool = False

    @classmethod
    def of(cls, mode: str | Sequence[str] = "mean", normalize: bool = False) -> Pooling:
        """Create a pooling method from a mode, or from several modes; aliases are allowed.

        Raises:
            ConfigError: a mode is unknown, or there is no mode.
        """
        names = (mode,) if isinstance(mode, str) else tuple(mode)
        choices = {**{name: name for name in get_args(PoolingMode)}, **POOLING_ALIASES}
        for name in names:
            if name not in choices:
                raise unknown_name("pooling mode", name, list(choices))
        modes: tuple[PoolingMode, ...] = tuple(choices[name] for name in names)
        if not modes:
            raise ConfigError(f"the pooling mode is {mode!r}: name at least one mode")
        return cls(modes[0] if len(modes) == 1 else modes, bool(normalize))

    @property
    def modes(self) -> tuple[PoolingMode, ...]:
        """The modes, in the order of their vectors."""
        return (self.mode,) if isinstance(self.mode, str) else self.mode

    def __call__(
        self,
        hidden: Float[Array, "b s d"],
        mask: Int[Array, "b s"] | None = None,
        prompt_length: Int[Array, " b"] | int | None = None,
    ) -> Float[Array, "b m*d"]:
        """Pool the tokens of each row in float32.

        Args:
            hidden: hidden states [b, s, d].
            mask: nonzero = a token, [b, s].
            prompt_length: number of tokens at the start of each row that are not pooled; None = 0.
        """
        b, s, _ = hidden.shape
        real = jnp.ones((b, s), bool) if mask is None else jnp.asarray(mask) != 0
        number = jnp.cumsum(real, axis=1)  # 1 for the first token
        if prompt_length is not None:
            real &= number > jnp.reshape(jnp.asarray(prompt_length), (-1, 1))
        hidden = hidden.astype(jnp.float32)
        vectors = [_pool_rows(mode, hidden, real, number) for mode in self.modes]
        return self.normalize_vectors(jnp.concatenate(vectors, axis=-1))

    def pool_segments(
        self,
        hidden: Float[Array, "b s d"],
        segment_ids: Int[Array, "b s"],
        segments: int,
        prompt_length: Int[Array, "b n"] | int | None = None,
    ) -> Float[Array, "b n m*d"]:
        """Pool the tokens of each segment 1 to n (`segments`) in float32; zeros if it is missing.

        Padding is segment 0. The tokens of a segment are contiguous.

        Args:
            hidden: hidden states [b, s, d].
            segment_ids: segment of each token, [b, s].
            segments: n.
            prompt_length: number of tokens at the start of each segment that are not pooled.
        """
        previous_ids = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
        index = jnp.arange(segment_ids.shape[1])
        start = jax.lax.cummax(jnp.where(segment_ids != previous_ids, index, 0), axis=1)
        number = index - start + 1
        pooled_ids = segment_ids
        if prompt_length is not None:
            lengths = jnp.broadcast_to(jnp.asarray(prompt_length), (len(segment_ids), segments))
            lengths = jnp.pad(lengths, ((0, 0), (1, 0)))  # padding has no prompt
            prompt = jnp.take_along_axis(lengths, segment_ids, axis=1)
            pooled_ids = jnp.where(number > prompt, segment_ids, 0)
        hidden = hidden.astype(jnp.float32)
        vectors = [_pool_segments(m, hidden, pooled_ids, segments, number) for m in self.modes]
        return self.normalize_vectors(jnp.concatenate(vectors, axis=-1))

    def normalize_vectors(self, vectors: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        """Return the vectors, scaled to length one if `normalize` is set."""
        return unit(vectors) if self.normalize else vectors


def unit(vectors: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Return the vectors, scaled to length one."""
    # The gradient of `norm` at 0 (a missing segment) is NaN.
    squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


def _pool_rows(
    mode: PoolingMode,
    hidden: Float[Array, "b s d"],
    real: Bool[Array, "b s"],
    number: Int[Array, "b s"],
) -> Float[Array, "b d"]:
    """Pool the tokens in `real` of each row; `number` counts the tokens of a row from 1."""
    b, s, _ = hidden.shape
    if mode == "cls":
        return hidden[jnp.arange(b), jnp.argmax(real, axis=1)]
    if mode == "lasttoken":
        return hidden[jnp.arange(b), s - 1 - jnp.argmax(real[:, ::-1], axis=1)]
    if mode == "max":
        return jnp.max(jnp.where(real[..., None], hidden, -jnp.inf), axis=1)
    weights = real.astype(jnp.float32)
    if mode == "weightedmean":
        weights = weights * number
    total = jnp.einsum("bs,bsd->bd", weights, hidden)
    count = jnp.maximum(weights.sum(axis=1, keepdims=True), 1e-9)
    return total / (jnp.sqrt(count) if mode == "mean_sqrt_len_tokens" else count)


def _pool_segments(
    mode: PoolingMode,
    hidden: Float[Array, "b s d"],
    segment_ids: Int[Array, "b s"],
    segments: int,
    number: Int[Array, "b s"],
) -> Float[Array, "b n d"]:
    """Pool the tokens of each segment; `number` counts the tokens of a segment from 1."""

    def by_segment(reduce: Callable[..., Array], values: Array) -> Array:
        def reduce_row(row: Array, ids: Array) -> Array:
            return reduce(row, ids, num_segments=segments + 1)[1:]

        return jax.vmap(reduce_row)(values.astype(jnp.float32), segment_ids)

    if mode == "max":
        maxima = by_segment(jax.ops.segment_max, hidden)
        return jnp.where(jnp.isfinite(maxima), maxima, 0.0)
    weights = jnp.ones_like(segment_ids)
    if mode == "cls":
        previous_ids = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
        weights = segment_ids != previous_ids
    elif mode == "lasttoken":
        next_ids = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
        weights = segment_ids != next_ids
    elif mode == "weightedmean":
        weights = number
    total = by_segment(jax.ops.segment_sum, hidden * weights[..., None])
    count = jnp.maximum(by_segment(jax.ops.segment_sum, weights)[..., None], 1e-9)
    return total / (jnp.sqrt(count) if mode == "mean_sqrt_len_tokens" else count)
