"""The layers and the body of LFM2, with a feed-forward layer or with experts."""

from __future__ import annotations

from functools import partial

from ed_layers.parts import Parts
from ed_layers.recurrence.short_conv import GatedShortConv
from ed_layers.self_attention import SelfAttention
from flax import nnx

from ed_models.decoder import Decoder
from ed_models.layers import DecoderLayer, FeedForward


class ShortConvLayer(DecoderLayer):
    """A gated short convolution, or attention; norms have `norm_eps`.

    Args:
        parts: makes the layer.
        index: which layer.
        mlp: its feed-forward layer.
    """

    def __init__(self, parts: Parts, index: int, mlp: FeedForward):
        config = parts.config
        norm = partial(parts.norm, eps=config.norm_eps)
        if config.layer_types[index] == "conv":
            bias = config.conv_bias
            mixer, name = GatedShortConv(parts, config.conv_L_cache, bias=bias), "conv"
        else:
            mixer, name = SelfAttention(parts, qk_norm=norm), "self_attn"
        super().__init__(parts, self_attn=mixer, mlp=mlp, norm=norm, name=name)


class ShortConvDecoder(Decoder):
    """The body: its last norm has `norm_eps`."""

    @staticmethod
    def final_norm(parts: Parts) -> nnx.Module:
        """The norm after the last layer."""
        return parts.norm(parts.config.hidden_size, eps=parts.config.norm_eps)
