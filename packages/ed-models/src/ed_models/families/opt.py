"""OPT (Zhang et al. 2022): learned positions, ReLU, biases everywhere.

- positions start in row 2 of their table
- norms are before attention and feed-forward, or after the sums (OPT-350m), which then has no
  final norm, and embeddings of another width with a projection on either side
- head tied to the embedding

Numbers follow Hugging Face's `modeling_opt.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import LayerReport
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("opt")
class OPTConfig(EasyDeLBaseConfig, transformers.OPTConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "opt"
    attribute_map = {**transformers.OPTConfig.attribute_map, "initializer_range": "init_std"}

    def validate(self):
        """Raise ConfigError for unsupported fields."""
        super().validate()
        if self.layerdrop:
            raise ConfigError("opt: layers are never dropped here; set layerdrop to 0")


class OPTDecoderLayer(DecoderLayer):
    """Attention and feed-forward; norms before each, or after each sum."""

    def __init__(self, parts: Parts, index: int):
        config: OPTConfig = parts.config
        bias = config.enable_bias
        mlp = MLP(parts, config.ffn_dim, hidden_act=config.activation_function, bias=bias)
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=bias, position=None),
            mlp=mlp,
            dropout=config.dropout,
        )
        self.norm_before = config.do_layer_norm_before

    def __call__(self, x, ctx, cache, layer):
        if self.norm_before:
            return super().__call__(x, ctx, cache, layer)
        attended, cache = self.self_attn(x, ctx, cache, layer)
        x = self.input_layernorm(x + ctx.apply_dropout(attended, self.dropout, "attention"))
        x = ctx.name_activation(x, "residual")
        out = ctx.apply_dropout(self.mlp(x, ctx), self.dropout, "mlp")
        return self.post_attention_layernorm(x + out), cache, LayerReport()


class OPTModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = OPTConfig
    layer_class = OPTDecoderLayer

    @staticmethod
    def embedding(parts):
        return parts.embed(parts.config.vocab_size, parts.config.word_embed_proj_dim)

    @staticmethod
    def build_norm(parts):
        affine = parts.config.layer_norm_elementwise_affine
        return partial(parts.layer_norm, eps=1e-5, weight=affine, bias=affine)

    @staticmethod
    def final_norm(parts):
        config = parts.config
        has_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
        return parts.own_norm(config.hidden_size) if has_norm else None

    def add_parts(self, parts):
        config, d = parts.config, parts.config.hidden_size
        self.embed_positions = parts.embed(config.max_position_embeddings + 2, d)
        width = config.word_embed_proj_dim
        self.projects = width != d
        if self.projects:
            self.project_in = parts.linear(width, d, axes=(None, "embed"))
            self.project_out = parts.linear(d, width, axes=("embed", None))

    def enter(self, x, ctx):
        x = self.project_in(x, ctx) if self.projects else x
        return x + self.embed_positions(ctx.position_ids + 2)

    def leave(self, x, ctx):
        x = x if self.norm is None else self.norm(x)
        return self.project_out(x, ctx) if self.projects else x

    def rope_settings(self):
        return {}


@register_module(TaskType.CAUSAL_LM, config=OPTConfig, model_type="opt")
class OPTForCausalLM(CausalLM):
    """OPT with a language-model head."""

    body_class = OPTModel

    WEIGHTS = renamed(
        {
            "model.norm": "model.decoder.final_layer_norm",
            "model": "model.decoder",
            "o_proj": "out_proj",
            "input_layernorm": "self_attn_layer_norm",
            "post_attention_layernorm": "final_layer_norm",
            "mlp.up_proj": "fc1",
            "mlp.down_proj": "fc2",
        },
        *STANDARD,
    )
