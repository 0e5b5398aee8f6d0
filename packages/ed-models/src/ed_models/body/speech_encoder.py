"""The body of speech encoders like Wav2Vec2: convolutions, positions, layers, an adapter.

Legend: b batch, n samples, t time steps, c features of a convolution, d hidden.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from ed_layers.activations import activation
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.context import Ctx
from ed_layers.convolution import Convolution, GroupNorm, real_steps
from ed_layers.mlp import MLP
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.encoder import BIDIRECTIONAL, EncoderLayer
from ed_models.body.layers import DecoderLayer


class FrontEndConvolution(nnx.Module):
    """One convolution of the front end, its norm and its activation."""

    def __init__(self, parts: Parts, index: int):
        config = parts.config
        inputs = config.conv_dim[index - 1] if index else 1
        outputs = config.conv_dim[index]
        self.conv = Convolution(
            parts,
            inputs,
            outputs,
            taps=config.conv_kernel[index],
            stride=config.conv_stride[index],
            bias=config.conv_bias,
        )
        self.by_time = config.feat_extract_norm == "group"
        if self.by_time and not index:
            self.layer_norm = GroupNorm(parts, outputs, groups=outputs)
        elif not self.by_time:
            self.layer_norm = parts.layer_norm(outputs, eps=1e-5)
        self.hidden_act = config.feat_extract_activation

    def __call__(
        self, x: Float[Array, "b t i"], lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "b u o"], Int[Array, " b"]]:
        x, lengths = self.conv(x), self.conv.lengths(lengths)
        if hasattr(self, "layer_norm"):
            real = (real_steps(lengths, x.shape[1]),) if self.by_time else ()
            x = self.layer_norm(x, *real)
        return activation(self.hidden_act)(x), lengths


class FrontEnd(nnx.Module):
    """The convolutions, and a projection to the hidden size."""

    def __init__(self, parts: Parts):
        config = parts.config
        count, c = len(config.conv_dim), config.conv_dim[-1]
        self.conv_layers = nnx.List([FrontEndConvolution(parts, i) for i in range(count)])
        self.layer_norm = parts.own_norm(c)
        self.projection = parts.linear(c, config.hidden_size, axes=(None, "embed"), bias=True)

    def __call__(
        self, samples: Float[Array, "b n"], lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "b t d"], Int[Array, " b"]]:
        x = samples[..., None]
        for layer in self.conv_layers:
            x, lengths = layer(x, lengths)
        return self.projection(self.layer_norm(x)), lengths


class AttentionAdapter(nnx.Module):
    """`linear_2(relu(linear_1(norm(x))))`: the parameters of a language (MMS)."""

    def __init__(self, parts: Parts):
        d, e = parts.config.hidden_size, parts.config.adapter_attn_dim
        self.norm = parts.layer_norm(d, eps=1e-5)
        self.linear_1 = parts.linear(d, e, axes=("embed", None), bias=True)
        self.linear_2 = parts.linear(e, d, axes=(None, "embed"), bias=True)

    def __call__(self, x: Float[Array, "b t d"], ctx: Ctx) -> Float[Array, "b t d"]:
        return self.linear_2(jax.nn.relu(self.linear_1(self.norm(x), ctx)), ctx)


class AttentionAdapterLayer(DecoderLayer):
    """A pre-norm layer, and an adapter whose output is added to that of the layer."""

    def __init__(self, parts: Parts, **settings):
        super().__init__(parts, **settings)
        self.adapter_layer = AttentionAdapter(parts)

    def __call__(self, x, ctx, cache, layer):
        x, cache, report = super().__call__(x, ctx, cache, layer)
        return x + self.adapter_layer(x, ctx), cache, report


def _encoder_layer(parts: Parts, index: int) -> DecoderLayer:
    """Create a layer of the encoder."""
    config = parts.config
    attention = SelfAttention(parts, bias=True, position=None, mask=BIDIRECTIONAL)
    mlp = MLP(parts, dropout=config.activation_dropout)
    if config.adapter_attn_dim is not None:
        return AttentionAdapterLayer(
            parts, self_attn=attention, mlp=mlp, dropout=config.hidden_dropout
        )
    if config.do_stable_layer_norm:
        return DecoderLayer(parts, self_attn=attention, mlp=mlp, dropout=config.hidden_dropout)
    return EncoderLayer(parts, index, self_attn=attention, mlp=mlp)


class SpeechEncoder(nnx.Module):
    """Positions, layers, and a norm before or after the layers."""

    def __init__(self, parts: Parts):
        config = parts.config
        d, taps = config.hidden_size, config.num_conv_pos_embeddings
        self.pos_conv_embed = Convolution(
            parts,
            d,
            d,
            taps=taps,
            padding=taps // 2,
            groups=config.num_conv_pos_embedding_groups,
            weight_norm=True,
        )
        self.norm = parts.own_norm(d)
        self.layers = parts.stack(_encoder_layer, config.num_hidden_layers)
        self.config = config

    def __call__(self, x: Float[Array, "b t d"], ctx: Ctx, *, keep_hidden: bool = False):
        """Run the encoder; see `ed_layers.depth.stack.Stack`."""
        config, stable = self.config, self.config.do_stable_layer_norm
        x = x if ctx.real is None else jnp.where(ctx.real[..., None], x, 0)
        positions = self.pos_conv_embed(x)[:, : x.shape[1]]  # an even number of taps gives one more
        x = x + activation(config.feat_extract_activation)(positions)
        x = ctx.apply_dropout(x if stable else self.norm(x), config.hidden_dropout, "embeddings")
        ctx = replace(ctx, layerdrop=config.layerdrop)
        x, _, report, hidden = self.layers(x, ctx, keep_hidden=keep_hidden)
        return self.norm(x) if stable else x, report, hidden


class AdapterConvolution(nnx.Module):
    """A convolution that shortens the sequence, and a gate of half of its features."""

    def __init__(self, parts: Parts):
        config = parts.config
        d, taps, stride = (
            config.output_hidden_size,
            config.adapter_kernel_size,
            config.adapter_stride,
        )
        self.conv = Convolution(parts, d, 2 * d, taps=taps, stride=stride, padding=1)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b u d"]:
        values, gate = jnp.split(self.conv(x), 2, axis=-1)
        return values * jax.nn.sigmoid(gate)


class DownsamplingAdapter(nnx.Module):
    """An optional projection, and convolutions that shorten the output of the encoder."""

    def __init__(self, parts: Parts):
        config = parts.config
        d, outputs = config.hidden_size, config.output_hidden_size
        if outputs != d:
            self.proj = parts.linear(d, outputs, axes=("embed", None), bias=True)
            self.proj_layer_norm = parts.layer_norm(outputs, eps=1e-5)
        count = config.num_adapter_layers
        self.layers = nnx.List([AdapterConvolution(parts) for _ in range(count)])

    def lengths(self, lengths: Int[Array, " b"]) -> Int[Array, " b"]:
        """Return the number of outputs of rows with these numbers of time steps."""
        for layer in self.layers:
            lengths = layer.conv.lengths(lengths)
        return lengths

    def __call__(
        self, x: Float[Array, "b t d"], lengths: Int[Array, " b"]
    ) -> Float[Array, "b u e"]:
        """Return the shorter sequence.

        `layerdrop` skips no convolution, because a skipped one would change the length.

        Args:
            x: the output of the encoder.
            lengths: number of time steps of each row without its padding.
        """
        if hasattr(self, "proj"):
            x = self.proj_layer_norm(self.proj(x))
        for layer in self.layers:
            x = jnp.where(real_steps(lengths, x.shape[1])[..., None], x, 0)
            x, lengths = layer(x), layer.conv.lengths(lengths)
        return x
