"""LongCat-Flash (Meituan 2025): two latent attentions in a layer, experts on a shortcut past the
second, some of which do nothing.

- a layer is attention, dense network, attention, dense network; its experts read the input
  of the first network, and their output is added at the end of the layer
- compressed queries and latents are scaled up, as if they were as wide as the stream
- `zero_expert_num` further experts have no matrices and return their input
- scores of experts are softmaxes; a bias that training moves without a gradient joins in the
  choice; weights are not normalised

Numbers follow Hugging Face's `modeling_longcat_flash.py`; parameter names are its names.
"""

from __future__ import annotations

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers import sums
from ed_layers.attention.blocks.latent_attention import LatentAttention
from ed_layers.cache.spec import LayerSpecs
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts
from flax import nnx

from ed_models.body.decoder import Decoder
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, carry, renamed


@register_config("longcat_flash")
class LongcatFlashConfig(EasyDeLBaseConfig, transformers.LongcatFlashConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "longcat_flash"


class LongcatFlashExperts(Experts):
    """Experts, followed by experts that are the identity."""

    def __init__(self, parts: Parts):
        config: LongcatFlashConfig = parts.config
        self.real = config.n_routed_experts
        self.all = config.n_routed_experts + count_zero_experts(config)
        super().__init__(parts, self.real, config.expert_ffn_hidden_size)

    def __call__(self, x, expert_ids, weights, ctx: Ctx):
        is_identity = (expert_ids >= self.real) & (expert_ids < self.all)
        share = sums.total(jnp.where(is_identity, weights, 0))
        return super().__call__(x, expert_ids, weights, ctx) + x * share.astype(x.dtype)


class LongcatFlashDecoderLayer(nnx.Module):
    """Two times attention and dense network, with experts in parallel to the second half."""

    def __init__(self, parts: Parts, index: int):
        config: LongcatFlashConfig = parts.config
        d = config.hidden_size
        # Each attention stores its latents in a separate group.
        self.self_attn = nnx.List(
            [LatentAttention(parts, scaled=True, group=group) for group in ("full", "second")]
        )
        self.mlps = nnx.List([GatedMLP(parts) for _ in range(2)])
        self.input_layernorm = nnx.List([parts.norm(d) for _ in range(2)])
        self.post_attention_layernorm = nnx.List([parts.norm(d) for _ in range(2)])
        gate = Router(
            parts,
            config.n_routed_experts + count_zero_experts(config),
            config.moe_topk,
            normalize=False,
            scale=config.routed_scaling_factor,
            selection_bias=True,
        )
        self.mlp = SparseMLP(parts, gate=gate, experts=LongcatFlashExperts(parts))

    def __call__(self, x, ctx: Ctx, cache: object, layer: Layer):
        """Return the stream after the layer, the cache, and the report of the layer."""
        attended, cache = self.self_attn[0](self.input_layernorm[0](x), ctx, cache, layer)
        x = x + attended
        normed = self.post_attention_layernorm[0](x)
        shortcut, report = self.mlp(normed, ctx)
        x = x + self.mlps[0](normed, ctx)
        attended, cache = self.self_attn[1](self.input_layernorm[1](x), ctx, cache, layer)
        x = ctx.name_activation(x + attended, "residual")
        out = self.mlps[1](self.post_attention_layernorm[1](x), ctx)
        return x + out + shortcut, cache, report.under("mlp")

    def cache_specs(self) -> LayerSpecs:
        """The memory of the layer in a cache."""
        return tuple(attention.latent_spec for attention in self.self_attn)


class LongcatFlashModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = LongcatFlashConfig
    layer_class = LongcatFlashDecoderLayer

    @staticmethod
    def depth(config):
        return config.num_layers


@register_module(TaskType.CAUSAL_LM, config=LongcatFlashConfig, model_type="longcat_flash")
class LongcatFlashForCausalLM(CausalLM):
    """LongCat-Flash with a language-model head."""

    body_class = LongcatFlashModel
    WEIGHTS = (
        *renamed(
            {"mlp.gate.weight": "mlp.router.classifier.weight", "mlp.gate": "mlp.router"},
            EXPERTS,
            *STANDARD,
        ),
        carry("model.mtp.{path}"),
        # transformers 5.23 creates unused matrices for experts without computation.
        carry("{path}.experts.{expert}.gate_proj.weight"),
        carry("{path}.experts.{expert}.up_proj.weight"),
    )


def count_zero_experts(config: EasyDeLBaseConfig) -> int:
    """How many experts do nothing."""
    return config.zero_expert_num or 0
