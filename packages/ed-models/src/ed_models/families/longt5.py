"""LongT5 (Guo et al. 2022): T5 for long texts.

- a token of the encoder attends to tokens at a distance of at most `local_radius`
- `encoder_attention_type: transient-global`: it also attends to the summaries of all blocks
- the head is that of T5

Numbers and parameter names follow Hugging Face's `modeling_longt5.py`. A padded row has the numbers
of the row alone; Hugging Face's blocks start at the first position of a row, which may be padding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, RelativeBuckets, ScoreRule
from ed_layers.attention.blocks.summary_attention import SummaryAttention
from ed_layers.parts import Parts

from ed_models.body.encoder_decoder import EncoderDecoder, LayerStack
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
from ed_models.weights.blocks import ArchitectureFields, Relation, Shapes, TheirName
from ed_models.weights.rules import Rule, TensorLayout, equal, transpose

#: `encoder_attention_type` -> the name of the attention in checkpoints.
ATTENTIONS = {
    "local": "LocalSelfAttention",
    "transient-global": "TransientGlobalSelfAttention",
}


@register_config("longt5")
class LongT5Config(EasyDeLBaseConfig, transformers.LongT5Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "longt5"
    attribute_map = {**transformers.LongT5Config.attribute_map, **T5_FIELDS}
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
        if self.encoder_attention_type not in ATTENTIONS:
            raise ConfigError(
                f"longt5: encoder_attention_type={self.encoder_attention_type!r} must be one of "
                f"{', '.join(ATTENTIONS)}"
            )

    @property
    def reads_summaries(self) -> bool:
        """Whether the encoder attends to summaries of blocks."""
        return self.encoder_attention_type == "transient-global"


def local_attention(parts: Parts, *, causal: bool) -> SelfAttention:
    """Create the attention of the encoder."""
    config: LongT5Config = parts.config
    window = config.local_radius + 1
    position, scores = RelativeBuckets(config.relative_attention_max_distance), ScoreRule(scale=1.0)
    if config.reads_summaries:
        size = config.global_block_size
        return SummaryAttention(parts, size=size, window=window, position=position, scores=scores)
    mask = MaskRule(causal=causal, window=window)
    return SelfAttention(parts, position=position, mask=mask, scores=scores)


class LongT5Model(EncoderDecoder):
    """Embedding, encoder, decoder."""

    config_class = LongT5Config
    encoder_layer = staticmethod(partial(encoder_layer, attention=local_attention))
    decoder_layer = staticmethod(decoder_layer)
    build_stack = staticmethod(layer_stack)

    @classmethod
    def encoder_stack(cls, parts):
        config = parts.config
        buckets = config.relative_attention_num_buckets
        return LayerStack(
            parts,
            cls.encoder_layer,
            config.num_hidden_layers,
            buckets=buckets,
            summary_buckets=buckets if config.reads_summaries else 0,
            dropout=config.dropout_rate,
        )


def build_encoder_layout(inner_layout: TensorLayout) -> TensorLayout:
    """Return a layout whose tensor has the name of the encoder's attention."""

    def relate(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
        kind = ATTENTIONS[config.encoder_attention_type]
        return inner_layout(ours, lambda **more: hf(kind=kind, **more), config)

    return relate


LAYER, BLOCK = "model.encoder.layers.{i}.self_attn", "encoder.block.{i}.layer.0.{kind}"
TABLES = ("relative_attention_bias", "global_relative_attention_bias")


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=LongT5Config, model_type="longt5")
class LongT5ForConditionalGeneration(Seq2SeqLM):
    """LongT5 with a language-model head."""

    body_class = LongT5Model
    DERIVED = ENCODER_CLASSES
    WEIGHTS = (
        *(
            Rule(f"{LAYER}.{p}_proj.kernel", f"{BLOCK}.{p}.weight", build_encoder_layout(transpose))
            for p in ("q", "k", "v", "o")
        ),
        Rule(
            f"{LAYER}.summary_norm.weight",
            f"{BLOCK}.global_input_layer_norm.weight",
            build_encoder_layout(equal),
        ),
        *(
            Rule(
                f"model.encoder.{table}",
                f"encoder.block.0.layer.0.{{kind}}.{table}.weight",
                build_encoder_layout(equal),
            )
            for table in TABLES
        ),
        *T5_WEIGHTS,
    )
    as_published = staticmethod(with_head)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding, as in T5 v1.0."""
        return self.config.scale_decoder_outputs and self.config.tie_word_embeddings

    def head(self):
        head, config = super().head(), self.config
        return replace(head, scale=config.d_model**-0.5) if config.scale_decoder_outputs else head
