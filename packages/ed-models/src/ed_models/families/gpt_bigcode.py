"""GPTBigCode (BigCode 2023; SantaCoder and StarCoder): GPT-2 with one key head.

- one key and value for all queries of a token, or one of each head without `multi_query`
- one tensor for queries, keys and values, stored [out, in]
- head tied to the embedding

Numbers follow Hugging Face's `modeling_gpt_bigcode.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import ScoreRule
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, fused, renamed


@register_config("gpt_bigcode")
class GPTBigCodeConfig(EasyDeLBaseConfig, transformers.GPTBigCodeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gpt_bigcode"
    attribute_map = {
        **transformers.GPTBigCodeConfig.attribute_map,
        "attention_dropout": "attn_pdrop",
    }

    def __post_init__(self, **kwargs: object):
        super().__post_init__(**kwargs)
        # transformers 5.23 computes this number before it reads `num_attention_heads`.
        self.num_key_value_heads = 1 if self.multi_query else self.num_attention_heads

    def validate(self):
        """Refuse layers that read an encoder."""
        super().validate()
        if self.add_cross_attention:
            raise ConfigError(
                "gpt_bigcode: add_cross_attention=True has layers that read an encoder: "
                "use a checkpoint with add_cross_attention=False"
            )


class GPTBigCodeDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GPTBigCodeConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts,
                bias=True,
                position=None,
                scores=ScoreRule(scale=None if config.scale_attn_weights else 1.0),
            ),
            mlp=MLP(
                parts,
                config.n_inner or 4 * config.hidden_size,
                hidden_act=config.activation_function,
            ),
            dropout=config.resid_pdrop,
        )


class GPTBigCodeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GPTBigCodeConfig
    layer_class = GPTBigCodeDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_epsilon)

    def add_parts(self, parts):
        config = parts.config
        self.embed_positions = parts.embed(config.max_position_embeddings, config.hidden_size)

    def enter(self, x, ctx):
        x = x + self.embed_positions(ctx.position_ids)
        return ctx.apply_dropout(x, self.config.embd_pdrop, "embeddings")

    def rope_settings(self):
        return {}


@register_module(TaskType.CAUSAL_LM, config=GPTBigCodeConfig, model_type="gpt_bigcode")
class GPTBigCodeForCausalLM(CausalLM):
    """GPTBigCode with a language-model head."""

    body_class = GPTBigCodeModel

    WEIGHTS = renamed(
        {
            "model.norm": "transformer.ln_f",
            "model.embed_tokens": "transformer.wte",
            "model.embed_positions": "transformer.wpe",
            "model.layers": "transformer.h",
            "self_attn.o_proj": "attn.c_proj",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
            "model": "transformer",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "self_attn": "attn",
        },
        *fused(
            ("q_proj", "k_proj", "v_proj"),
            "c_attn",
            groups=lambda c: 1 if c.multi_query else c.num_attention_heads,
        ),
        *STANDARD,
    )
