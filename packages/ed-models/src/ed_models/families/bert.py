"""BERT (Devlin et al. 2019): a bidirectional encoder with learned positions and post-norm layers.

- embeddings of tokens, positions and token types are added and normalized
- the pooled output is the first token after a linear layer and tanh

Numbers and parameter names follow Hugging Face's `modeling_bert.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.encoder import TextEncoder, only_encoder
from ed_models.tasks.encoder_names import EncoderNames, HeadNames, bert_body
from ed_models.tasks.encoders import MaskedLM


@register_config("bert")
class BertConfig(EasyDeLBaseConfig, transformers.BertConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "bert"
    attribute_map = {
        **transformers.BertConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }

    def validate(self):
        """Raise ConfigError for decoders."""
        super().validate()
        only_encoder(self)


class BertModel(TextEncoder):
    """Embeddings, bidirectional layers."""

    config_class = BertConfig


@register_module(TaskType.MASKED_LM, config=BertConfig, model_type="bert")
class BertForMaskedLM(MaskedLM):
    """BERT with a head that predicts tokens."""

    body_class = BertModel
    names = EncoderNames(
        body=bert_body("bert"),
        heads={
            TaskType.MASKED_LM: HeadNames(
                out="cls.predictions.decoder",
                dense="cls.predictions.transform.dense",
                norm="cls.predictions.transform.LayerNorm",
                bias="cls.predictions.bias",
                activation="hidden_act",
                dropout=None,
            ),
            TaskType.BASE_MODULE: HeadNames("bert.pooler.dense"),
            TaskType.SEQUENCE_CLASSIFICATION: HeadNames("classifier", "bert.pooler.dense"),
            TaskType.MULTIPLE_CHOICE: HeadNames("classifier", "bert.pooler.dense"),
            TaskType.TOKEN_CLASSIFICATION: HeadNames("classifier"),
            TaskType.QUESTION_ANSWERING: HeadNames("qa_outputs", dropout=None),
        },
        ignored_names=("cls.seq_relationship",),
    )
