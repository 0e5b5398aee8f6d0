"""The layers of T5 and its relatives: pre-norm, RMSNorm, relative positions, no biases."""

from __future__ import annotations

from collections.abc import Callable

from ed_layers.attention.blocks.cross_attention import CrossAttention
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, RelativeBuckets, ScoreRule
from ed_layers.mlp import MLP, GatedMLP
from ed_layers.parts import MakePart, Parts

from ed_models.body.encoder_decoder import CrossAttentionLayer, LayerStack
from ed_models.body.layers import DecoderLayer

#: Our names of configuration fields -> the names of T5 and its relatives.
T5_FIELDS = {
    "attention_dropout": "dropout_rate",
    "hidden_act": "dense_act_fn",
    "intermediate_size": "d_ff",
    "rms_norm_eps": "layer_norm_epsilon",
}
#: Standard deviation of initial matrices, `initializer_range` of a configuration.
INITIALIZER_RANGE = property(lambda config: 0.02 * config.initializer_factor)


def _attention(parts: Parts, *, causal: bool) -> SelfAttention:
    """Create self-attention with relative positions."""
    config = parts.config
    return SelfAttention(
        parts,
        position=RelativeBuckets(config.relative_attention_max_distance),
        mask=MaskRule(causal=causal),
        scores=ScoreRule(scale=1.0),
    )


def _feed_forward(parts: Parts) -> GatedMLP | MLP:
    """Create the feed-forward layer."""
    config = parts.config
    if config.is_gated_act:
        return GatedMLP(parts, dropout=config.dropout_rate)
    return MLP(parts, bias=False, dropout=config.dropout_rate)


def encoder_layer(
    parts: Parts, index: int, attention: Callable[..., SelfAttention] = _attention
) -> DecoderLayer:
    """Create a layer of the encoder."""
    return DecoderLayer(
        parts,
        self_attn=attention(parts, causal=False),
        mlp=_feed_forward(parts),
        dropout=parts.config.dropout_rate,
    )


def decoder_layer(
    parts: Parts, index: int, attention: Callable[..., SelfAttention] = _attention
) -> CrossAttentionLayer:
    """Create a layer of the decoder."""
    return CrossAttentionLayer(
        parts,
        self_attn=attention(parts, causal=True),
        cross_attn=CrossAttention(parts, scores=ScoreRule(scale=1.0)),
        mlp=_feed_forward(parts),
        dropout=parts.config.dropout_rate,
    )


def layer_stack(parts: Parts, layer: MakePart, depth: int) -> LayerStack:
    """Create the layers of the encoder or of the decoder, with one table of positions."""
    config = parts.config
    buckets, dropout = config.relative_attention_num_buckets, config.dropout_rate
    return LayerStack(parts, layer, depth, buckets=buckets, dropout=dropout)
