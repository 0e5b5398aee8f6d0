"""UMT5 (Chung et al. 2023): mT5 with a table of relative positions in each layer.

Numbers and parameter names follow Hugging Face's `modeling_umt5.py`, which scales the inputs of the
head by `d_model ** -0.5`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, RelativeBuckets, ScoreRule
from ed_layers.parts import Parts

from ed_models.body.encoder_decoder import EncoderDecoder, LayerStack
from ed_models.body.t5 import INITIALIZER_RANGE, T5_FIELDS, decoder_layer, encoder_layer
from ed_models.tasks.seq2seq import Seq2SeqLM
from ed_models.tasks.seq2seq_names import T5_WEIGHTS, with_head
from ed_models.tasks.text_encoder import ENCODER_CLASSES


@register_config("umt5")
class UMT5Config(EasyDeLBaseConfig, transformers.UMT5Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    `transformers` sets `tie_word_embeddings` to true; this class keeps the value of the file.
    """

    model_type = "umt5"
    attribute_map = {**transformers.UMT5Config.attribute_map, **T5_FIELDS}
    known_keywords = frozenset({"dense_act_fn", "is_gated_act", "tie_word_embeddings"})
    initializer_range = INITIALIZER_RANGE

    def __post_init__(self, **kwargs: object):
        tied = kwargs.get("tie_word_embeddings")
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = tied is not False


class UMT5Attention(SelfAttention):
    """Self-attention with its own table of relative positions."""

    def __init__(self, parts: Parts, *, causal: bool):
        config: UMT5Config = parts.config
        super().__init__(
            parts,
            position=RelativeBuckets(config.relative_attention_max_distance),
            mask=MaskRule(causal=causal),
            scores=ScoreRule(scale=1.0),
        )
        shape = config.relative_attention_num_buckets, config.num_attention_heads
        self.relative_attention_bias = parts.table(*shape, axes=(None, "heads"))

    def __call__(self, x, ctx, cache, layer):
        ctx = replace(ctx, buckets=self.relative_attention_bias.get_value())
        return super().__call__(x, ctx, cache, layer)


class UMT5Model(EncoderDecoder):
    """Embedding, encoder, decoder."""

    config_class = UMT5Config
    encoder_layer = staticmethod(partial(encoder_layer, attention=UMT5Attention))
    decoder_layer = staticmethod(partial(decoder_layer, attention=UMT5Attention))

    @staticmethod
    def build_stack(parts, layer, depth):
        return LayerStack(parts, layer, depth, dropout=parts.config.dropout_rate)


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=UMT5Config, model_type="umt5")
class UMT5ForConditionalGeneration(Seq2SeqLM):
    """UMT5 with a language-model head."""

    body_class = UMT5Model
    DERIVED = ENCODER_CLASSES
    WEIGHTS = T5_WEIGHTS
    as_published = staticmethod(with_head)

    def head(self):
        return replace(super().head(), scale=self.config.d_model**-0.5)
