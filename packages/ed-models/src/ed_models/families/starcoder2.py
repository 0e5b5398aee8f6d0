"""StarCoder2 (Lozhkov et al. 2024): layer norms and a feed-forward without a gate.

- biases everywhere (`use_bias`); all layers may have a window
- head tied to the embedding

Numbers follow Hugging Face's `modeling_starcoder2.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("starcoder2")
class Starcoder2Config(EasyDeLBaseConfig, transformers.Starcoder2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "starcoder2"


class Starcoder2DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Starcoder2Config = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts, bias=config.use_bias, mask=MaskRule(window=config.sliding_window)
            ),
            mlp=MLP(parts, bias=config.use_bias),
            dropout=config.residual_dropout,
        )


class Starcoder2Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Starcoder2Config
    layer_class = Starcoder2DecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.norm_epsilon)

    def enter(self, x, ctx):
        return ctx.apply_dropout(x, self.config.embedding_dropout, "embeddings")


@register_module(TaskType.CAUSAL_LM, config=Starcoder2Config, model_type="starcoder2")
class Starcoder2ForCausalLM(CausalLM):
    """Starcoder2 with a language-model head."""

    body_class = Starcoder2Model

    WEIGHTS = renamed({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}, *STANDARD)
