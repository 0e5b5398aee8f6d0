"""DeBERTa-v2 and v3 (He et al. 2021): BERT with disentangled attention.

- scores between contents and relative positions, in logarithmic buckets
- one table of relative positions for all layers, which may be normed
- v3 has neither learned positions nor token types
- the pooler belongs to the classifier; its activation is `pooler_hidden_act`

Numbers and parameter names follow Hugging Face's `modeling_deberta_v2.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.settings import Disentangled
from ed_layers.parts import Parts

from ed_models.body.encoder import EncoderLayer, TextEncoder
from ed_models.tasks.encoder_names import EncoderNames, HeadNames, bert_body
from ed_models.tasks.encoders import MaskedLM

_POOLED = HeadNames(
    "classifier",
    "pooler.dense",
    activation="pooler_hidden_act",
    dropout="cls_dropout",
    drops_input=True,
)


@register_config("deberta-v2")
class DebertaV2Config(EasyDeLBaseConfig, transformers.DebertaV2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "deberta-v2"
    attribute_map = {
        **transformers.DebertaV2Config.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }
    # `transformers` reads these fields without declaring them.
    known_keywords = frozenset(
        {
            *("position_buckets", "share_att_key", "norm_rel_ebd", "conv_kernel_size", "conv_act"),
            *("attention_head_size", "embedding_size", "cls_dropout", "conv_groups"),
        }
    )

    def validate(self):
        """Raise ConfigError for attention without relative positions, and for convolutions."""
        super().validate()  # type: ignore[misc]
        if not self.relative_attention or not self.pos_att_type:
            raise ConfigError(
                "deberta-v2: relative_attention must be true and pos_att_type must contain c2p or "
                "p2c; a model without them is a BERT"
            )
        if getattr(self, "conv_kernel_size", 0):
            raise ConfigError(
                "deberta-v2: conv_kernel_size is not supported (deberta-v2-xlarge and -xxlarge); "
                "the models of v3 have no convolution"
            )

    @property
    def disentangled(self) -> Disentangled:
        """The form of the attention."""
        reach = self.max_relative_positions
        terms = cast(tuple[Literal["c2p", "p2c"], ...], tuple(self.pos_att_type))
        return Disentangled(
            buckets=getattr(self, "position_buckets", -1),
            max_distance=reach if reach >= 1 else self.max_position_embeddings,
            terms=terms,
            shared=getattr(self, "share_att_key", False),
        )


def layer(parts: Parts, index: int) -> EncoderLayer:
    """Create a layer."""
    return EncoderLayer(parts, index, position=parts.config.disentangled)


class DebertaV2Model(TextEncoder):
    """Embeddings, bidirectional layers with relative positions."""

    config_class = DebertaV2Config
    layer_class = staticmethod(layer)

    @staticmethod
    def has_position_table(config: Any) -> bool:
        return config.position_biased_input

    def add_parts(self, parts):
        super().add_parts(parts)
        config = parts.config
        shape = 2 * config.disentangled.span, config.hidden_size
        self.rel_embeddings = parts.embed(*shape)
        if "layer_norm" in getattr(config, "norm_rel_ebd", "none"):
            self.rel_norm = parts.own_norm(config.hidden_size)

    def through(self, x, ctx, cache, input_ids, *, keep_hidden):
        table = self.rel_embeddings.table.astype(x.dtype)
        if hasattr(self, "rel_norm"):
            table = self.rel_norm(table)
        ctx = replace(ctx, buckets=table)
        return super().through(x, ctx, cache, input_ids, keep_hidden=keep_hidden)


@register_module(TaskType.MASKED_LM, config=DebertaV2Config, model_type="deberta-v2")
class DebertaV2ForMaskedLM(MaskedLM):
    """DeBERTa with a head that predicts tokens."""

    body_class = DebertaV2Model
    names = EncoderNames(
        body={
            "model.rel_embeddings": "deberta.encoder.rel_embeddings",
            "model.rel_norm": "deberta.encoder.LayerNorm",
            **bert_body("deberta"),
            "self_attn.q_proj": "attention.self.query_proj",
            "self_attn.k_proj": "attention.self.key_proj",
            "self_attn.v_proj": "attention.self.value_proj",
            "self_attn.pos_key_proj": "attention.self.pos_key_proj",
            "self_attn.pos_query_proj": "attention.self.pos_query_proj",
        },
        heads={
            TaskType.MASKED_LM: HeadNames(
                out="cls.predictions.decoder",
                dense="cls.predictions.transform.dense",
                norm="cls.predictions.transform.LayerNorm",
                bias="cls.predictions.bias",
                activation="hidden_act",
                dropout=None,
            ),
            TaskType.SEQUENCE_CLASSIFICATION: _POOLED,
            TaskType.MULTIPLE_CHOICE: _POOLED,
            TaskType.TOKEN_CLASSIFICATION: HeadNames("classifier"),
            TaskType.QUESTION_ANSWERING: HeadNames("qa_outputs", dropout=None),
        },
        others=("lm_predictions", "mask_predictions"),
    )
