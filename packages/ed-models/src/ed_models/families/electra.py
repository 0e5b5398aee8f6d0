"""ELECTRA (Clark et al. 2020): BERT with projected embeddings, trained to find replaced tokens.

- the embeddings may be smaller than the hidden states; then they are projected
- no pooler: the heads read the first token

Numbers and parameter names follow Hugging Face's `modeling_electra.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.encoder import TextEncoder, only_encoder
from ed_models.tasks.encoder_names import EncoderNames, HeadNames, bert_body
from ed_models.tasks.encoders import MaskedLM


@register_config("electra")
class ElectraConfig(EasyDeLBaseConfig, transformers.ElectraConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "electra"
    attribute_map = {
        **transformers.ElectraConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }

    def validate(self):
        """Raise ConfigError for decoders."""
        super().validate()
        only_encoder(self)


class ElectraModel(TextEncoder):
    """Embeddings, bidirectional layers."""

    config_class = ElectraConfig


@register_module(TaskType.MASKED_LM, config=ElectraConfig, model_type="electra")
class ElectraForMaskedLM(MaskedLM):
    """ELECTRA's generator: a head that predicts tokens."""

    body_class = ElectraModel
    names = EncoderNames(
        body={"model.embed_proj": "electra.embeddings_project", **bert_body("electra")},
        heads={
            TaskType.MASKED_LM: HeadNames(
                out="generator_lm_head",
                dense="generator_predictions.dense",
                norm="generator_predictions.LayerNorm",
                bias="generator_lm_head.bias",
                activation="gelu",
                dropout=None,
            ),
            TaskType.SEQUENCE_CLASSIFICATION: HeadNames(
                "classifier.out_proj", "classifier.dense", activation="gelu", drops_input=True
            ),
            TaskType.MULTIPLE_CHOICE: HeadNames(
                "classifier",
                "sequence_summary.summary",
                activation="summary_activation",
                dropout="summary_last_dropout",
                requires={"summary_type": "first", "summary_use_proj": True},
            ),
            TaskType.TOKEN_CLASSIFICATION: HeadNames("classifier"),
            TaskType.QUESTION_ANSWERING: HeadNames("qa_outputs", dropout=None),
        },
        ignored_names=("discriminator_predictions",),
    )
