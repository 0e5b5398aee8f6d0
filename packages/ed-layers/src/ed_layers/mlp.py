"""Feed-forward layers. Legend: b batch, s sequence, d hidden, f intermediate, c chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers.activations import activation
from ed_layers.context import Ctx
from ed_layers.depth.remat import call_with_remat
from ed_layers.parts import Parts
from ed_layers.projections.linear import project_activated


def apply_gate(name: str, gate: Float[Array, "*n"], up: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Apply activation and gate between the projections of a gated layer."""
    return activation(name)(gate) * up


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))` (Shazeer 2020).

    With `use_scan_mlp` in the configuration, the layer computes `scan_mlp_chunk_size` positions at
    a time, so [b, s, f] never exists.

    Args:
        parts: creates the projections.
        intermediate_size: f; default: the configuration's.
        hidden_act: Hugging Face's name of the activation; default: the configuration's.
        bias: whether all three projections have a bias.
        dropout: dropout rate of the input of the last projection in training (T5).
    """

    def __init__(
        self,
        parts: Parts,
        intermediate_size: int | None = None,
        *,
        hidden_act: str | None = None,
        bias: bool = False,
        dropout: float = 0.0,
    ):
        config = parts.config
        d, f = config.hidden_size, intermediate_size or config.intermediate_size
        self.gate_proj = parts.linear(d, f, axes=("embed", "mlp"), bias=bias)
        self.up_proj = parts.linear(d, f, axes=("embed", "mlp"), bias=bias)
        self.down_proj = parts.linear(f, d, axes=("mlp", "embed"), bias=bias)
        self.hidden_act = hidden_act or config.hidden_act
        activation(self.hidden_act)
        self.dropout = dropout
        self.chunk: int | None = config.scan_mlp_chunk_size if config.use_scan_mlp else None

    def __call__(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s d"]:
        x = ctx.name_activation(x, "normed_input")
        out = (
            self.scan_chunks(x, ctx)
            if self.chunk and x.shape[1] > self.chunk
            else self.block(x, ctx)
        )
        return ctx.name_activation(out, "mlp_output")

    def scan_chunks(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s d"]:
        """Apply the layer to `chunk` positions at a time (Liu & Abbeel 2023)."""
        assert self.chunk is not None

        # Recomputed in the backward pass; otherwise the scan would save [b, s, f].
        @jax.checkpoint
        def one(chunk: tuple[jax.Array, jax.Array | None]) -> jax.Array:
            part, ids = chunk
            return self.block(part, replace(ctx, adapter_ids=ids))

        parts = jax.lax.map(
            one, jax.tree.map(partial(_chunks, size=self.chunk), (x, ctx.adapter_ids))
        )
        return jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]

    def block(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s d"]:
        """Apply the layer to all positions of `x`."""
        layers, names = (self.gate_proj, self.up_proj), ("mlp_gate", "mlp_up")
        inner = project_activated(layers, self.hidden_act, x, names)
        if inner is None:
            gate = ctx.name_activation(self.gate_proj(x, ctx), "mlp_gate")
            up = ctx.name_activation(self.up_proj(x, ctx), "mlp_up")
            inner = call_with_remat(partial(apply_gate, self.hidden_act), gate, up)
        inner = ctx.apply_dropout(inner, self.dropout, "mlp_inner")
        return ctx.name_activation(ctx.project_to_stream(self.down_proj, inner), "mlp_down")


class MLP(nnx.Module):
    """`down(act(up(x)))`: two projections, without a gate.

    Args:
        parts: creates the projections.
        intermediate_size: f; default: the configuration's.
        hidden_act: Hugging Face's name of the activation; default: the configuration's.
        bias: whether both projections have a bias.
        dropout: dropout rate of the input of the last projection in training (T5).
        act: an activation module with parameters (Apertus), instead of a named activation.
    """

    def __init__(
        self,
        parts: Parts,
        intermediate_size: int | None = None,
        *,
        hidden_act: str | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        act: Callable[[Array], Array] | None = None,
    ):
        config = parts.config
        d, f = config.hidden_size, intermediate_size or config.intermediate_size
        self.up_proj = parts.linear(d, f, axes=("embed", "mlp"), bias=bias)
        self.down_proj = parts.linear(f, d, axes=("mlp", "embed"), bias=bias)
        self.hidden_act: str | None = None
        self.dropout = dropout
        if act is not None:
            self.act_fn = act
        else:
            self.hidden_act = name = hidden_act or config.hidden_act
            activation(name)

    def __call__(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s d"]:
        x, inner, act = ctx.name_activation(x, "normed_input"), None, self.hidden_act
        if act is not None:
            inner = project_activated((self.up_proj,), act, x, ("mlp_up",))
        if inner is None:
            up = ctx.name_activation(self.up_proj(x, ctx), "mlp_up")
            inner = self.act_fn(up) if act is None else call_with_remat(activation(act), up)
        inner = ctx.apply_dropout(inner, self.dropout, "mlp_inner")
        out = ctx.project_to_stream(self.down_proj, inner)
        return ctx.name_activation(ctx.name_activation(out, "mlp_down"), "mlp_output")


def _chunks(x: Float[Array, "b s *d"] | Int[Array, "b s"], size: int) -> jax.Array:
    """Reshape [b, s, ...] to [s / size, b, size, ...], padded with zeros at the end."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)
