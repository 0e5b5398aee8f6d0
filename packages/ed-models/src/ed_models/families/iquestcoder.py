"""IQuestCoder (2026): the layers of Llama.

Numbers follow Hugging Face's `modeling_llama.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("iquestcoder")
class IQuestCoderConfig(EasyDeLBaseConfig, transformers.IQuestCoderConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "iquestcoder"


class IQuestCoderDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: IQuestCoderConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.attention_bias),
            mlp=GatedMLP(parts, bias=config.mlp_bias),
        )


class IQuestCoderModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = IQuestCoderConfig
    layer_class = IQuestCoderDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=IQuestCoderConfig, model_type="iquestcoder")
class IQuestCoderForCausalLM(CausalLM):
    """IQuestCoder with a language-model head."""

    body_class = IQuestCoderModel
    architecture = "LlamaForCausalLM"
