"""The layers, the body and the checkpoints of LFM2, with a feed-forward layer or with experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.parts import Parts
from ed_layers.recurrence.conv import GatedShortConv
from flax import nnx

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, FeedForward
from ed_models.weights.rules import EXPERTS, STANDARD, fused, renamed

#: LFM2: norms and feed-forward layers have other names; one projection makes both gates and
#: the input of a convolution.
SHORT_CONV = renamed(
    {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        "self_attn.o_proj": "self_attn.out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "model.norm": "model.embedding_norm",
        "conv.conv1d": "conv.conv",
    },
    EXPERTS,
    *fused(("conv.b_proj", "conv.c_proj", "conv.x_proj"), "conv.in_proj"),
    *STANDARD,
)


class ShortConvLayer(DecoderLayer):
    """A gated short convolution, or attention; norms have `norm_eps`.

    Args:
        parts: makes the layer.
        index: which layer.
        mlp: its feed-forward layer.
    """

    def __init__(self, parts: Parts, index: int, mlp: FeedForward):
        config = parts.config
        if config.layer_types[index] == "conv":
            bias = config.conv_bias
            mixer, name = GatedShortConv(parts, config.conv_L_cache, bias=bias), "conv"
        else:
            mixer, name = SelfAttention(parts, norm=QKNorm(parts.own_norm)), "self_attn"
        super().__init__(parts, self_attn=mixer, mlp=mlp, name=name)


class ShortConvDecoder(Decoder):
    """The body: norms have `norm_eps`."""

    @staticmethod
    def build_norm(parts: Parts) -> Callable[..., nnx.Module]:
        """Makes the family's norm."""
        return partial(parts.norm, eps=parts.config.norm_eps)
