"""T5 (Raffel et al. 2020), and T5 v1.1 (Shazeer 2020): an encoder-decoder with relative positions.

- pre-norm layers with RMSNorm, no biases, scores without a scale
- one table of relative position buckets for all layers of the encoder, one for the decoder
- feed-forward with ReLU (v1.0) or gated GELU (v1.1)
- v1.0: the head is the embedding, and its inputs are scaled by `d_model ** -0.5`; v1.1: a separate
  head without a scale

Numbers and parameter names follow Hugging Face's `modeling_t5.py`.
"""

from __future__ import annotations

from dataclasses import replace

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


@register_config("t5")
class T5Config(EasyDeLBaseConfig, transformers.T5Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "t5"
    attribute_map = {**transformers.T5Config.attribute_map, **T5_FIELDS}
    # `transformers` computes these fields, and writes them to config.json.
    known_keywords = frozenset(
        {"dense_act_fn", "is_gated_act", "scale_decoder_outputs", "tie_word_embeddings"}
    )
    initializer_range = INITIALIZER_RANGE

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        # A head that differs from the embedding is separate, and its inputs are scaled as before.
        if kwargs.get("scale_decoder_outputs") and kwargs.get("tie_word_embeddings") is False:
            self.tie_word_embeddings = False


class T5Model(EncoderDecoder):
    """Embedding, encoder, decoder."""

    config_class = T5Config
    encoder_layer = staticmethod(encoder_layer)
    decoder_layer = staticmethod(decoder_layer)
    build_stack = staticmethod(layer_stack)


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=T5Config, model_type="t5")
class T5ForConditionalGeneration(Seq2SeqLM):
    """T5 with a language-model head."""

    body_class = T5Model
    DERIVED = ENCODER_CLASSES
    WEIGHTS = T5_WEIGHTS
    as_published = staticmethod(with_head)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding, as in T5 v1.0."""
        return self.config.scale_decoder_outputs and self.config.tie_word_embeddings

    def head(self):
        head, config = super().head(), self.config
        return replace(head, scale=config.d_model**-0.5) if config.scale_decoder_outputs else head
