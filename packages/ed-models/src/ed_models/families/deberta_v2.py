"""DeBERTa-v2 and v3 (He et al. 2021): BERT with disentangled attention.

- scores between contents and relative positions, in logarithmic buckets
- one table of relative positions for all layers, which may be normed
- v3 has neither learned positions nor token types
- v2-xlarge adds a convolution over the embeddings to the output of the first layer
- the pooler belongs to the classifier; its activation is `pooler_hidden_act`

Numbers and parameter names follow Hugging Face's `modeling_deberta_v2.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, cast

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.activations import activation
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import Disentangled, ScoreRule
from ed_layers.convolution import TokenConv
from ed_layers.parts import Parts

from ed_models.body.encoder import BIDIRECTIONAL, EncoderLayer, TextEncoder
from ed_models.tasks.encoder_names import EncoderNames, HeadNames, bert_body
from ed_models.tasks.encoders import MaskedLM
from ed_models.weights.rules import Rule, ignore, permute

_POOLED = HeadNames(
    "classifier",
    "pooler.dense",
    activation="pooler_hidden_act",
    dropout="cls_dropout",
    drops_input=True,
)


@register_config("deberta-v2")
class DebertaV2Config(EasyDeLBaseConfig, transformers.DebertaV2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "deberta-v2"
    attribute_map = {
        **transformers.DebertaV2Config.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }
    # `transformers` reads these fields without declaring them.
    known_keywords = frozenset(
        {
            *("position_buckets", "share_att_key", "norm_rel_ebd", "conv_kernel_size", "conv_act"),
            *("attention_head_size", "embedding_size", "cls_dropout", "conv_groups"),
        }
    )

    def __post_init__(self, **kwargs: object):
        super().__post_init__(**kwargs)
        self.legacy = True  # The head has equal outputs in both forms; it is saved in this one.
        sizes = {"attention_head_size": self.hidden_size // self.num_attention_heads}
        for name, only in (sizes | {"pooler_hidden_size": self.hidden_size}).items():
            if (value := getattr(self, name, only)) != only:
                raise ConfigError(
                    f"deberta-v2: {name}={value} does not fit hidden_size={self.hidden_size} and "
                    f"num_attention_heads={self.num_attention_heads}: it must be {only}"
                )

    @property
    def disentangled(self) -> Disentangled | None:
        """The form of the attention; None = scores without relative positions."""
        if not self.relative_attention or not self.pos_att_type:
            return None
        reach = self.max_relative_positions
        terms = cast(tuple[Literal["c2p", "p2c"], ...], tuple(self.pos_att_type))
        return Disentangled(
            buckets=getattr(self, "position_buckets", -1),
            max_distance=reach if reach >= 1 else self.max_position_embeddings,
            terms=terms,
            shared=getattr(self, "share_att_key", False),
        )

    @property
    def score_scale(self) -> float:
        """Factor on the scores: one over the square root of their summed variances."""
        size = self.hidden_size // self.num_attention_heads
        return 1 / math.sqrt(size * (1 + len(self.pos_att_type or ())))

    @property
    def position_rows(self) -> int:
        """Number of rows of the table of relative positions; 0 = there is no table."""
        if not self.relative_attention:
            return 0
        buckets, reach = getattr(self, "position_buckets", -1), self.max_relative_positions
        return 2 * (
            buckets if buckets > 0 else reach if reach >= 1 else self.max_position_embeddings
        )

    @property
    def taps(self) -> int:
        """Number of tokens that the convolution reads; 0 = there is no convolution."""
        return getattr(self, "conv_kernel_size", 0)


class DebertaV2Layer(EncoderLayer):
    """A layer of BERT; a convolution over the input of the first layer is added to its output."""

    def __init__(self, parts: Parts, index: int):
        config: DebertaV2Config = parts.config
        attention = SelfAttention(
            parts,
            bias=True,
            position=config.disentangled,
            mask=BIDIRECTIONAL,
            scores=ScoreRule(scale=config.score_scale),
        )
        super().__init__(parts, index, self_attn=attention)
        if index == 0 and config.taps:
            groups = getattr(config, "conv_groups", 1)
            self.conv = TokenConv(parts, config.hidden_size, config.taps, groups=groups)
            self.conv_norm = parts.own_norm(config.hidden_size)
            self.conv_act = getattr(config, "conv_act", "tanh")

    def __call__(self, x, ctx, cache, layer):
        out, cache, report = super().__call__(x, ctx, cache, layer)
        if hasattr(self, "conv"):
            conv_out = ctx.apply_dropout(
                self.conv(x, ctx.mask_info.q_segment_ids), self.dropout, "conv"
            )
            out = self.conv_norm(out + activation(self.conv_act)(conv_out))
        return out, cache, report


class DebertaV2Model(TextEncoder):
    """Embeddings, bidirectional layers with relative positions."""

    config_class = DebertaV2Config
    layer_class = DebertaV2Layer
    projects_first = True

    @staticmethod
    def layer_kinds(config):
        return [index == 0 for index in range(config.num_hidden_layers)] if config.taps else None

    @staticmethod
    def has_position_table(config: EasyDeLBaseConfig) -> bool:
        return config.position_biased_input

    def add_parts(self, parts):
        super().add_parts(parts)
        config = parts.config
        if config.position_rows:
            self.rel_embeddings = parts.embed(config.position_rows, config.hidden_size)
        if "layer_norm" in getattr(config, "norm_rel_ebd", "none"):
            self.rel_norm = parts.own_norm(config.hidden_size)

    def through(self, x, ctx, cache, input_ids, *, keep_hidden):
        if hasattr(self, "rel_embeddings"):
            table = self.rel_embeddings.table.astype(x.dtype)
            ctx = replace(ctx, buckets=self.rel_norm(table) if hasattr(self, "rel_norm") else table)
        return super().through(x, ctx, cache, input_ids, keep_hidden=keep_hidden)


@register_module(TaskType.MASKED_LM, config=DebertaV2Config, model_type="deberta-v2")
class DebertaV2ForMaskedLM(MaskedLM):
    """DeBERTa with a head that predicts tokens."""

    body_class = DebertaV2Model
    # Names of the head with `legacy: false`, which the published checkpoints have, too.
    OTHER_NAMES = {
        "lm_predictions.lm_head.dense": "cls.predictions.transform.dense",
        "lm_predictions.lm_head.LayerNorm": "cls.predictions.transform.LayerNorm",
        "lm_predictions.lm_head.bias": "cls.predictions.bias",
    }
    names = EncoderNames(
        body={
            "model.rel_embeddings": "deberta.encoder.rel_embeddings",
            "model.rel_norm": "deberta.encoder.LayerNorm",
            "model.embed_proj": "deberta.embeddings.embed_proj",
            "model.layers.0.conv": "deberta.encoder.conv.conv",
            "model.layers.0.conv_norm": "deberta.encoder.conv.LayerNorm",
            **bert_body("deberta"),
            "self_attn.q_proj": "attention.self.query_proj",
            "self_attn.k_proj": "attention.self.key_proj",
            "self_attn.v_proj": "attention.self.value_proj",
            "self_attn.pos_key_proj": "attention.self.pos_key_proj",
            "self_attn.pos_query_proj": "attention.self.pos_query_proj",
        },
        heads={
            TaskType.MASKED_LM: HeadNames(
                out="cls.predictions.decoder",
                dense="cls.predictions.transform.dense",
                norm="cls.predictions.transform.LayerNorm",
                bias="cls.predictions.bias",
                activation="hidden_act",
                dropout=None,
            ),
            TaskType.SEQUENCE_CLASSIFICATION: _POOLED,
            TaskType.MULTIPLE_CHOICE: _POOLED,
            TaskType.TOKEN_CLASSIFICATION: HeadNames("classifier"),
            TaskType.QUESTION_ANSWERING: HeadNames("qa_outputs", dropout=None),
        },
        rules=(
            Rule("{path}.conv.kernel", "{path}.conv.weight", permute(2, 1, 0)),
            # Published checkpoints have absolute positions, which relative attention replaces.
            ignore("{path}.position_embeddings.weight"),
        ),
        ignored_names=("lm_predictions", "mask_predictions"),
    )
