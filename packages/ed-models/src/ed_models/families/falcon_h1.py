"""Falcon-H1 (TII 2025): Mamba-2 and attention side by side in every layer, with multipliers.

- both read the same normed stream, and both are added to it, each with a factor before and after
- the parts of Mamba-2's projection have a factor each; its norm is optional, before or after the
  gate
- keys, the gate of the feed-forward, its output, embeddings and logits have a factor each

Numbers follow Hugging Face's `modeling_falcon_h1.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import ScoreRule
from ed_layers.cache.spec import flatten_specs
from ed_layers.mlp import GatedMLP, activation
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.body.mamba import hybrid_mixer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import MAMBA2, renamed


@register_config("falcon_h1")
class FalconH1Config(EasyDeLBaseConfig, transformers.FalconH1Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "falcon_h1"


class FalconH1Attention(SelfAttention):
    """Attention whose keys have a factor: the scores have it as well."""

    def __init__(self, parts: Parts):
        config: FalconH1Config = parts.config
        k = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        super().__init__(
            parts,
            bias=config.attention_bias,
            scores=ScoreRule(scale=k**-0.5 * config.key_multiplier),
        )


class FalconH1MLP(GatedMLP):
    """A feed-forward with a factor on the gate, and one on the output."""

    def __init__(self, parts: Parts):
        super().__init__(parts, bias=parts.config.mlp_bias)
        self.of_gate, self.of_output = parts.config.mlp_multipliers

    def block(self, x, ctx):
        gate = ctx.name_activation(self.gate_proj(x, ctx), "mlp_gate")
        up = ctx.name_activation(self.up_proj(x, ctx), "mlp_up")
        out = self.down_proj(activation(self.hidden_act)(gate * self.of_gate) * up, ctx)
        return ctx.name_activation(out, "mlp_down") * self.of_output


class FalconH1DecoderLayer(DecoderLayer):
    """Mamba-2 and attention side by side, then a feed-forward, each normed before and added."""

    def __init__(self, parts: Parts, index: int):
        config: FalconH1Config = parts.config
        super().__init__(parts, self_attn=FalconH1Attention(parts), mlp=FalconH1MLP(parts))
        self.mamba = hybrid_mixer(
            parts,
            out_bias=config.projectors_bias,
            norm_eps=config.rms_norm_eps if config.mamba_rms_norm else None,
            gate_first=not config.mamba_norm_before_gate,
            multipliers=config.ssm_multipliers,
        )
        self.of_mamba = config.ssm_in_multiplier, config.ssm_out_multiplier
        self.of_attention = config.attention_in_multiplier, config.attention_out_multiplier

    def __call__(self, x, ctx, cache, layer):
        normed = self.input_layernorm(x)
        (mamba_in_scale, mamba_out_scale), (first, last) = self.of_mamba, self.of_attention
        mixed, cache = self.mamba(normed * mamba_in_scale, ctx, cache, layer)
        attended, cache = self.self_attn(normed * first, ctx, cache, layer)
        x = ctx.name_activation(
            x + mixed * mamba_out_scale + attended * last,
            "residual",
        )
        out, report = self.feed_forward(self.post_attention_layernorm(x), ctx)
        return x + out, cache, report

    def cache_specs(self):
        return flatten_specs(self.self_attn.cache_spec, self.mamba.cache_spec)


class FalconH1Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = FalconH1Config
    layer_class = FalconH1DecoderLayer

    @staticmethod
    def layer_kinds(config):
        return None

    def enter(self, x, ctx):
        return x * self.config.embedding_multiplier


@register_module(TaskType.CAUSAL_LM, config=FalconH1Config, model_type="falcon_h1")
class FalconH1ForCausalLM(CausalLM):
    """Falcon-H1 with a language-model head."""

    body_class = FalconH1Model
    WEIGHTS = renamed(
        {
            "model.norm": "model.final_layernorm",
            "post_attention_layernorm": "pre_ff_layernorm",
            "mlp": "feed_forward",
        },
        *MAMBA2,
    )

    def head(self):
        return replace(super().head(), scale=self.config.lm_head_multiplier)
