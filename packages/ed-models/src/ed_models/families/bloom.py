"""BLOOM (BigScience 2022): ALiBi, a layer norm after the embedding, biases everywhere.

- one tensor for queries, keys and values, head by head
- the normed stream may be the residual (`apply_residual_connection_post_layernorm`)
- head tied to the embedding

Numbers follow Hugging Face's `modeling_bloom.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.scoring import Alibi, alibi_slopes
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, fused, renamed


@register_config("bloom")
class BloomConfig(EasyDeLBaseConfig, transformers.BloomConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "bloom"

    def validate(self):
        """Raise ConfigError for a computation in slices, which omits the biases."""
        super().validate()
        if self.slow_but_exact and self.pretraining_tp > 1:
            raise ConfigError(
                f"bloom: slow_but_exact=True with pretraining_tp={self.pretraining_tp} is not "
                "supported: set slow_but_exact=False"
            )


class BloomDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream, or to the norm."""

    def __init__(self, parts: Parts, index: int):
        config: BloomConfig = parts.config
        position = Alibi(alibi_slopes(config.num_attention_heads))
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=True, position=position),
            mlp=MLP(parts, 4 * config.hidden_size, hidden_act="gelu_pytorch_tanh"),
            dropout=config.hidden_dropout,
        )
        self.adds_to_norm = config.apply_residual_connection_post_layernorm

    def __call__(self, x, ctx, cache, layer):
        if not self.adds_to_norm:
            return super().__call__(x, ctx, cache, layer)
        normed = self.input_layernorm(x)
        attended, cache = self.self_attn(normed, ctx, cache, layer)
        x = ctx.name_activation(
            normed + ctx.apply_dropout(attended, self.dropout, "attention"), "residual"
        )
        normed = self.post_attention_layernorm(x)
        out, report = self.feed_forward(normed, ctx)
        return normed + ctx.apply_dropout(out, self.dropout, "mlp"), cache, report


class BloomModel(Decoder):
    """Embedding, its norm, decoder layers, final norm."""

    config_class = BloomConfig
    layer_class = BloomDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_epsilon)

    def add_parts(self, parts):
        self.embed_norm = parts.own_norm(parts.config.hidden_size)

    def enter(self, x, ctx):
        return self.embed_norm(x)

    def rope_settings(self):
        return {}


@register_module(TaskType.CAUSAL_LM, config=BloomConfig, model_type="bloom")
class BloomForCausalLM(CausalLM):
    """BLOOM with a language-model head."""

    body_class = BloomModel

    WEIGHTS = renamed(
        {
            "model.norm": "transformer.ln_f",
            "model": "transformer",
            "embed_tokens": "word_embeddings",
            "embed_norm": "word_embeddings_layernorm",
            "layers": "h",
            "self_attn": "self_attention",
            "o_proj": "dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        *fused(("q_proj", "k_proj", "v_proj"), "query_key_value", groups="num_attention_heads"),
        *STANDARD,
    )
