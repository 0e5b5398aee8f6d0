"""GPT-Neo (EleutherAI 2021): GPT-2 with a window of `window_size` tokens in local layers.

- scores have no scale
- no biases of queries, keys and values
- matrices are stored [out, in], queries, keys and values in three tensors
- head tied to the embedding

Numbers follow Hugging Face's `modeling_gpt_neo.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, ScoreRule
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, ignore, renamed


@register_config("gpt_neo")
class GPTNeoConfig(EasyDeLBaseConfig, transformers.GPTNeoConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gpt_neo"


class GPTNeoDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GPTNeoConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts,
                out_bias=True,
                mask=MaskRule(
                    window=config.window_size if config.attention_layers[index] == "local" else None
                ),
                position=None,
                scores=ScoreRule(scale=1.0),
            ),
            mlp=MLP(
                parts,
                config.intermediate_size or 4 * config.hidden_size,
                hidden_act=config.activation_function,
            ),
            dropout=config.resid_dropout,
        )


class GPTNeoModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GPTNeoConfig
    layer_class = GPTNeoDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return config.attention_layers

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_epsilon)

    def add_parts(self, parts):
        config = parts.config
        self.embed_positions = parts.embed(config.max_position_embeddings, config.hidden_size)

    def enter(self, x, ctx):
        x = x + self.embed_positions(ctx.position_ids)
        return ctx.apply_dropout(x, self.config.embed_dropout, "embeddings")

    def rope_settings(self):
        return {}


@register_module(TaskType.CAUSAL_LM, config=GPTNeoConfig, model_type="gpt_neo")
class GPTNeoForCausalLM(CausalLM):
    """GPTNeo with a language-model head."""

    body_class = GPTNeoModel

    WEIGHTS = renamed(
        {
            "model.norm": "transformer.ln_f",
            "model.embed_tokens": "transformer.wte",
            "model.embed_positions": "transformer.wpe",
            "model.layers": "transformer.h",
            "self_attn.o_proj": "attn.attention.out_proj",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
            "model": "transformer",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "self_attn": "attn.attention",
        },
        *STANDARD,
        ignore("{path}.attn.attention.bias"),
        ignore("{path}.attn.attention.masked_bias"),
    )
