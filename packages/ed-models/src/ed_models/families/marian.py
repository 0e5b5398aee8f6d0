"""Marian (Junczys-Dowmunt et al. 2018): translation models of the OPUS project.

- BART with sinusoidal positions, and without a norm of the embeddings
- encoder and decoder may have separate vocabularies

Numbers and parameter names follow Hugging Face's `modeling_marian.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.sinusoids import geometric

from ed_models.body.bart import BART_FIELDS, BartBody, BartForm
from ed_models.tasks.seq2seq import Seq2SeqLM
from ed_models.tasks.seq2seq_names import BART_WEIGHTS, with_bias


@register_config("marian")
class MarianConfig(EasyDeLBaseConfig, transformers.MarianConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "marian"
    attribute_map = {**transformers.MarianConfig.attribute_map, **BART_FIELDS}


class MarianModel(BartBody):
    """Embedding, encoder, decoder."""

    config_class = MarianConfig
    form = BartForm(embed_norm=False, first_position=0, frequencies=geometric)


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=MarianConfig, model_type="marian")
class MarianMTModel(Seq2SeqLM):
    """Marian with a language-model head."""

    body_class = MarianModel
    WEIGHTS = BART_WEIGHTS
    as_published = staticmethod(with_bias)
    logits_bias = True
