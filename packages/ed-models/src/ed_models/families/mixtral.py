"""Mixtral (Jiang et al. 2024): Mistral with experts in place of the feed-forward layer.

- each token visits the two best of eight experts; their softmax weights add up to one
- all layers see the last `sliding_window` tokens, or all tokens if the field is null

Numbers follow Hugging Face's `modeling_mixtral.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import BLOCK_SPARSE


@register_config("mixtral")
class MixtralConfig(EasyDeLBaseConfig, transformers.MixtralConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "mixtral"


class MixtralDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: MixtralConfig = parts.config
        experts = config.num_local_experts
        mlp = SparseMLP(
            parts,
            gate=Router(parts, experts, config.num_experts_per_tok),
            experts=Experts(parts, experts, config.intermediate_size),
        )
        attention = SelfAttention(parts, mask=MaskRule(window=config.sliding_window))
        super().__init__(parts, self_attn=attention, mlp=mlp)


class MixtralModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = MixtralConfig
    layer_class = MixtralDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=MixtralConfig, model_type="mixtral")
class MixtralForCausalLM(CausalLM):
    """Mixtral with a language-model head."""

    body_class = MixtralModel
    WEIGHTS = BLOCK_SPARSE
    MODULES = Modules({"block_sparse_moe": "mlp"})
