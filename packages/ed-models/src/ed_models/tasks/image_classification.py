"""Models that classify images: a vision tower under `model`, and a linear head.

Legend: b images, c channels, h height, w width, f features of the head, n labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import ImageClassifierOutput
from ed_layers.parts import Parts
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_models.base.module import EasyDeLBaseModule
from ed_models.base.new_heads import new_heads, new_training_tensors
from ed_models.body.vision import VisionTower, tower_rules
from ed_models.tasks.classification import labelled_loss
from ed_models.tasks.encoders import common
from ed_models.weights.blocks import Shapes
from ed_models.weights.rules import STANDARD, ignore, renamed


class ImageClassifier(EasyDeLBaseModule):
    """A vision tower under `model`, and a head that maps the features of an image to labels.

    Attributes:
        tower_class: class of the vision tower.
        prefix: name of the tower in checkpoints.
        others: further tensors of checkpoints, which are ignored.
    """

    input_names = ("pixel_values",)
    tower_class: ClassVar[type[VisionTower]]
    prefix: ClassVar[str]
    ignored_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: bool):
        super().__init_subclass__(**options)
        tower = cls.tower_class
        cls.MODULES = tower.MODULES
        # Published towers alone have no prefix.
        unread = [name for name in tower.ignored_names if not name.startswith("classifier.")]
        unread += [f"{cls.prefix}.{name}" for name in tower.ignored_names]
        cls.WEIGHTS = (
            *tower_rules("model", cls.prefix, tower.names, tower.rules),
            *renamed({"score": "classifier"}, *STANDARD),
            *map(ignore, (*cls.ignored_names, *unread)),
        )

    def __init__(
        self,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        if (config.num_labels or 0) < 1:
            raise ConfigError(f"num_labels is {config.num_labels}; it must be at least 1")
        vision = getattr(config, "vision_config", config)
        self.model = self.tower_class(
            vision, dtype, param_dtype, precision, pooling=False, rngs=rngs
        )
        features = vision.hidden_size * (2 if self.tower_class.reads == "both" else 1)
        self.add_head(Parts(config, rngs, self.dtype, self.param_dtype, precision), features)

    def add_head(self, parts: Parts, features: int) -> None:
        """Create the head for this number of features."""
        labels = parts.config.num_labels
        self.score = parts.linear(features, labels, axes=("embed", None), bias=True)

    def scores(self, x: Float[Array, "b n d"], **inputs: object) -> Float[Array, "b n"]:
        """Return the scores of the labels.

        Args:
            x: outputs of the tower.
            inputs: the arguments of the tower.
        """
        return self.score(self.model.get_classifier_features(x, **inputs))

    def __call__(
        self,
        pixel_values: Float[Array, "b c h w"],
        *,
        labels: Array | None = None,
        **inputs: Any,
    ) -> ImageClassifierOutput:
        """Score the labels of each image.

        Args:
            pixel_values: images [b, c, h, w].
            labels: also return the loss of `compute_loss`.
            inputs: further arguments of `VisionTower`, such as `interpolate_pos_encoding`.
        """
        body = self.model(pixel_values, **inputs)
        logits = self.scores(body.last_hidden_state, **inputs)
        logits = logits.astype(jnp.float32)
        loss = None if labels is None else labelled_loss(self.config, logits, labels)
        return ImageClassifierOutput(logits=logits, loss=loss, **common(body))

    def compute_loss(
        self, pixel_values: Float[Array, "b c h w"], labels: Array, **inputs: Any
    ) -> tuple[ImageClassifierOutput, Float[Array, ""]]:
        """Compute the mean loss of the images; arguments as of `SequenceClassifier.compute_loss`.

        Returns:
            The output with `loss`, and the number of images.
        """
        output = self(pixel_values, labels=labels, **inputs)
        return output, jnp.asarray(float(jnp.asarray(labels).shape[0]))

    @classmethod
    def new_tensors(cls, config: EasyDeLBaseConfig, missing: Shapes) -> Mapping[str, np.ndarray]:
        """Return a random head for a checkpoint of another task, and log a warning."""
        head = new_heads(TaskType.IMAGE_CLASSIFICATION, config, missing, ["classifier"])
        return {**head, **new_training_tensors(config, missing)}
