"""NomicBERT (Nussbaum et al. 2024): BERT with rotary positions and a gated feed-forward layer.

Numbers and parameter names follow Hugging Face's `modeling_nomic_bert.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.adapters.peft_layout import Modules
from ed_models.body.context import rope_settings
from ed_models.body.encoder import BIDIRECTIONAL, EncoderLayer, TextEncoder
from ed_models.tasks.encoder_names import EncoderNames, HeadNames
from ed_models.tasks.encoders import MaskedLM
from ed_models.weights.rules import fused


@register_config("nomic_bert")
class NomicBertConfig(EasyDeLBaseConfig, transformers.NomicBertConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "nomic_bert"
    attribute_map = {
        **transformers.NomicBertConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }

    def validate(self):
        """Raise ConfigError for rotary positions of a part of the features."""
        super().validate()
        share = (self.rope_parameters or {}).get("partial_rotary_factor")
        if share not in (None, 1):
            raise ConfigError(
                f"nomic_bert: partial_rotary_factor={share} in rope_parameters is not supported; "
                "omit it, as Hugging Face's model ignores it"
            )


def _layer(parts: Parts, index: int) -> EncoderLayer:
    """Create a layer."""
    attention = SelfAttention(parts, position=Rotary(), mask=BIDIRECTIONAL)
    return EncoderLayer(parts, index, self_attn=attention, mlp=GatedMLP(parts))


class NomicBertModel(TextEncoder):
    """Embeddings, bidirectional layers with rotary positions."""

    config_class = NomicBertConfig
    layer_class = staticmethod(_layer)

    @staticmethod
    def has_position_table(config: EasyDeLBaseConfig) -> bool:
        return False

    def rope_settings(self):
        return rope_settings(self.config)


@register_module(TaskType.MASKED_LM, config=NomicBertConfig, model_type="nomic_bert")
class NomicBertForMaskedLM(MaskedLM):
    """NomicBERT with a head that predicts tokens."""

    body_class = NomicBertModel
    MODULES = Modules(
        {
            "encoder.layers": "layers",
            "attn.out_proj": "self_attn.o_proj",
            "mlp.fc11": "mlp.up_proj",
            "mlp.fc12": "mlp.gate_proj",
            "mlp.fc2": "mlp.down_proj",
        },
        separate={"attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    )
    names = EncoderNames(
        body={
            "model.embed_tokens": "nomic_bert.embeddings.word_embeddings",
            "model.embed_types": "nomic_bert.embeddings.token_type_embeddings",
            "model.embed_norm": "nomic_bert.emb_ln",
            "model.layers": "nomic_bert.encoder.layers",
            "model": "nomic_bert",
            "self_attn.o_proj": "attn.out_proj",
            "self_attn": "attn",
            "input_layernorm": "norm1",
            "mlp.up_proj": "mlp.fc11",
            "mlp.gate_proj": "mlp.fc12",
            "mlp.down_proj": "mlp.fc2",
            "post_attention_layernorm": "norm2",
        },
        heads={
            TaskType.MASKED_LM: HeadNames(
                out="cls.predictions.decoder",
                dense="cls.predictions.transform.dense",
                norm="cls.predictions.transform.layer_norm",
                bias="cls.predictions.bias",
                activation="hidden_act",
                dropout=None,
            ),
            TaskType.SEQUENCE_CLASSIFICATION: HeadNames("classifier", "nomic_bert.pooler.dense"),
            TaskType.TOKEN_CLASSIFICATION: HeadNames("classifier"),
        },
        rules=fused(("q_proj", "k_proj", "v_proj"), "Wqkv"),
    )
