"""HyperCLOVAX (NAVER CLOUD Corp 2026): Granite with further norms behind attention and
feed-forward.

- further norms behind attention and feed-forward
- a factor on what a layer adds to the stream
- a factor on the embeddings
- a factor on the logits

Numbers follow Hugging Face's `modeling_hyperclovax.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import SandwichLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("hyperclovax")
class HyperCLOVAXConfig(EasyDeLBaseConfig, transformers.HyperCLOVAXConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "hyperclovax"

    def validate(self):
        """Refuse fields whose other values have other layers."""
        super().validate()
        if self.use_post_norm is not True:
            raise ConfigError(
                "hyperclovax: use_post_norm=False has other layers, which are not supported: "
                "use a checkpoint with use_post_norm=True"
            )


class HyperCLOVAXDecoderLayer(SandwichLayer):
    """Attention and feed-forward, each normed before and after."""

    def __init__(self, parts: Parts, index: int):
        config: HyperCLOVAXConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts,
                bias=config.attention_bias,
                scores=ScoreRule(scale=config.attention_multiplier),
            ),
            mlp=GatedMLP(parts, bias=config.mlp_bias),
            factor=config.residual_multiplier,
        )


class HyperCLOVAXModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = HyperCLOVAXConfig
    layer_class = HyperCLOVAXDecoderLayer

    def enter(self, x, ctx):
        return x * self.config.embedding_multiplier


@register_module(TaskType.CAUSAL_LM, config=HyperCLOVAXConfig, model_type="hyperclovax")
class HyperCLOVAXForCausalLM(CausalLM):
    """HyperCLOVAX with a language-model head."""

    body_class = HyperCLOVAXModel

    WEIGHTS = renamed(
        {
            "post_attention_layernorm": "post_norm1",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_norm2",
        },
        *STANDARD,
    )

    def head(self):
        return replace(super().head(), scale=self.config.logits_scaling)
