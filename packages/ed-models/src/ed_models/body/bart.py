"""The body of encoder-decoders like BART: layer norms, biases, absolute positions.

The families differ in the place of the norms, in the positions, and in the norms around the stacks;
`BartForm` lists these choices.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import LayerReport
from ed_layers.attention.blocks.cross_attention import CrossAttention
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.context import Ctx
from ed_layers.mlp import MLP
from ed_layers.parts import MakePart, Parts
from ed_layers.sinusoids import SinusoidalPositions
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.encoder import BIDIRECTIONAL, EncoderLayer
from ed_models.body.encoder_decoder import CrossAttentionLayer, EncoderDecoder
from ed_models.body.layers import DecoderLayer
from ed_models.weights.blocks import ArchitectureFields

CAUSAL = MaskRule()
#: Our names of configuration fields -> the names of these families.
BART_FIELDS = {
    "num_hidden_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "hidden_act": "activation_function",
    "hidden_dropout_prob": "dropout",
    "initializer_range": "init_std",
}


@dataclass(frozen=True)
class BartForm:
    """What distinguishes the families.

    Attributes:
        pre_norm: norms precede attention and feed-forward, and follow the last layer; otherwise
            they follow the additions.
        embed_norm: whether the sum of embeddings and positions is normed.
        key_bias: whether the projections of keys have a bias.
        first_position: number of the first token's position, or a function of the configuration.
        frequencies: the frequencies of sinusoidal positions for d; None = a trained table.
    """

    pre_norm: bool = False
    embed_norm: bool = True
    key_bias: bool = True
    first_position: int | Callable[[Any], int] = 2
    frequencies: Callable[[int], np.ndarray] | None = None


class BartStack(nnx.Module):
    """Positions, layers, and the norms before and after them.

    Args:
        parts: creates the layers and the norms.
        form: the form of the family.
        layer: creates a layer.
        depth: number of layers.
        layerdrop: probability that training skips a layer.
        positions: embeds position numbers [b, s]; None = the positions of the form.
    """

    def __init__(
        self,
        parts: Parts,
        form: BartForm,
        layer: MakePart,
        depth: int,
        layerdrop: float,
        positions: nnx.Module | None = None,
    ):
        config, d = parts.config, parts.config.hidden_size
        first = form.first_position
        self.first_position = first(config) if callable(first) else first
        self.rows: int | None = None
        if positions is not None:
            self.embed_positions = positions
        elif form.frequencies is not None:
            self.embed_positions = SinusoidalPositions(form.frequencies(d), parts.dtype)
        else:
            self.rows = rows = config.max_position_embeddings
            self.embed_positions = parts.embed(rows + self.first_position, d)
        if form.embed_norm:
            self.embed_norm = parts.own_norm(d)
        self.layers = parts.stack(layer, depth)
        if form.pre_norm:
            self.norm = parts.own_norm(d)
        self.dropout, self.layerdrop = config.dropout, layerdrop

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: object, *, keep_hidden: bool = False
    ) -> tuple[Float[Array, "b s d"], Any, LayerReport, tuple[jax.Array, ...] | None]:
        """Run the layers; see `ed_layers.depth.stack.Stack`.

        Raises:
            ConfigError: a row is longer than the table of positions.
        """
        if ctx.ragged is None and self.rows is not None and x.shape[1] > self.rows:
            raise ConfigError(
                f"a row has {x.shape[1]} tokens, but the model has positions for {self.rows}: "
                "truncate the text"
            )
        x = x + self.embed_positions(ctx.position_ids + self.first_position)
        x = self.embed_norm(x) if hasattr(self, "embed_norm") else x
        x = ctx.apply_dropout(x, self.dropout, "embeddings")
        ctx = replace(ctx, layerdrop=self.layerdrop)
        x, cache, report, hidden = self.layers(x, ctx, cache, keep_hidden=keep_hidden)
        return self.norm(x) if hasattr(self, "norm") else x, cache, report, hidden


def self_attention(
    parts: Parts, form: BartForm, heads: int, mask: MaskRule = CAUSAL
) -> SelfAttention:
    """Create self-attention without rotary positions."""
    return SelfAttention(
        parts,
        heads=heads,
        kv_heads=heads,
        bias=True,
        key_bias=form.key_bias,
        position=None,
        mask=mask,
    )


class BartBody(EncoderDecoder):
    """Embeddings, encoder, decoder. A family sets `form` and `config_class`."""

    form: ClassVar[BartForm] = BartForm()

    @classmethod
    def encoder_layer(cls, parts, index):
        config = parts.config
        heads = config.encoder_attention_heads
        attention = self_attention(parts, cls.form, heads, mask=BIDIRECTIONAL)
        mlp = MLP(parts, config.encoder_ffn_dim, dropout=config.activation_dropout)
        if cls.form.pre_norm:
            return DecoderLayer(parts, self_attn=attention, mlp=mlp, dropout=config.dropout)
        return EncoderLayer(parts, index, self_attn=attention, mlp=mlp)

    @classmethod
    def decoder_layer(cls, parts, index):
        config = parts.config
        heads = config.decoder_attention_heads
        return CrossAttentionLayer(
            parts,
            self_attn=self_attention(parts, cls.form, heads),
            cross_attn=CrossAttention(parts, heads=heads, bias=True, key_bias=cls.form.key_bias),
            mlp=MLP(parts, config.decoder_ffn_dim, dropout=config.activation_dropout),
            dropout=config.dropout,
            post_norm=not cls.form.pre_norm,
        )

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=1e-5)

    def add_embeddings(self, parts):
        config = parts.config
        rows, d, padding = config.vocab_size, config.hidden_size, config.pad_token_id
        if not shares_embeddings(config):
            self.encoder_embed_tokens = parts.embed(rows, d, padding=padding)
            rows = getattr(config, "decoder_vocab_size", rows)
        self.embed_tokens = parts.embed(rows, d, padding=padding)

    @classmethod
    def encoder_stack(cls, parts):
        config = parts.config
        drop, positions = config.encoder_layerdrop, cls.encoder_positions(parts)
        return BartStack(parts, cls.form, cls.encoder_layer, config.encoder_layers, drop, positions)

    @classmethod
    def decoder_stack(cls, parts):
        config = parts.config
        depth, drop = config.decoder_layers, config.decoder_layerdrop
        return BartStack(parts, cls.form, cls.decoder_layer, depth, drop)

    @staticmethod
    def encoder_positions(parts: Parts) -> nnx.Module | None:
        """Create the positions of the encoder; None = those of the form."""
        return None

    @property
    def embed_scale(self):
        return self.config.hidden_size**0.5 if self.config.scale_embedding else 1.0


def shares_embeddings(config: ArchitectureFields) -> bool:
    """Return whether encoder and decoder have one table of token embeddings."""
    share = getattr(config, "share_encoder_decoder_embeddings", True)
    return share and config.tie_word_embeddings
