"""SpecAugment (Park et al. 2019): training masks random spans of time steps and of features.

Legend: b batch, t time steps, d features, n entries of an axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from jaxtyping import Array, Bool, Int


class Masks(NamedTuple):
    """Which time steps [b, t, 1] and which features [b, 1, d] are masked."""

    time: Bool[Array, "b t 1"]
    feature: Bool[Array, "b 1 d"]


@dataclass(frozen=True)
class Spans:
    """Random spans of one axis; the names are those of Hugging Face's `mask_time_*`.

    Attributes:
        prob: the share of the axis that spans would cover if they did not overlap.
        length: entries of a span.
        min_masks: the least number of spans of a row.
    """

    prob: float
    length: int
    min_masks: int

    def mask(self, key: jax.Array, lengths: Int[Array, " b"], size: int) -> Bool[Array, "b n"]:
        """Draw the masked entries of each row.

        Args:
            key: random key.
            lengths: entries of each row; later entries are padding, and get no span.
            size: n, the entries of a padded row.
        """
        rows = lengths.shape[0]
        if self.prob <= 0 or self.length > size:
            return jnp.zeros((rows, size), bool)
        order, rounding = jax.random.split(key)
        starts = size - self.length + 1
        # The number of spans is rounded up with the probability of its fraction.
        count = self.prob * lengths / self.length + jax.random.uniform(rounding)
        count = jnp.maximum(count.astype(jnp.int32), self.min_masks)
        most = jnp.minimum(size // self.length, jnp.maximum(lengths - self.length + 1, 0))
        count = jnp.minimum(count, most)
        draws = jax.random.uniform(order, (rows, starts))
        draws = jnp.where(jnp.arange(starts) <= (lengths - self.length)[:, None], draws, 2.0)
        rank = jnp.argsort(jnp.argsort(draws, axis=1), axis=1)
        begins = (rank < count[:, None]).astype(jnp.int32)
        change = jnp.pad(begins, ((0, 0), (0, self.length)))
        change = change - jnp.pad(begins, ((0, 0), (self.length, 0)))
        return jnp.cumsum(change, axis=1)[:, :size] > 0


@dataclass(frozen=True)
class SpecAugment:
    """The masks of time steps and of features."""

    time: Spans
    feature: Spans

    @classmethod
    def of(cls, config: EasyDeLBaseConfig) -> Self:
        """Read `mask_time_prob`, `mask_time_length`, `mask_time_min_masks`, `mask_feature_...`."""

        def spans(axis: str) -> Spans:
            return Spans(
                *(
                    getattr(config, f"mask_{axis}_{name}")
                    for name in ("prob", "length", "min_masks")
                )
            )

        return cls(spans("time"), spans("feature"))

    def masks(
        self,
        key: jax.Array,
        shape: tuple[int, ...],
        lengths: Int[Array, " b"] | None = None,
    ) -> Masks:
        """Draw the masks of a batch.

        Args:
            key: random key.
            shape: (b, t, d).
            lengths: time steps of each row; None = t.
        """
        b, t, d = shape
        time, feature = jax.random.split(key)
        feature_lengths = jnp.full((b,), d, jnp.int32)
        lengths = jnp.full((b,), t, jnp.int32) if lengths is None else lengths
        return Masks(
            self.time.mask(time, lengths, t)[..., None],
            self.feature.mask(feature, feature_lengths, d)[:, None],
        )
