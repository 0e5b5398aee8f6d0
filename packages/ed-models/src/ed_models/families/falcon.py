"""Falcon (TII 2023): attention and feed-forward side by side; few key heads.

- one tensor for queries, keys and values, key head by key head
- 40B and later (`new_decoder_architecture`): grouped queries, a norm for each branch
- 7B: one key head (`multi_query`), one norm for both branches
- RW: ALiBi instead of rotary positions, one after another (`parallel_attn` false)

Numbers follow Hugging Face's `modeling_falcon.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import Rotary
from ed_layers.attention.scoring import Alibi, alibi_slopes
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, ParallelLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, Rule, TensorLayout, equal, fused, renamed


@register_config("falcon")
class FalconConfig(EasyDeLBaseConfig, transformers.FalconConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "falcon"

    @property
    def num_key_value_heads(self) -> int:
        """Key heads: one with `multi_query`, except in the newer architecture."""
        one = self.multi_query and not self.new_decoder_architecture
        return 1 if one else self.num_kv_heads or self.num_attention_heads

    def validate(self):
        """Refuse a mixture that no model has."""
        super().validate()
        if self.new_decoder_architecture and not self.parallel_attn:
            raise ConfigError("falcon: new_decoder_architecture needs parallel_attn=True")


def _make_layer(parts: Parts, index: int) -> DecoderLayer:
    """Attention and feed-forward, side by side or one after another."""
    config: FalconConfig = parts.config
    if config.new_decoder_architecture:
        layer = partial(ParallelLayer, norms=config.num_ln_in_parallel_attn or 2)
    else:
        layer = ParallelLayer if config.parallel_attn else DecoderLayer
    attention = SelfAttention(
        parts, bias=config.bias, position=build_alibi(config) if config.alibi else Rotary()
    )
    return layer(
        parts,
        self_attn=attention,
        mlp=MLP(parts, config.ffn_hidden_size, hidden_act=config.activation, bias=config.bias),
        dropout=config.hidden_dropout,
    )


def norm_name(usual: str, branch_name: str) -> TensorLayout:
    """Return the name of a norm, which differs if each branch has a separate norm."""

    def relate(ours, hf, config):
        has_branch_norms = config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1
        return equal(ours, lambda: hf(norm=branch_name if has_branch_norms else usual), config)

    return relate


def build_alibi(config: FalconConfig) -> Alibi:
    """Return the ALiBi of `transformers`, which rounds slopes and their products with positions
    to bfloat16."""
    rounded = np.asarray(alibi_slopes(config.num_attention_heads), jnp.bfloat16).astype(float)
    return Alibi(tuple(rounded.tolist()), factor=config.head_dim**-0.5, dtype="bfloat16")


class FalconModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = FalconConfig
    layer_class = staticmethod(_make_layer)

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_epsilon)

    def rope_settings(self):
        return {} if self.config.alibi else super().rope_settings()


@register_module(TaskType.CAUSAL_LM, config=FalconConfig, model_type="falcon")
class FalconForCausalLM(CausalLM):
    """Falcon with a language-model head."""

    body_class = FalconModel

    WEIGHTS = renamed(
        {
            "model": "transformer",
            "embed_tokens": "word_embeddings",
            "layers": "h",
            "self_attn": "self_attention",
            "o_proj": "dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
            "norm": "ln_f",
        },
        *fused(("q_proj", "k_proj", "v_proj"), "query_key_value", groups="num_key_value_heads"),
        Rule(
            "{path}.input_layernorm.{leaf}",
            "{path}.{norm}.{leaf}",
            norm_name("input_layernorm", "ln_attn"),
        ),
        Rule(
            "{path}.post_attention_layernorm.{leaf}",
            "{path}.{norm}.{leaf}",
            norm_name("post_attention_layernorm", "ln_mlp"),
        ),
        *STANDARD,
    )
