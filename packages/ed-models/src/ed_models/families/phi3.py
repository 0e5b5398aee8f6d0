"""Phi-3 and Phi-4 (Microsoft 2024): Llama with fused projections.

- one tensor for queries, keys and values, one for gate and up; all layers may have a window
- long contexts by two sets of rotary factors (`longrope`); Phi-4-mini turns a part of each head

Numbers follow Hugging Face's `modeling_phi3.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, fused


@register_config("phi3")
class Phi3Config(EasyDeLBaseConfig, transformers.Phi3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "phi3"


class Phi3DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Phi3Config = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, mask=MaskRule(window=config.sliding_window)),
            mlp=GatedMLP(parts),
            dropout=config.resid_pdrop,
        )


class Phi3Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Phi3Config
    layer_class = Phi3DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Phi3Config, model_type="phi3")
class Phi3ForCausalLM(CausalLM):
    """Phi3 with a language-model head."""

    body_class = Phi3Model

    WEIGHTS = (
        *fused(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        *fused(("gate_proj", "up_proj"), "gate_up_proj"),
        *STANDARD,
    )
