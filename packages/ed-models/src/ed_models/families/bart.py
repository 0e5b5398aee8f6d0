"""BART (Lewis et al. 2019): an encoder-decoder with norms after the additions.

- learned positions, which start in row 2 of their table
- the sum of embeddings and positions is normed
- the head is the embedding, with a bias that is not trained

Numbers and parameter names follow Hugging Face's `modeling_bart.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.bart import BART_FIELDS, BartBody
from ed_models.tasks.seq2seq import Seq2SeqLM
from ed_models.tasks.seq2seq_classification import CLASSIFIER_TASKS
from ed_models.tasks.seq2seq_names import BART_WEIGHTS, with_bias


@register_config("bart")
class BartConfig(EasyDeLBaseConfig, transformers.BartConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "bart"
    attribute_map = {**transformers.BartConfig.attribute_map, **BART_FIELDS}


class BartModel(BartBody):
    """Embedding, encoder, decoder."""

    config_class = BartConfig


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=BartConfig, model_type="bart")
class BartForConditionalGeneration(Seq2SeqLM):
    """BART with a language-model head."""

    body_class = BartModel
    DERIVED = CLASSIFIER_TASKS
    WEIGHTS = BART_WEIGHTS
    as_published = staticmethod(with_bias)
    logits_bias = True
