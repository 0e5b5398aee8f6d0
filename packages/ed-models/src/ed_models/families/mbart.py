"""mBART (Liu et al. 2020): BART with norms before attention and feed-forward.

- both stacks end with a norm
- the decoder starts with the last token of its labels, which names the language

Numbers and parameter names follow Hugging Face's `modeling_mbart.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.bart import BART_FIELDS, BartBody, BartForm
from ed_models.tasks.seq2seq import Seq2SeqLM
from ed_models.tasks.seq2seq_classification import CLASSIFIER_TASKS
from ed_models.tasks.seq2seq_names import BART_WEIGHTS, with_bias


@register_config("mbart")
class MBartConfig(EasyDeLBaseConfig, transformers.MBartConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "mbart"
    attribute_map = {**transformers.MBartConfig.attribute_map, **BART_FIELDS}


class MBartModel(BartBody):
    """Embedding, encoder, decoder."""

    config_class = MBartConfig
    form = BartForm(pre_norm=True)


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=MBartConfig, model_type="mbart")
class MBartForConditionalGeneration(Seq2SeqLM):
    """MBart with a language-model head."""

    body_class = MBartModel
    DERIVED = CLASSIFIER_TASKS
    WEIGHTS = BART_WEIGHTS
    as_published = staticmethod(with_bias)
    logits_bias = True

    def first_tokens(self, tokens):
        count = jnp.sum(tokens != self.config.pad_token_id, axis=1, keepdims=True)
        return jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0), axis=1)
