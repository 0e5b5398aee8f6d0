"""mT5 (Xue et al. 2020): T5 v1.1 for 101 languages, whose head has no scale.

Numbers and parameter names follow Hugging Face's `modeling_mt5.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.encoder_decoder import EncoderDecoder
from ed_models.body.t5 import (
    INITIALIZER_RANGE,
    T5_FIELDS,
    decoder_layer,
    encoder_layer,
    layer_stack,
)
from ed_models.tasks.seq2seq import Seq2SeqLM
from ed_models.tasks.seq2seq_names import T5_WEIGHTS, with_head
from ed_models.tasks.text_encoder import ENCODER_CLASSES


@register_config("mt5")
class MT5Config(EasyDeLBaseConfig, transformers.MT5Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    `transformers` sets `tie_word_embeddings` to true; this class keeps the value of the file.
    """

    model_type = "mt5"
    attribute_map = {**transformers.MT5Config.attribute_map, **T5_FIELDS}
    known_keywords = frozenset({"dense_act_fn", "is_gated_act"})
    initializer_range = INITIALIZER_RANGE

    def __post_init__(self, **kwargs: object):
        tied = self.tie_word_embeddings
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = tied is not False


class MT5Model(EncoderDecoder):
    """Embedding, encoder, decoder."""

    config_class = MT5Config
    encoder_layer = staticmethod(encoder_layer)
    decoder_layer = staticmethod(decoder_layer)
    build_stack = staticmethod(layer_stack)


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=MT5Config, model_type="mt5")
class MT5ForConditionalGeneration(Seq2SeqLM):
    """mT5 with a language-model head."""

    body_class = MT5Model
    DERIVED = ENCODER_CLASSES
    WEIGHTS = T5_WEIGHTS
    as_published = staticmethod(with_head)
