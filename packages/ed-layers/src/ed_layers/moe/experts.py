"""Experts: feed-forward networks of which each token uses a few, and the methods to compute them.

Legend: b batch, s sequence, d hidden, f intermediate, e experts, k experts of a token, n tokens,
r rows: pairs of a token and an expert, in the order of experts.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import PrecisionLike
from jaxtyping import Array, Float, Int

from ed_layers.activations import activation
from ed_layers.context import Ctx
from ed_layers.devices import get_platform
from ed_layers.fixed_order import KernelChoice
from ed_layers.moe.adapter_slots import select_slots
from ed_layers.moe.blocks import (
    ExpertParams,
    ExpertProduct,
    Network,
    build_blocks,
    build_product,
    over_expert_blocks,
)
from ed_layers.moe.groups import over_groups
from ed_layers.moe.mesh import ExpertMesh
from ed_layers.parts import Parts
from ed_layers.projections.linear import ExpertLinear


class Experts(nnx.Module):
    """Feed-forward networks `down(act(gate(x)) * up(x))`, stacked along the first axis.

    `moe_method` of the configuration selects the method; all methods produce the same numbers:

    - `fused_moe`: rows sorted by expert, grouped products (`jax.lax.ragged_dot`). On a CPU a
      grouped product costs e times the work, so `standard_moe` is used there unless
      `moe_force_xla_gmm` is set;
    - `standard_moe`: rows sorted by expert, a loop over blocks of rows that share an expert;
    - `dense_moe`: every expert on every token.

    On a mesh each device keeps its experts and its part of f; see `ed_layers.moe.mesh`.

    Args:
        parts: makes the layers.
        experts: e.
        intermediate_size: f.
        hidden_act: Hugging Face's name of the activation; default: the configuration's.
        bias: whether the layers have biases.
        gated: whether the network has a gate; without one it is `down(act(up(x)))` (Nemotron-H).
        features: d; default: the configuration's `hidden_size`.
    """

    def __init__(
        self,
        parts: Parts,
        experts: int,
        intermediate_size: int,
        *,
        hidden_act: str | None = None,
        bias: bool = False,
        gated: bool = True,
        features: int | None = None,
    ):
        config = parts.config
        d, f = features or config.hidden_size, intermediate_size
        make = partial(parts.expert_linear, experts, bias=bias)
        if gated:
            self.gate_proj = make(d, f, axes=("embed", "mlp"))
        self.up_proj = make(d, f, axes=("embed", "mlp"))
        self.down_proj = make(f, d, axes=("mlp", "embed"))
        self.gated, self.hidden_act = gated, hidden_act or config.hidden_act
        activation(self.hidden_act)
        self.dtype, self.precision = parts.dtype, parts.precision
        self.method, self.force_grouped = config.moe_method, config.moe_force_xla_gmm
        self.count = experts

    def glu(self, gate: Float[Array, "r f"], up: Float[Array, "r f"]) -> Float[Array, "r f"]:
        """Apply the activation and the gate between the layers."""
        return self.act(gate) * up

    def network(self, x: Float[Array, "r d"], product: ExpertProduct) -> Float[Array, "r d"]:
        """Apply the network of the experts with the given product."""
        up = product("up_proj", x)
        inner = self.glu(product("gate_proj", x), up) if self.gated else self.act(up)
        return product("down_proj", inner)

    def act(self, x: Float[Array, "r f"]) -> Float[Array, "r f"]:
        """Apply the activation."""
        return activation(self.hidden_act)(x)

    def __call__(
        self,
        x: Float[Array, "b s d"],
        expert_ids: Int[Array, "b s k"],
        weights: Float[Array, "b s k"],
        ctx: Ctx,
    ) -> Float[Array, "b s d"]:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            expert_ids: numbers of the experts; e and above mean no expert (padding).
            weights: weights of the experts' outputs.
        """
        x = x.astype(self.dtype)
        layers = {
            name: layer for name, layer in vars(self).items() if isinstance(layer, ExpertLinear)
        }
        params = {f"{at}.{k}": v for at, layer in layers.items() for k, v in layer.arrays().items()}
        network, features = self.network, x.shape[-1]
        if ctx.adapter_ids is not None:
            network, x = select_slots(network, layers, x, ctx.adapter_ids)
        local = partial(self.local, network, ctx=ctx)
        if ctx.config is None or ctx.config.mesh.size == 1:
            out = local(x, expert_ids, weights, params)
            return out if ctx.adapter_ids is None else out[..., :features]
        axes = {
            f"{at}.{name}": variable.get_metadata()["axes"]
            for at, layer in layers.items()
            for name, variable in layer.variables().items()
        }
        mesh = ExpertMesh.of(ctx.config, params, axes, x.shape, ctx.mode)
        out = mesh.run(local, x, expert_ids, weights, params)
        return out if ctx.adapter_ids is None else out[..., :features]

    def local(
        self,
        network: Network,
        x: Float[Array, "b s d"],
        expert_ids: Int[Array, "b s k"],
        weights: Float[Array, "b s k"],
        params: ExpertParams,
        ctx: Ctx,
    ) -> Float[Array, "b s d"]:
        """Apply the network of the experts `params` to the tokens of one device."""
        flat, k = x.reshape(-1, x.shape[-1]), expert_ids.shape[-1]
        experts = params["up_proj.kernel"].shape[0]
        expert_ids, weights = expert_ids.reshape(-1, k), weights.reshape(-1, k).astype(jnp.float32)
        weights = jnp.where(expert_ids < experts, weights, 0.0)
        grouped = self.force_grouped or get_platform(ctx.config) != "cpu"
        local = partial(self.local, network, ctx=ctx)
        KernelChoice.note("experts", local, network, self.method, x, params, k)
        if self.method == "dense_moe":
            out = dense(network, self.precision, flat, expert_ids, weights, params)
        elif self.method == "fused_moe" and grouped:
            share = self.count // experts  # Of `share` rows, one is expected on this device.
            out = over_groups(network, self.precision, flat, expert_ids, weights, params, share)
        else:
            plan = build_blocks(expert_ids, experts)
            choice = KernelChoice.get_current()
            out = over_expert_blocks(network, self.precision, choice, flat, weights, params, plan)
        return jnp.asarray(out, x.dtype).reshape(x.shape)


def dense(
    network: Network,
    precision: PrecisionLike,
    x: Float[Array, "n d"],
    expert_ids: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    params: ExpertParams,
) -> Float[Array, "n d"]:
    """Apply every expert to every token."""
    experts = params["up_proj.kernel"].shape[0]
    expert_outputs = jax.vmap(
        lambda expert_params: network(x, build_product(expert_params, precision))
    )(params)
    shares = jnp.sum(jax.nn.one_hot(expert_ids, experts) * weights[..., None], axis=1)
    return jnp.einsum("end,ne->nd", expert_outputs.astype(jnp.float32), shares, precision=precision)
