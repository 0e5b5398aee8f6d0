"""MPNet (Song et al. 2020): BERT with relative position buckets beside its learned positions.

- token i of a text has position `2 + i`
- one table of relative position buckets for all layers

Numbers and parameter names follow Hugging Face's `modeling_mpnet.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.settings import RelativeBuckets

from ed_models.body.encoder import EncoderLayer, TextEncoder
from ed_models.tasks.encoder_names import EncoderNames, HeadNames, bert_body, lm_head
from ed_models.tasks.encoders import MaskedLM


@register_config("mpnet")
class MPNetConfig(EasyDeLBaseConfig, transformers.MPNetConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "mpnet"
    attribute_map = {
        **transformers.MPNetConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }

    @property
    def first_position(self) -> int:
        """The row of the position table that belongs to the first token."""
        return 2


class MPNetModel(TextEncoder):
    """Embeddings, bidirectional layers with relative positions."""

    config_class = MPNetConfig
    layer_class = partial(EncoderLayer, position=RelativeBuckets(max_distance=128))

    def add_parts(self, parts):
        super().add_parts(parts)
        config = parts.config
        shape = config.relative_attention_num_buckets, config.num_attention_heads
        self.relative_attention_bias = parts.table(*shape, axes=(None, "heads"))

    def through(self, x, ctx, cache, input_ids, *, keep_hidden):
        ctx = replace(ctx, buckets=self.relative_attention_bias.get_value())
        return super().through(x, ctx, cache, input_ids, keep_hidden=keep_hidden)


@register_module(TaskType.MASKED_LM, config=MPNetConfig, model_type="mpnet")
class MPNetForMaskedLM(MaskedLM):
    """MPNet with a head that predicts tokens."""

    body_class = MPNetModel
    names = EncoderNames(
        body={
            "model.relative_attention_bias": "mpnet.encoder.relative_attention_bias.weight",
            **bert_body("mpnet"),
            "self_attn.q_proj": "attention.attn.q",
            "self_attn.k_proj": "attention.attn.k",
            "self_attn.v_proj": "attention.attn.v",
            "self_attn.o_proj": "attention.attn.o",
            "input_layernorm": "attention.LayerNorm",
        },
        heads={
            TaskType.MASKED_LM: lm_head("gelu"),
            TaskType.BASE_MODULE: HeadNames("mpnet.pooler.dense"),
            TaskType.SEQUENCE_CLASSIFICATION: HeadNames(
                "classifier.out_proj",
                "classifier.dense",
                drops_input=True,
            ),
            TaskType.MULTIPLE_CHOICE: HeadNames("classifier", "mpnet.pooler.dense"),
            TaskType.TOKEN_CLASSIFICATION: HeadNames("classifier"),
            TaskType.QUESTION_ANSWERING: HeadNames("qa_outputs", dropout=None),
        },
    )
