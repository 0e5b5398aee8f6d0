"""M2M-100 (Fan et al. 2020) and NLLB (2022): translation between many languages.

- BART with norms before attention and feed-forward, and after each stack
- sinusoidal positions, which start after the number of the padding token
- the first token of a translation names the language (`forced_bos_token_id`)

Numbers and parameter names follow Hugging Face's `modeling_m2m_100.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.sinusoids import fairseq

from ed_models.body.bart import BART_FIELDS, BartBody, BartForm
from ed_models.tasks.seq2seq import Seq2SeqLM
from ed_models.tasks.seq2seq_names import BART_WEIGHTS


@register_config("m2m_100")
class M2M100Config(EasyDeLBaseConfig, transformers.M2M100Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "m2m_100"
    attribute_map = {**transformers.M2M100Config.attribute_map, **BART_FIELDS}


class M2M100Model(BartBody):
    """Embedding, encoder, decoder."""

    config_class = M2M100Config
    form = BartForm(
        pre_norm=True,
        embed_norm=False,
        first_position=lambda config: config.pad_token_id + 1,
        frequencies=fairseq,
    )


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=M2M100Config, model_type="m2m_100")
class M2M100ForConditionalGeneration(Seq2SeqLM):
    """M2M100 with a language-model head."""

    body_class = M2M100Model
    WEIGHTS = BART_WEIGHTS
