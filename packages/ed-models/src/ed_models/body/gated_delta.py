"""The gated delta rule as configurations name its sizes; layers and checkpoints of Qwen3-Next and
3.5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ed_infra.rope.frequencies import RopeSettings
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.parts import Parts
from ed_layers.recurrence.delta import GatedDelta
from flax import nnx

from ed_models.body.context import alternate_axes
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, FeedForward
from ed_models.weights.rules import EXPERTS, STANDARD, Rule, carry, fused, permute, renamed, split

#: Qwen3-Next and Qwen3.5: one convolution for queries, keys and values of the delta rule; in the
#: query projection of attention each head is followed by its gate.
GATED_DELTA = renamed(
    {"linear_attn.o_proj": "linear_attn.out_proj", "linear_attn.o_norm": "linear_attn.norm"},
    Rule(
        tuple(f"{{path}}.{name}_conv1d.kernel" for name in "qkv"),
        "{path}.conv1d.weight",
        split(0, permute(2, 1, 0)),
    ),
    *fused(
        ("self_attn.q_proj", "self_attn.g_proj"),
        "self_attn.q_proj",
        groups=lambda config: config.get_text_config().num_attention_heads,
    ),
    *STANDARD,
    carry("mtp.{path}"),
)

#: Qwen3.5: queries, keys and values of the delta rule are one tensor, the others have their own.
SPLIT_DELTA = renamed(
    {f"linear_attn.{ours}_proj": f"linear_attn.in_proj_{hf}" for ours, hf in ("gz", "bb", "aa")},
    *fused(tuple(f"linear_attn.{name}_proj" for name in "qkv"), "linear_attn.in_proj_qkv"),
    *GATED_DELTA,
)
#: The same with experts, of which one is shared.
SPLIT_DELTA_EXPERTS = renamed({"shared_experts": "shared_expert"}, EXPERTS, *SPLIT_DELTA)


def delta_mixer(parts: Parts, **form: Any) -> GatedDelta:
    """The gated delta rule, by the fields `linear_*`.

    Args:
        form: further arguments of `GatedDelta`.
    """
    config = parts.config
    return GatedDelta(
        parts,
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
        **form,
    )


class GatedHybridLayer(DecoderLayer):
    """The gated delta rule, or attention with a gate; norms store `weight - 1`.

    Args:
        parts: makes the layer.
        index: which layer.
        mlp: its feed-forward layer.
    """

    def __init__(self, parts: Parts, index: int, mlp: FeedForward):
        config = parts.config
        if config.layer_types[index] == "linear_attention":
            mixer, name = delta_mixer(parts), "linear_attn"
        else:
            bias, norm = config.attention_bias, parts.own_norm
            mixer, name = (
                SelfAttention(parts, bias=bias, norm=QKNorm(norm), gated=True),
                "self_attn",
            )
        super().__init__(parts, self_attn=mixer, mlp=mlp, name=name)


class GatedHybrid(Decoder):
    """The body of Qwen3-Next and Qwen3.5: a norm that stores `weight - 1`."""

    @staticmethod
    def build_norm(parts: Parts) -> Callable[..., nnx.Module]:
        """Makes the family's norm."""
        return partial(parts.norm, offset=1.0, scale_first=True)


class AxialHybrid(GatedHybrid):
    """The body of Qwen3.5: positions may have the axes of images, which alternate."""

    def rope_settings(self) -> Mapping[str, RopeSettings]:
        return alternate_axes(super().rope_settings(), (11, 11, 10))
