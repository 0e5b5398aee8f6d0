"""MiniCPM3 (OpenBMB Team 2026): Llama with a factor on what a layer adds to the stream and keys and
values that each layer computes from a latent of each token.

- a factor on what a layer adds to the stream
- keys and values that each layer computes from a latent of each token
- a factor on the embeddings
- a factor on the logits

Numbers follow Hugging Face's `modeling_minicpm3.py`; parameter names are its names.
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


@register_config("minicpm3")
class MiniCPM3Config(EasyDeLBaseConfig, transformers.MiniCPM3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "minicpm3"


class MiniCPM3DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: MiniCPM3Config = parts.config
        super().__init__(
            parts,
            self_attn=LatentAttention(parts, interleaved=False),
            mlp=GatedMLP(parts, bias=config.mlp_bias),
            factor=config.scale_depth / config.num_hidden_layers**0.5,
        )


class MiniCPM3Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = MiniCPM3Config
    layer_class = MiniCPM3DecoderLayer

    def enter(self, x, ctx):
        return x * self.config.scale_emb


@register_module(TaskType.CAUSAL_LM, config=MiniCPM3Config, model_type="minicpm3")
class MiniCPM3ForCausalLM(CausalLM):
    """MiniCPM3 with a language-model head."""

    body_class = MiniCPM3Model
    multiplies_by_width = True

    def head(self):
        return replace(super().head(), scale=self.config.dim_model_base / self.config.hidden_size)
