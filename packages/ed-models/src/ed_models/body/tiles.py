"""Bodies of vision-language models whose images, or tiles of images, have equally many features.

A family states its projector, and the features of a tile if they are not the projected output of
the tower.

Legend: b rows, s positions, i images or tiles of a row, t tiles of all rows, c channels, h height,
w width, n patches or features of a tile, m joined patches, v and d hidden size of the tower and of
the decoder, f inputs of the projector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded, Inputs
from ed_layers.activations import activation
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.adapters.peft_layout import Modules
from ed_models.body.conditional import ConditionalModel
from ed_models.body.vision import tower_rules
from ed_models.weights.rules import STANDARD, Rule, renamed

#: Names of checkpoints before transformers 5, and of models in memory -> names of checkpoints.
TILED_NAMES = {
    "model.language_model.model": "language_model.model",
    "language_model.model.model": "language_model.model",
    "vision_tower.vision_model": "vision_tower",
    "model.vision_tower": "vision_tower",
    "model.multi_modal_projector": "multi_modal_projector",
    "model.language_model": "language_model.model",
    "lm_head": "language_model.lm_head",
}
#: Names of checkpoints -> names of the modules of transformers 5.
TILED_MODULES = Modules(
    {
        "language_model.lm_head": "lm_head",
        "language_model.model": "model.language_model",
        "vision_tower": "model.vision_tower",
        "audio_tower": "model.audio_tower",
        "multi_modal_projector": "model.multi_modal_projector",
        "image_newline": "model.image_newline",
    }
)
#: Our names of the decoder and the projector -> names of checkpoints.
STORED = {
    "lm_head": "language_model.lm_head",
    "model.language_model": "language_model.model",
    "model.multi_modal_projector": "multi_modal_projector",
}
#: The rules of LLaVA's names.
TILED_WEIGHTS = (
    *tower_rules("model.vision_tower", "vision_tower"),
    *renamed(STORED, *STANDARD),
)


class TiledImageTextModel(ConditionalModel):
    """A vision tower, a projector and a decoder; model types select the tower and the decoder."""

    #: Creates the projector; `parts.config` is the configuration of the whole model.
    projector_class: ClassVar[Callable[[Parts], nnx.Module]]
    #: Class of a tower that is no model by itself; None = by the model type of `vision_config`.
    tower_class: ClassVar[type[Any] | None] = None
    #: Weight rules of the decoder, which are part of the rules of the family.
    decoder_rules: ClassVar[tuple[Rule, ...]] = STANDARD

    def add_towers(self, config: EasyDeLBaseConfig, rngs: nnx.Rngs) -> None:
        numbers = self.dtype, self.param_dtype, self.precision
        vision, text = config.vision_config, self.decoder_config(config)
        tower = type(self).tower_class
        tower = tower or registry.get_module(TaskType.BASE_VISION, vision.model_type)
        self.vision_tower = tower(vision, *numbers, rngs=rngs)
        self.multi_modal_projector = type(self).projector_class(Parts(config, rngs, *numbers))
        decoder = registry.get_module(TaskType.CAUSAL_LM, text.model_type)
        if decoder.WEIGHTS is not self.decoder_rules:
            raise ConfigError(
                f"{config.model_type}: text_config.model_type={text.model_type!r} is not "
                "supported: checkpoints of this family have other names of parameters"
            )

    def tiles(
        self, pixel_values: Float[Array, "t c h w"], **extra_inputs: Array
    ) -> Float[Array, "t n d"]:
        """Return the features of images or tiles."""
        hidden = self.vision_tower(pixel_values, **extra_inputs).last_hidden_state
        return self.multi_modal_projector(hidden)

    def select_hidden_states(
        self, pixel_values: Float[Array, "t c h w"], **inputs: Any
    ) -> Float[Array, "t n v"]:
        """Return the hidden states of the tower that `vision_feature_layer` names, one beside
        another; the strategy `default` omits the class token.

        Args:
            pixel_values: images or tiles.
            inputs: further arguments of the tower.
        """
        config = self.config
        output = self.vision_tower(pixel_values, output_hidden_states=True, **inputs)
        layers, hidden = config.vision_feature_layer, output.hidden_states
        layer_states = [hidden[k] for k in ([layers] if isinstance(layers, int) else layers)]
        if getattr(config, "vision_feature_select_strategy", "full") == "default":
            layer_states = [x[:, 1:] for x in layer_states]
        return jnp.concatenate(layer_states, axis=-1)

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Return the features of all images or tiles of a row, one after another.

        Args:
            inputs: images or tiles `pixel_values` [b, i, c, h, w], and further arrays of the tiles,
                [b, i, ...].
            key: without effect: towers are deterministic.
        """
        b, i = inputs["pixel_values"].shape[:2]
        flat = {name: x.reshape(b * i, *x.shape[2:]) for name, x in inputs.items()}
        features = self.tiles(**flat)
        features = features.reshape(b, i * features.shape[1], -1)
        return Encoded(features, jnp.ones(features.shape[:2], jnp.int32))


class TwoLayerProjector(nnx.Module):
    """Two linear layers from the selected layers of the tower to the decoder (LLaVA)."""

    def __init__(self, parts: Parts):
        config = parts.config
        layers = config.vision_feature_layer
        count = 1 if isinstance(layers, int) else len(layers)
        self.inputs: int = count * config.vision_config.hidden_size
        d, bias = config.text_config.hidden_size, getattr(config, "multimodal_projector_bias", True)
        self.linear_1 = parts.linear(self.inputs, d, axes=(None, "embed"), bias=bias)
        self.linear_2 = parts.linear(d, d, axes=("embed", None), bias=bias)
        self.hidden_act = config.projector_hidden_act

    def __call__(self, x: Float[Array, "t n f"]) -> Float[Array, "t n d"]:
        return self.linear_2(activation(self.hidden_act)(self.linear_1(x)))


class SquaresProjector(nnx.Module):
    """Joins squares of patches; two linear layers with a gate between them (Cohere)."""

    layernorm: nnx.Module | None = None

    def __init__(self, parts: Parts):
        config = parts.config
        d = config.text_config.hidden_size
        inner: int = getattr(config, "alignment_intermediate_size", d)
        self.side = config.downsample_factor
        self.inputs: int = config.vision_config.hidden_size * self.side**2
        self.linear_1 = parts.linear(self.inputs, inner, axes=(None, "embed"), bias=True)
        self.linear_2 = parts.linear(inner // 2, d, axes=("embed", None), bias=True)

    def __call__(self, x: Float[Array, "t n v"]) -> Float[Array, "t m d"]:
        x = joined_squares(x, self.side)
        if self.layernorm is not None:
            x = self.layernorm(x)
        value, gate = jnp.split(self.linear_1(x), 2, axis=-1)
        return self.linear_2(jax.nn.silu(gate) * value)


def joined_squares(x: Float[Array, "t n v"], side: int) -> Float[Array, "t m f"]:
    """Join squares of `side` x `side` patches; a tile is a square of patches."""
    t, n, v = x.shape
    squares = math.isqrt(n) // side
    x = x.reshape(t, squares, side, squares, side, v).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(t, squares**2, side * side * v)
