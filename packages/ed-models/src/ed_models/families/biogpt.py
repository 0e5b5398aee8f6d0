"""BioGPT (Microsoft 2022): a decoder with learned positions, layer norms and biases everywhere.

- positions start in row 2 of their table
- the root of the hidden size is a factor on the embeddings (`scale_embedding`)
- `layer_norm_eps` has no effect: the norms of published checkpoints have the epsilon 1e-5
- head tied to the embedding

Numbers follow Hugging Face's `modeling_biogpt.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("biogpt")
class BioGptConfig(EasyDeLBaseConfig, transformers.BioGptConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "biogpt"
    attribute_map = {
        **transformers.BioGptConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }

    def validate(self):
        """Raise ConfigError for unsupported fields."""
        super().validate()
        if self.layerdrop:
            raise ConfigError(
                f"biogpt: layerdrop={self.layerdrop} drops layers in training: set layerdrop to 0"
            )


class BioGptDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: BioGptConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=True, position=None),
            mlp=MLP(parts, dropout=config.activation_dropout),
            dropout=config.hidden_dropout_prob,
        )


class BioGptModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = BioGptConfig
    layer_class = BioGptDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=1e-5)

    def add_parts(self, parts):
        config = parts.config
        self.embed_positions = parts.embed(config.max_position_embeddings + 2, config.hidden_size)

    def enter(self, x, ctx):
        x = x * (self.config.hidden_size**0.5 if self.config.scale_embedding else 1.0)
        x = x + self.embed_positions(ctx.position_ids + 2)
        return ctx.apply_dropout(x, self.config.hidden_dropout_prob, "embeddings")

    def rope_settings(self):
        return {}


@register_module(TaskType.CAUSAL_LM, config=BioGptConfig, model_type="biogpt")
class BioGptForCausalLM(CausalLM):
    """BioGpt with a language-model head."""

    body_class = BioGptModel

    WEIGHTS = renamed(
        {
            "model.norm": "biogpt.layer_norm",
            "self_attn.o_proj": "self_attn.out_proj",
            "mlp.up_proj": "fc1",
            "mlp.down_proj": "fc2",
            "lm_head": "output_projection",
            "model": "biogpt",
            "input_layernorm": "self_attn_layer_norm",
            "post_attention_layernorm": "final_layer_norm",
        },
        *STANDARD,
    )
