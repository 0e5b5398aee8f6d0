"""Bodies of vision-language models whose images, or tiles of images, have equally many features.

A family states its projector, and the features of a tile if they are not the projected output of
the tower.

Legend: b rows, s positions, i images or tiles of a row, c channels, h height, w width, n features
of a tile, d hidden.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded
from ed_layers.parts import Parts
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.over_decoder import OverDecoder
from ed_models.body.vision import tower_rules
from ed_models.weights.rules import STANDARD, renamed

#: Head -> embedding, of models whose head is the embedding.
TIED = {"lm_head.kernel": "model.language_model.embed_tokens.embedding"}
#: Names of checkpoints before transformers 5, and of models in memory -> names of checkpoints.
OTHER_NAMES = {
    "vision_tower.vision_model": "vision_tower",
    "model.vision_tower": "vision_tower",
    "model.multi_modal_projector": "multi_modal_projector",
    "model.language_model": "language_model.model",
    "lm_head": "language_model.lm_head",
}
#: The rules of LLaVA's names.
WEIGHTS = (
    *tower_rules("model.vision_tower", "vision_tower"),
    *renamed(
        {
            "lm_head": "language_model.lm_head",
            "model.language_model": "language_model.model",
            "model.multi_modal_projector": "multi_modal_projector",
        },
        *STANDARD,
    ),
)


class TiledImageTextModel(OverDecoder, EasyDeLBaseModule):
    """A vision tower, a projector and a decoder; model types select the tower and the decoder."""

    #: Class of a tower that is no model by itself; None = by the model type of `vision_config`.
    tower_class: ClassVar[type[Any] | None] = None

    def __init__(
        self,
        config: Any,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        numbers = dtype, param_dtype, precision
        vision, text = config.vision_config, self.decoder_config(config)
        tower = type(self).tower_class
        tower = tower or registry.get_module(TaskType.BASE_VISION, vision.model_type)
        self.vision_tower = tower(vision, *numbers, rngs=rngs)
        parts = Parts(config, rngs, self.dtype, self.param_dtype, precision)
        self.multi_modal_projector = self.projector(parts)
        decoder = registry.get_module(TaskType.CAUSAL_LM, text.model_type)
        if decoder.WEIGHTS is not STANDARD:
            raise ConfigError(
                f"{config.model_type}: text_config.model_type={text.model_type!r} is not "
                "supported: the names of its parameters differ from Llama's"
            )
        self.language_model = decoder.body_class(text, *numbers, rngs=rngs)

    @staticmethod
    def decoder_config(config: Any) -> Any:
        """Return the configuration of the decoder."""
        return config.text_config

    @staticmethod
    @abstractmethod
    def projector(parts: Parts) -> nnx.Module:
        """Create the projector; `parts.config` is the configuration of the whole model."""

    def tiles(
        self, pixel_values: Float[Array, "t c h w"], **others: Array
    ) -> Float[Array, "t n d"]:
        """Return the features of images or tiles."""
        hidden = self.vision_tower(pixel_values, **others).last_hidden_state
        return self.multi_modal_projector(hidden)

    def encode(self, pixel_values: Float[Array, "b i c h w"], **others: Array) -> Encoded:
        """Return the features of all images or tiles of a row, one after another.

        Args:
            pixel_values: images or tiles.
            others: further arrays of the tiles, [b, i, ...].
        """
        b, i = pixel_values.shape[:2]
        flat = {name: x.reshape(b * i, *x.shape[2:]) for name, x in others.items()}
        features = self.tiles(pixel_values.reshape(b * i, *pixel_values.shape[2:]), **flat)
        features = features.reshape(b, i * features.shape[1], -1)
        return Encoded(features, jnp.ones(features.shape[:2], jnp.int32))
