"""Nemotron-4 and Minitron (NVIDIA 2024): squared ReLU without a gate.

- layer norms that store their weight minus one; half of each head turns

Numbers follow Hugging Face's `modeling_nemotron.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("nemotron")
class NemotronConfig(EasyDeLBaseConfig, transformers.NemotronConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "nemotron"


class NemotronDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: NemotronConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.attention_bias),
            mlp=MLP(parts, bias=config.mlp_bias),
        )


class NemotronModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = NemotronConfig
    layer_class = NemotronDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.norm_eps, offset=1.0)


@register_module(TaskType.CAUSAL_LM, config=NemotronConfig, model_type="nemotron")
class NemotronForCausalLM(CausalLM):
    """Nemotron with a language-model head."""

    body_class = NemotronModel
