"""Youtu-LLM (Tencent 2026): a dense decoder with the latent attention of DeepSeek-V3.

- keys and values of all heads come from one latent, which is all that a cache stores
- new embeddings have a separate standard deviation, `embedding_initializer_range`

Numbers follow Hugging Face's `modeling_youtu.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.latent_attention import LatentAttention
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("youtu")
class YoutuConfig(EasyDeLBaseConfig, transformers.YoutuConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "youtu"


class YoutuDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: YoutuConfig = parts.config
        super().__init__(
            parts,
            self_attn=LatentAttention(parts, interleaved=config.rope_interleave),
            mlp=GatedMLP(parts),
        )


class YoutuModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = YoutuConfig
    layer_class = YoutuDecoderLayer

    @staticmethod
    def embedding(parts):
        config = parts.config
        scaled = config.replace(initializer_range=config.embedding_initializer_range)
        return replace(parts, config=scaled).embed(config.vocab_size, config.hidden_size)


@register_module(TaskType.CAUSAL_LM, config=YoutuConfig, model_type="youtu")
class YoutuForCausalLM(CausalLM):
    """Youtu with a language-model head."""

    body_class = YoutuModel
