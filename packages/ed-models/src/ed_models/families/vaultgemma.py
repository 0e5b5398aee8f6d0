"""VaultGemma (2025): Gemma2 without further norms behind attention and feed-forward.

- norms that add one to their weights
- a window in layers of type `sliding_attention`
- a bound of the scores
- a factor on the embeddings
- a bound of the logits

Numbers follow Hugging Face's `modeling_vaultgemma.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import ScaledDecoder
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("vaultgemma")
class VaultGemmaConfig(EasyDeLBaseConfig, transformers.VaultGemmaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "vaultgemma"


class VaultGemmaDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: VaultGemmaConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts,
                bias=config.attention_bias,
                mask=MaskRule(window=get_layer_window(config, index)),
                scores=ScoreRule(
                    scale=config.query_pre_attn_scalar**-0.5, soft_cap=config.attn_logit_softcapping
                ),
            ),
            mlp=GatedMLP(parts, hidden_act=config.hidden_activation),
        )


class VaultGemmaModel(ScaledDecoder):
    """Embedding, decoder layers, final norm."""

    config_class = VaultGemmaConfig
    layer_class = VaultGemmaDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, offset=1.0, scale_first=True)


@register_module(TaskType.CAUSAL_LM, config=VaultGemmaConfig, model_type="vaultgemma")
class VaultGemmaForCausalLM(CausalLM):
    """VaultGemma with a language-model head."""

    body_class = VaultGemmaModel

    WEIGHTS = renamed(
        {
            "post_attention_layernorm": "pre_feedforward_layernorm",
        },
        *STANDARD,
    )

    def head(self):
        return replace(super().head(), soft_cap=self.config.final_logit_softcapping)
