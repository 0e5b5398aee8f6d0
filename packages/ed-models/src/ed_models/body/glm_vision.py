"""The vision tower of GLM-4V and its successors, and the names of their checkpoints.

Legend: b rows, p patches of a row, d hidden, m patches along the side of a block, n = p / m²,
e features.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from ed_layers.activations import activation
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.patch_tower import PatchLayer, PatchTower
from ed_models.body.patch_weights import NESTED, TOWER, patch_weights
from ed_models.weights.rules import STANDARD, Rule, fused, permute, renamed

#: Rules of a language model with norms before and after attention and feed-forward.
GLM_TEXT = renamed(
    {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    *fused(("gate_proj", "up_proj"), "gate_up_proj"),
    *STANDARD,
)
#: Our names of parts of the tower -> those of checkpoints.
_NAMES = {
    "patch_norm": "post_conv_layernorm",
    "pos_embed": "embeddings.position_embedding.weight",
    "merger.norm": "post_layernorm",
    "merger.downsample": "downsample",
}


def glm_weights(text: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules of a model with this tower, from those of its language model."""
    return (
        Rule(
            f"{TOWER}.merger.downsample.kernel", f"{TOWER}.downsample.weight", permute(2, 3, 1, 0)
        ),
        *patch_weights(_NAMES, text=text, stored=NESTED),
    )


class GlmVisionBlock(PatchLayer):
    """Attention and a gated feed-forward layer, each normed before."""

    def __init__(self, parts: Parts, index: int):
        config = parts.config
        mlp = GatedMLP(parts, config.out_hidden_size, bias=False)
        super().__init__(parts, mlp=mlp, bias=config.attention_bias, out_bias=False)


class GlmMerger(nnx.Module):
    """A norm, a convolution from the patches of a block to one feature, and a gated layer."""

    def __init__(self, parts: Parts, features: int):
        config = parts.config
        inner: int = config.intermediate_size
        self.norm = parts.own_norm(config.hidden_size)
        self.downsample = Downsample(parts, features)
        self.proj = parts.linear(features, features, axes=(None, "embed"))
        self.post_projection_norm = parts.layer_norm(features, eps=1e-5)
        self.gate_proj = parts.linear(features, inner, axes=("embed", "mlp"))
        self.up_proj = parts.linear(features, inner, axes=("embed", "mlp"))
        self.down_proj = parts.linear(inner, features, axes=("mlp", "embed"))
        self.act = config.hidden_act

    def __call__(self, x: Float[Array, "b p d"]) -> Float[Array, "b n e"]:
        x = self.proj(self.downsample(self.norm(x)))
        x = activation("gelu")(self.post_projection_norm(x))
        return self.down_proj(activation(self.act)(self.gate_proj(x)) * self.up_proj(x))


class Downsample(nnx.Module):
    """A convolution whose stride is its size, over the patches of a block."""

    def __init__(self, parts: Parts, features: int):
        config = parts.config
        side, self.precision = config.spatial_merge_size, parts.precision
        shape = side, side, config.hidden_size, features
        kernel = parts.initializer(parts.rngs.params(), shape, parts.param_dtype)
        self.kernel = nnx.Param(kernel, axes=(None, None, None, "embed"))
        self.bias = nnx.Param(jnp.zeros(features, parts.param_dtype), axes=("embed",))

    def __call__(self, x: Float[Array, "b p d"]) -> Float[Array, "b n e"]:
        kernel, bias = (value.get_value().astype(x.dtype) for value in (self.kernel, self.bias))
        kernel = kernel.reshape(-1, kernel.shape[-1])
        blocks = x.reshape(x.shape[0], -1, kernel.shape[0])
        return jnp.matmul(blocks, kernel, precision=self.precision) + bias


def glm_tower(parts: Parts) -> PatchTower:
    """Create the tower of GLM-4V: learned positions, and a norm after the projection of patches."""
    config = parts.config
    return PatchTower(
        replace(parts, norm_of_family=partial(parts.norm, eps=config.rms_norm_eps)),
        GlmVisionBlock,
        depth=config.depth,
        features=config.out_hidden_size,
        bias=True,
        positions=config.image_size // config.patch_size,
        cubic=True,
        normed=True,
        merger=GlmMerger,
    )
