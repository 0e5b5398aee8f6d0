"""XLM-RoBERTa (Conneau et al. 2020): RoBERTa for 100 languages.


Numbers and parameter names follow Hugging Face's `modeling_xlm_roberta.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.encoder import TextEncoder, only_encoder
from ed_models.tasks.encoder_names import EncoderNames, HeadNames, bert_body, lm_head
from ed_models.tasks.encoders import MaskedLM


@register_config("xlm-roberta")
class XLMRobertaConfig(EasyDeLBaseConfig, transformers.XLMRobertaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "xlm-roberta"
    attribute_map = {
        **transformers.XLMRobertaConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }

    def validate(self):
        """Raise ConfigError for decoders."""
        super().validate()
        only_encoder(self)

    @property
    def first_position(self) -> int:
        """The row of the position table that belongs to the first token."""
        return 1 + (self.pad_token_id or 0)


class XLMRobertaModel(TextEncoder):
    """Embeddings, bidirectional layers."""

    config_class = XLMRobertaConfig


@register_module(TaskType.MASKED_LM, config=XLMRobertaConfig, model_type="xlm-roberta")
class XLMRobertaForMaskedLM(MaskedLM):
    """XLM-RoBERTa with a head that predicts tokens."""

    body_class = XLMRobertaModel
    names = EncoderNames(
        body=bert_body("roberta"),
        heads={
            TaskType.MASKED_LM: lm_head("gelu"),
            TaskType.BASE_MODULE: HeadNames("roberta.pooler.dense"),
            TaskType.SEQUENCE_CLASSIFICATION: HeadNames(
                "classifier.out_proj", "classifier.dense", drops_input=True
            ),
            TaskType.MULTIPLE_CHOICE: HeadNames("classifier", "roberta.pooler.dense"),
            TaskType.TOKEN_CLASSIFICATION: HeadNames("classifier"),
            TaskType.QUESTION_ANSWERING: HeadNames("qa_outputs", dropout=None),
        },
    )
