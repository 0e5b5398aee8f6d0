"""Feed-forward layers. Legend: b batch, s sequence, d hidden, f intermediate, c chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.errors import unknown_name
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers.context import Ctx
from ed_layers.linear import Initializer, Linear
from ed_layers.named import named

# Hugging Face's names (transformers.activations.ACT2FN).
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def activation(name: str) -> Callable[[Array], Array]:
    """The activation of that Hugging Face name.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    if name not in ACTIVATIONS:
        raise unknown_name("activation (hidden_act)", name, ACTIVATIONS)
    return ACTIVATIONS[name]


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))` (Shazeer 2020).

    Args:
        config: how it runs: `use_scan_mlp` computes `scan_mlp_chunk_size` positions at a time, so
            that [b, s, f] never exists; None = at once.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        hidden_act: str,
        use_bias: bool = False,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer,
        config: Any = None,
        rngs: nnx.Rngs,
    ):
        linear = partial(
            Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        self.gate_proj = linear(hidden_size, intermediate_size, axes=("embed", "mlp"))
        self.up_proj = linear(hidden_size, intermediate_size, axes=("embed", "mlp"))
        self.down_proj = linear(intermediate_size, hidden_size, axes=("mlp", "embed"))
        self.hidden_act = hidden_act
        activation(hidden_act)
        self.config = config
        self.chunk: int | None = None
        if config is not None and config.use_scan_mlp:
            self.chunk = config.scan_mlp_chunk_size

    def __call__(self, x: Float[Array, "b s d"], ctx: Ctx | None = None) -> Float[Array, "b s d"]:
        out = self.scanned(x, ctx) if self.chunk and x.shape[1] > self.chunk else self.block(x, ctx)
        return named(out, "mlp_output", ("batch", "sequence", "hidden"), self.config)

    def scanned(self, x: Float[Array, "b s d"], ctx: Ctx | None) -> Float[Array, "b s d"]:
        """The layer, `chunk` positions at a time (Liu & Abbeel 2023)."""
        assert self.chunk is not None

        # Recomputed in the backward pass: else the scan would save [b, s, f] after all.
        @jax.checkpoint
        def one(chunk: tuple[jax.Array, jax.Array | None]) -> jax.Array:
            part, ids = chunk
            told = ctx if ctx is None or ids is None else replace(ctx, adapter_ids=ids)
            return self.block(part, told)

        ids = None if ctx is None else ctx.adapter_ids
        parts = jax.lax.map(one, jax.tree.map(partial(chunks, size=self.chunk), (x, ids)))
        return jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]

    def block(self, x: Float[Array, "b s d"], ctx: Ctx | None) -> Float[Array, "b s d"]:
        """The layer itself, on all positions that it is given."""
        inner = ("batch", "sequence", "mlp")
        gate = named(self.gate_proj(x, ctx), "mlp_gate", inner, self.config)
        up = named(self.up_proj(x, ctx), "mlp_up", inner, self.config)
        out = self.down_proj(activation(self.hidden_act)(gate) * up, ctx)
        return named(out, "mlp_down", ("batch", "sequence", "hidden"), self.config)


def chunks(x: Float[Array, "b s *d"] | Int[Array, "b s"], size: int) -> jax.Array:
    """[b, s, ...] to [s / size, b, size, ...], padded with zeros at the end."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)
