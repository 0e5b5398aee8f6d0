"""The language-model head as one value, used by generation, losses and scoring.

Legend: d hidden, v vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from jax.lax import PrecisionLike
from jaxtyping import Array, Float

from ed_layers import fixed_order, native
from ed_layers.projections.dot import Weight, dot


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "bias"],
    meta_fields=["scale", "soft_cap", "precision", "config"],
)
@dataclass(frozen=True)
class Head:
    """Maps hidden states to logits: `cap(scale * (hidden @ weight + bias))`, in float32.

    Attributes:
        weight: [d, v], any right operand of `ed_layers.projections.dot.dot`.
        bias: [v] or None.
        scale: factor on the logits (Cohere's `logit_scale`, Granite's `1 / logits_scaling`).
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)` (Gemma 2).
        precision: of the product; None = the backend's default.
        config: selects the kernels of the product; None = the default kernels.
    """

    weight: Weight
    bias: Float[Array, " v"] | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    precision: PrecisionLike = None
    config: EasyDeLBaseConfig | None = None

    @classmethod
    def of(cls, weight: Head | Weight) -> Head:
        """Return a head unchanged, or create one from a matrix [d, v]."""
        return weight if isinstance(weight, Head) else cls(weight)

    @property
    def vocab_size(self) -> int:
        """v."""
        return self.weight.shape[-1]

    def __call__(self, hidden: Float[Array, "*rows d"]) -> Float[Array, "*rows v"]:
        """Return the logits, float32."""
        return self.finish(self.product(hidden))

    def product(self, hidden: Float[Array, "*rows d"]) -> Float[Array, "*rows v"]:
        """Return `hidden @ weight` in float32, before bias, scale and cap."""
        with self.kernels():
            return dot(hidden, self.weight, precision=self.precision).astype(jnp.float32)

    def kernels(self) -> AbstractContextManager[None]:
        """Trace a block with the kernels of the configuration."""
        return nullcontext() if self.config is None else native.chosen_by(self.config)

    def finish(self, scores: Float[Array, "*rows v"]) -> Float[Array, "*rows v"]:
        """Apply bias, scale and cap to the product."""
        if self.bias is not None:
            scores = scores + self.bias.astype(jnp.float32)
        if self.scale != 1.0:
            scores = scores * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        with self.kernels():
            if not fixed_order.active():
                return scores
            from ed_layers.ordered_program import round_to_dtype

            return round_to_dtype(scores)
