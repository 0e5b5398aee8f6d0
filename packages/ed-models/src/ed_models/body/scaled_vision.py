"""Layers whose outputs have a trained factor for each feature, as in the DINO families.

Legend: b images, n positions, d hidden, f intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
from ed_layers.mlp import MLP, GatedMLP
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.adapters.peft_layout import Modules
from ed_models.body.layers import Attention, FeedForward
from ed_models.body.vision import VISION_RULES, VIT_NAMES, VisionLayer
from ed_models.weights.blocks import ArchitectureFields, Relation, Shapes, TheirName
from ed_models.weights.rules import Rule, equal, split, transpose

#: Parts of our names -> those of DINOv2.
DINOV2_NAMES: Mapping[str, str] = {
    **{ours: theirs for ours, theirs in VIT_NAMES.items() if not ours.startswith("mlp.")},
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "mlp.up_proj": "mlp.fc1",
}
#: Names of checkpoints -> names of the modules of transformers 5.
DINOV2_MODULES = Modules(
    {
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "mlp.weights_out": "mlp.down_proj",
    },
    separate={"mlp.weights_in": ("mlp.gate_proj", "mlp.up_proj")},
)


def _last_layer(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
    """The last layer of a feed-forward layer, whose name in checkpoints depends on the gate."""
    name = "weights_out" if config.use_swiglu_ffn else "fc2"
    (shape,) = ours.values()
    layout = transpose if len(shape) > 1 else equal
    return layout(ours, partial(hf, out=name), config)


#: A gated feed-forward layer has one tensor for its gate and its input.
DINOV2_RULES = (
    Rule(
        ("{path}.mlp.gate_proj.kernel", "{path}.mlp.up_proj.kernel"),
        "{path}.mlp.weights_in.weight",
        split(-2, transpose),
    ),
    Rule(
        ("{path}.mlp.gate_proj.bias", "{path}.mlp.up_proj.bias"),
        "{path}.mlp.weights_in.bias",
        split(-1, equal),
    ),
    Rule("{path}.mlp.down_proj.kernel", "{path}.mlp.{out}.weight", _last_layer),
    Rule("{path}.mlp.down_proj.bias", "{path}.mlp.{out}.bias", _last_layer),
    *VISION_RULES,
)


class LayerScale(nnx.Module):
    """A trained factor for each feature."""

    def __init__(self, parts: Parts):
        config = parts.config
        values = jnp.full(config.hidden_size, config.layerscale_value, parts.param_dtype)
        self.lambda1 = nnx.Param(values, axes=("embed",))

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        return x * self.lambda1.get_value().astype(x.dtype)


class ScaledVisionLayer(VisionLayer):
    """A pre-norm layer whose outputs are scaled; training skips them at `drop_path_rate`."""

    def __init__(
        self,
        parts: Parts,
        index: int,
        *,
        self_attn: Attention | None = None,
        mlp: FeedForward | None = None,
    ):
        super().__init__(parts, index, self_attn=self_attn, mlp=mlp)
        self.layer_scale1, self.layer_scale2 = LayerScale(parts), LayerScale(parts)
        self.skipped: float = getattr(parts.config, "drop_path_rate", 0.0)

    def __call__(self, x, ctx, cache, layer):
        attended, cache = self.self_attn(self.input_layernorm(x), ctx, cache, layer)
        x = x + ctx.rows_dropped(self.layer_scale1(attended), self.skipped, "attention")
        x = ctx.name_activation(x, "residual")
        out, report = self.feed_forward(self.post_attention_layernorm(x), ctx)
        return x + ctx.rows_dropped(self.layer_scale2(out), self.skipped, "mlp"), cache, report


class DINOv2Layer(ScaledVisionLayer):
    """The layer of DINOv2: the width of its feed-forward layer is a multiple of d."""

    def __init__(self, parts: Parts, index: int):
        config = parts.config
        width = int(config.hidden_size * config.mlp_ratio)
        if config.use_swiglu_ffn:  # two thirds of the width, in multiples of 8
            width = (int(width * 2 / 3) + 7) // 8 * 8
            mlp = GatedMLP(parts, width, hidden_act="silu", bias=True)
        else:
            mlp = MLP(parts, width)
        super().__init__(parts, index, mlp=mlp)
