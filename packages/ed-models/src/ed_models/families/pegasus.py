"""PEGASUS (Zhang et al. 2019): an encoder-decoder that summarizes.

- BART with norms before attention and feed-forward, and after each stack
- sinusoidal positions, and no norm of the embeddings

Numbers and parameter names follow Hugging Face's `modeling_pegasus.py`.
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


@register_config("pegasus")
class PegasusConfig(EasyDeLBaseConfig, transformers.PegasusConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "pegasus"
    attribute_map = {**transformers.PegasusConfig.attribute_map, **BART_FIELDS}


class PegasusModel(BartBody):
    """Embedding, encoder, decoder."""

    config_class = PegasusConfig
    form = BartForm(pre_norm=True, embed_norm=False, first_position=0, frequencies=geometric)


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=PegasusConfig, model_type="pegasus")
class PegasusForConditionalGeneration(Seq2SeqLM):
    """Pegasus with a language-model head."""

    body_class = PegasusModel
    WEIGHTS = BART_WEIGHTS
    as_published = staticmethod(with_bias)
    logits_bias = True
