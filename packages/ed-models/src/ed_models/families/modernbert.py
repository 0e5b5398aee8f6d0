"""ModernBERT (Warner et al. 2024): a pre-norm encoder with rotary positions and local layers.

- layers of type `sliding_attention` attend to `local_attention / 2` tokens on each side
- rotary positions with a frequency for each type of layer
- gated feed-forward; norms without biases; no norm in front of the first attention

Numbers and parameter names follow Hugging Face's `modeling_modernbert.py`.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.context import rope_settings
from ed_models.body.decoder import Decoder
from ed_models.body.encoder import TextEncoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.encoder_names import EncoderNames, HeadNames
from ed_models.tasks.encoders import MaskedLM
from ed_models.weights.rules import fused


@register_config("modernbert")
class ModernBertConfig(EasyDeLBaseConfig, transformers.ModernBertConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "modernbert"
    attribute_map = {
        **transformers.ModernBertConfig.attribute_map,
        "hidden_act": "hidden_activation",
        "hidden_dropout_prob": "embedding_dropout",
    }


class ModernBertLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: ModernBertConfig = parts.config
        kind = config.layer_types[index]
        # Hugging Face counts the tokens on one side.
        window = config.sliding_window + 1 if kind == "sliding_attention" else None
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            position=Rotary(kind),
            mask=MaskRule(causal=False, window=window),
        )
        mlp = GatedMLP(parts, bias=config.mlp_bias, dropout=config.mlp_dropout)
        super().__init__(parts, self_attn=attention, mlp=mlp)
        self.dropout = config.attention_dropout
        if index == 0:
            self.input_layernorm = None

    def __call__(self, x, ctx, cache, layer):
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        attended, cache = self.self_attn(normed, ctx, cache, layer)
        x = ctx.name_activation(
            x + ctx.apply_dropout(attended, self.dropout, "attention"), "residual"
        )
        out, report = self.feed_forward(self.post_attention_layernorm(x), ctx)
        return x + out, cache, report


class ModernBertModel(TextEncoder):
    """Embeddings, layers with global and local attention, final norm."""

    config_class = ModernBertConfig
    layer_class = ModernBertLayer

    @staticmethod
    def build_norm(parts):
        config = parts.config
        return partial(parts.layer_norm, eps=config.norm_eps, bias=config.norm_bias)

    final_norm = staticmethod(Decoder.final_norm)

    @staticmethod
    def layer_kinds(config):
        return [(kind, index == 0) for index, kind in enumerate(config.layer_types)]

    @staticmethod
    def has_position_table(config: EasyDeLBaseConfig) -> bool:
        return False

    def rope_settings(self):
        return rope_settings(self.config)


#: The head of all tasks: a linear layer, an activation and a norm.
_HEAD = partial(HeadNames, dense="head.dense", norm="head.norm", activation="classifier_activation")


@register_module(TaskType.MASKED_LM, config=ModernBertConfig, model_type="modernbert")
class ModernBertForMaskedLM(MaskedLM):
    """ModernBERT with a head that predicts tokens."""

    body_class = ModernBertModel
    names = EncoderNames(
        body={
            "model.embed_tokens": "model.embeddings.tok_embeddings",
            "model.embed_norm": "model.embeddings.norm",
            "model.norm": "model.final_norm",
            "self_attn.o_proj": "attn.Wo",
            "self_attn": "attn",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "mlp_norm",
            "mlp.down_proj": "mlp.Wo",
        },
        heads={
            TaskType.MASKED_LM: _HEAD(out="decoder", bias="decoder.bias", dropout=None),
            TaskType.SEQUENCE_CLASSIFICATION: _HEAD(out="classifier"),
            TaskType.MULTIPLE_CHOICE: _HEAD(out="classifier"),
            TaskType.TOKEN_CLASSIFICATION: _HEAD(out="classifier"),
            TaskType.QUESTION_ANSWERING: _HEAD(out="classifier"),
        },
        rules=(
            *fused(("q_proj", "k_proj", "v_proj"), "Wqkv"),
            *fused(("gate_proj", "up_proj"), "Wi"),
        ),
    )
