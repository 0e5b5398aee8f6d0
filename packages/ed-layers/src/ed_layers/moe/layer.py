"""The sparse feed-forward layer: a router, experts, and experts that all tokens share.

Legend: b batch, s sequence, d hidden, e experts, k experts of a token, g groups of experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.outputs import LayerReport, Metric
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ed_layers import sums
from ed_layers.context import Ctx
from ed_layers.mlp import MLP, GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.parts import Parts
from ed_layers.projections.dot import dot
from ed_layers.updated import Updated

#: Metrics [e] that layers report as the input of `balance`; they are not logged.
LOAD, PROBABILITY = "router_load", "router_probability"
#: Metric: the fraction of token-expert pairs that exceeded the capacity of the expert.
DROPPED = "router_dropped"


@dataclass(frozen=True)
class FollowLoad:
    """Update rule of a selection bias: increase the bias of an expert with fewer tokens than the
    mean, decrease the bias of an expert with more (Wang et al. 2024, DeepSeek-V3)."""

    rate: float

    def __call__(self, bias: Float[Array, "*one e"], load: Float[Array, " e"]) -> jax.Array:
        return bias + self.rate * jnp.sign(jnp.mean(load) - load)


class Router(nnx.Module):
    """Scores the experts and selects a few per token, in float32.

    Reports in training:

    - `losses["router_z"]`: mean square of `logsumexp(logits)` (Zoph et al. 2022), times
      `router_z_loss_coef` of the configuration;
    - for `balance`: the number of tokens and the sum of the probabilities of each expert;
    - `updates`: the number of tokens of each expert, for the selection bias;
    - with `expert_capacity_factor`, `metrics["router_dropped"]`: the fraction of dropped pairs.

    With `expert_capacity_factor` in the configuration, an expert processes in training at most
    `ceil(factor * s * k / e)` tokens of a row: the first tokens that choose it (Lepikhin et al.
    2020). A group is a row here, so the result depends neither on other rows nor on the mesh.

    Args:
        parts: initialisation and dtype of the parameters.
        experts: e.
        per_token: k.
        score: the softmax over all experts, or the sigmoid of each logit.
        normalize: divide the scores of the chosen experts by their sum.
        scale: factor on the weights.
        bias: whether the logits have a bias.
        selection_bias: add a bias to the scores for the selection only. Training moves the bias
            towards equal loads without a gradient (`router_bias_rate` of the configuration).
        groups: g; experts are chosen from the best `groups_chosen` of g groups.
        groups_chosen: number of groups to choose from.
        group_score: number of best expert scores whose sum is the score of a group.
        ranks_logits: choose experts by their logits instead of their scores; with a selection bias
            the order differs (Kolibri).
    """

    def __init__(
        self,
        parts: Parts,
        experts: int,
        per_token: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        bias: bool = False,
        selection_bias: bool = False,
        groups: int = 1,
        groups_chosen: int = 1,
        group_score: int = 2,
        ranks_logits: bool = False,
    ):
        config = parts.config
        shape = (config.hidden_size, experts)
        kernel = parts.initializer(parts.rngs.params(), shape, parts.param_dtype)
        self.kernel = nnx.Param(kernel, axes=("embed", "expert_gate"))
        if bias:
            self.bias = nnx.Param(jnp.zeros((experts,), parts.param_dtype), axes=(None,))
        if selection_bias:
            rule = FollowLoad(config.router_bias_rate)
            zeros = jnp.zeros((experts,), jnp.float32)
            self.e_score_correction_bias = Updated(zeros, axes=(None,), rule=rule)
        self.per_token, self.score, self.normalize, self.scale = per_token, score, normalize, scale
        self.groups, self.groups_chosen, self.group_score = groups, groups_chosen, group_score
        self.ranks_logits = ranks_logits
        self.z_loss: float = config.router_z_loss_coef
        self.capacity_factor: float | None = config.expert_capacity_factor
        if config.batch_invariant and self.capacity_factor is not None:
            raise ConfigError(
                f"expert_capacity_factor={self.capacity_factor} drops tokens by the other rows of "
                "a batch, but batch_invariant=True; set one of them to its default",
                field="expert_capacity_factor",
            )
        self.balanced = getattr(config, "output_router_logits", False)

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx
    ) -> tuple[Int[Array, "b s k"], Float[Array, "b s k"], LayerReport]:
        """Return the experts of each token, their weights, and the report.

        Padding tokens get the expert number e, which does not exist. `ctx.given_experts` replaces
        the choice; the weights of the given experts are computed from the logits as usual.
        """
        logits = self.logits(x)
        logits = ctx.name_activation(logits, "moe_router_logits")
        expert_ids, weights = self.choose(logits, ctx.given_experts)
        real, routed = ctx.real, expert_ids
        report = LayerReport()
        if ctx.mode == "train":
            counted = jnp.ones(x.shape[:2], bool) if real is None else real
            report = self.report(logits, expert_ids, counted)
            if self.capacity_factor is not None:
                expert_ids, report.metrics[DROPPED] = self.apply_capacity(
                    expert_ids, counted, logits.shape[-1]
                )
        if real is not None:
            expert_ids = jnp.where(real[..., None], expert_ids, logits.shape[-1])
        if ctx.returns_experts:
            report = replace(report, experts={"": routed.astype(jnp.int16)})
        return expert_ids, weights, report

    def logits(self, x: Float[Array, "b s d"]) -> Float[Array, "b s e"]:
        """Float32."""
        kernel = self.kernel.get_value().astype(jnp.float32)
        logits = dot(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
        if hasattr(self, "bias"):
            logits = logits + self.bias.get_value().astype(jnp.float32)
        return logits

    def choose(
        self, logits: Float[Array, "b s e"], forced_ids: Int[Array, "b s k"] | None = None
    ) -> tuple[Int[Array, "b s k"], Float[Array, "b s k"]]:
        """Return the best experts of each token, and the weights of their outputs.

        Args:
            logits: scores of the experts.
            forced_ids: experts to use instead of the best ones; -1 = the best ones.
        """
        softmax = self.score == "softmax"
        scores = sums.softmax(logits) if softmax else jax.nn.sigmoid(logits)
        ranked = jax.lax.stop_gradient(logits if self.ranks_logits else scores)
        expert_ids = jax.lax.top_k(self.ranks(ranked), self.per_token)[1]
        expert_ids = given_or(forced_ids, expert_ids)
        if self.normalize and softmax:
            # Normalizing a softmax over a subset equals the softmax over that subset.
            weights = sums.softmax(jnp.take_along_axis(logits, expert_ids, axis=-1))
        else:
            weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
        if self.normalize and not softmax:
            weights = weights / (sums.total(weights) + 1e-20)
        return expert_ids, weights * self.scale

    def ranks(self, scores: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        """Return the values that the selection sorts by: biased scores of the best groups."""
        if hasattr(self, "e_score_correction_bias"):
            scores = scores + self.e_score_correction_bias.get_value().reshape(-1)
        if self.groups == 1:
            return scores
        grouped = scores.reshape(*scores.shape[:-1], self.groups, -1)
        group_scores = sums.total(jax.lax.top_k(grouped, self.group_score)[0])[..., 0]
        best = jax.lax.top_k(group_scores, self.groups_chosen)[1]
        group_mask = jnp.any(jax.nn.one_hot(best, self.groups, dtype=bool), axis=-2)
        return jnp.where(group_mask[..., None], grouped, -jnp.inf).reshape(scores.shape)

    def apply_capacity(
        self, expert_ids: Int[Array, "b s k"], real: Bool[Array, "b s"], experts: int
    ) -> tuple[Int[Array, "b s k"], Metric]:
        """Replace choices beyond the capacity by e; return the choices and the dropped fraction."""
        assert self.capacity_factor is not None
        share = expert_ids.shape[1] * self.per_token / experts
        visits = jnp.sum(jax.nn.one_hot(expert_ids, experts, dtype=jnp.int32), axis=2)
        running_visits = jnp.cumsum(visits * real[..., None], axis=1)
        place = jnp.take_along_axis(running_visits, expert_ids, axis=-1)
        dropped = (place > math.ceil(self.capacity_factor * share)) & real[..., None]
        count = jnp.sum(real, dtype=jnp.float32) * self.per_token
        metric = Metric(jnp.sum(dropped, dtype=jnp.float32), count)
        return jnp.where(dropped, experts, expert_ids), metric

    def report(
        self,
        logits: Float[Array, "b s e"],
        expert_ids: Int[Array, "b s k"],
        real: Bool[Array, "b s"],
    ) -> LayerReport:
        """See the class."""
        experts = logits.shape[-1]
        tokens = jnp.sum(real, dtype=jnp.float32)

        def load(expert_ids: Int[Array, "b s k"]) -> Float[Array, " e"]:
            hits = jax.nn.one_hot(expert_ids, experts) * real[..., None, None]
            return jnp.sum(hits, axis=(0, 1, 2))

        report = LayerReport()
        if self.z_loss:
            squares = jnp.square(jax.nn.logsumexp(logits, axis=-1)) * real
            report.losses["router_z"] = Metric(self.z_loss * jnp.sum(squares), tokens)
        if self.balanced:
            # As in transformers, the probabilities ignore the selection bias.
            probabilities = jax.nn.softmax(logits)
            best = jax.lax.top_k(jax.lax.stop_gradient(logits), self.per_token)[1]
            total = jnp.sum(probabilities * real[..., None], axis=(0, 1))
            report.metrics[LOAD] = Metric(load(best), tokens)
            report.metrics[PROBABILITY] = Metric(total, tokens)
        if hasattr(self, "e_score_correction_bias"):
            report.updates["e_score_correction_bias"] = load(expert_ids)
        return report


def given_or(forced_ids: Int[Array, "b s k"] | None, expert_ids: Int[Array, "b s k"]) -> jax.Array:
    """Return the given experts, and the chosen ones where -1 is given."""
    return (
        expert_ids
        if forced_ids is None
        else jnp.where(forced_ids >= 0, forced_ids.astype(expert_ids.dtype), expert_ids)
    )


class SparseMLP(nnx.Module):
    """A sparse feed-forward layer: a router sends each token to a few experts.

    Args:
        parts: makes the gate of the shared experts.
        gate: the router.
        experts: the routed experts.
        shared: a feed-forward network that processes all tokens.
        shared_gate: multiply the output of `run_shared_experts` by the sigmoid of a linear layer
            (Qwen2-MoE).
        scale_inputs: the weights multiply the inputs of the experts, not the outputs (Llama 4).
    """

    def __init__(
        self,
        parts: Parts,
        *,
        gate: Router,
        experts: Experts,
        shared: GatedMLP | MLP | None = None,
        shared_gate: bool = False,
        scale_inputs: bool = False,
    ):
        self.gate = gate
        self.experts = experts
        if shared is not None:
            self.shared_experts = shared
        if shared_gate:
            self.shared_expert_gate = parts.linear(
                parts.config.hidden_size, 1, axes=("embed", None)
            )
        self.scale_inputs = scale_inputs

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx
    ) -> tuple[Float[Array, "b s d"], LayerReport]:
        """Return the output [b, s, d] and the report of the router."""
        x = ctx.name_activation(x, "normed_input")
        expert_ids, weights, report = self.gate(x, ctx)
        if self.scale_inputs:
            out = self.on_scaled(x, expert_ids, weights, ctx)
        else:
            out = self.experts(x, expert_ids, weights, ctx)
        out = ctx.name_activation(out, "moe_expert_output")
        if hasattr(self, "shared_experts"):
            out = self.combine_outputs(out, self.run_shared_experts(x, ctx))
        return ctx.name_activation(out, "moe_output"), report.under("gate")

    def on_scaled(
        self, x: jax.Array, expert_ids: jax.Array, weights: jax.Array, ctx: Ctx
    ) -> jax.Array:
        """Treat each pair of a token and an expert as a separate, scaled token."""
        b, s, k = expert_ids.shape
        pairs = (x[:, :, None] * weights[..., None].astype(x.dtype)).reshape(b, s * k, -1)
        out = self.experts(pairs, expert_ids.reshape(b, -1, 1), jnp.ones((b, s * k, 1)), ctx)
        pair_outputs = out.reshape(b * s, k, -1)
        return (
            sums.compute_weighted_sum(pair_outputs, jnp.ones((b * s, k)))
            .astype(out.dtype)
            .reshape(x.shape)
        )

    def run_shared_experts(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s d"]:
        """Return the output of the shared experts."""
        out = self.shared_experts(x, ctx)
        if hasattr(self, "shared_expert_gate"):
            logits = ctx.name_activation(self.shared_expert_gate(x, ctx), "moe_gate_logits")
            out = out * jax.nn.sigmoid(logits)
        return out

    def combine_outputs(
        self, routed: Float[Array, "b s d"], shared: Float[Array, "b s d"]
    ) -> Float[Array, "b s d"]:
        """Combine the outputs of the routed and the shared experts."""
        return routed + shared


def balance(report: LayerReport, config: EasyDeLBaseConfig) -> LayerReport:
    """Compute the auxiliary loss of Fedus et al. 2021 from the counts of all routers.

    As in `transformers`, the loss is `e * sum(load * probability)` of the mean over the layers,
    times `router_aux_loss_coef`, if `output_router_logits` is set. The result adds
    `losses["router_balance"]` and the metric `router_load`: the load of the busiest expert divided
    by the mean load.
    """
    if LOAD not in report.metrics:
        return report
    metrics = dict(report.metrics)
    load, probability = metrics.pop(LOAD), metrics.pop(PROBABILITY)
    tokens, experts = load.weight, load.sum.shape[-1]
    loss = experts * jnp.sum(jax.lax.stop_gradient(load.value) * probability.value)
    peak = jnp.max(load.value) / jnp.maximum(jnp.mean(load.value), 1e-12)
    metrics[LOAD] = Metric(peak * tokens, tokens)
    losses = dict(report.losses)
    coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    if coefficient:
        losses["router_balance"] = Metric(coefficient * loss * tokens, tokens)
    return replace(report, losses=losses, metrics=metrics)
