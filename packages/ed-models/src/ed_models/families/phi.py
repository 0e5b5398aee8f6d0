"""Phi-1 to Phi-2 (Microsoft 2023): attention and feed-forward side by side behind one layer norm.

- biases everywhere, in the head too; a feed-forward without a gate
- half of each head turns; queries and keys may be layer-normed (`qk_layernorm`)

Numbers follow Hugging Face's `modeling_phi.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import ParallelLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("phi")
class PhiConfig(EasyDeLBaseConfig, transformers.PhiConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "phi"


class PhiDecoderLayer(ParallelLayer):
    """Attention and feed-forward side by side behind one norm."""

    def __init__(self, parts: Parts, index: int):
        config: PhiConfig = parts.config
        attention = SelfAttention(
            parts, bias=True, norm=QKNorm(parts.own_norm if config.qk_layernorm else None)
        )
        super().__init__(parts, self_attn=attention, mlp=MLP(parts), dropout=config.resid_pdrop)


class PhiModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = PhiConfig
    layer_class = PhiDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps)

    def enter(self, x, ctx):
        return ctx.apply_dropout(x, self.config.embd_pdrop, "embeddings")


@register_module(TaskType.CAUSAL_LM, config=PhiConfig, model_type="phi")
class PhiForCausalLM(CausalLM):
    """Phi with a language-model head."""

    body_class = PhiModel

    @property
    def head_bias(self):
        return True

    WEIGHTS = renamed(
        {
            "model.norm": "model.final_layernorm",
            "o_proj": "dense",
            "q_norm": "q_layernorm",
            "k_norm": "k_layernorm",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        },
        *STANDARD,
    )
