"""Models that compare images with texts: a vision tower and a text tower, without a decoder.

Legend: b texts, i images, s sequence, c channels, h height, w width, e embedding size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.outputs import ImageTextOutput
from ed_layers.parts import Parts
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.text_tower import TEXT_NAMES
from ed_models.body.vision import tower_rules
from ed_models.weights.rules import STANDARD

#: `(similarities [n, n], 1 for the real pairs [n]) -> (sum over the pairs, number of pairs)`.
PairLoss = Callable[[Float[Array, "n n"], Float[Array, " n"]], tuple[jax.Array, jax.Array]]


class ImageTextMatcher(EasyDeLBaseModule):
    """Embeddings of images and texts in one space, and their scaled similarities.

    Attributes:
        pair_loss: the loss of a batch, from `logits_per_text`; row n is the text of image n.
    """

    input_names = ("input_ids", "attention_mask", "pixel_values")
    pair_loss: ClassVar[PairLoss]
    WEIGHTS = (
        *tower_rules("vision_model", "vision_model"),
        *tower_rules("text_model", "text_model", TEXT_NAMES, STANDARD),
        *STANDARD,
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
        text = registry.get_module(TaskType.BASE_MODULE, config.text_config.model_type)
        vision = registry.get_module(TaskType.BASE_VISION, config.vision_config.model_type)
        self.text_model = text(config.text_config, dtype, param_dtype, precision, rngs=rngs)
        self.vision_model = vision(config.vision_config, dtype, param_dtype, precision, rngs=rngs)
        self.add_parts(Parts(config, rngs, self.dtype, self.param_dtype, precision))

    def add_parts(self, parts: Parts) -> None:
        """Create the projections and the scale."""

    def scale_cosines(self, cosines: Float[Array, "b i"]) -> Float[Array, "b i"]:
        """Return the logits of cosines."""
        return cosines

    def get_text_features(
        self,
        input_ids: Int[Array, "b s"],
        attention_mask: Int[Array, "b s"] | None = None,
        **inputs: Any,
    ) -> Float[Array, "b e"]:
        """Return the embeddings of texts, before they are scaled to length one.

        Args:
            input_ids, attention_mask, inputs: see `ed_models.body.text_tower.TextTower`.
        """
        return self.text_model(input_ids, attention_mask=attention_mask, **inputs).pooler_output

    def get_image_features(
        self, pixel_values: Float[Array, "i c h w"], **inputs: Any
    ) -> Float[Array, "i e"]:
        """Return the embeddings of images, before they are scaled to length one.

        Args:
            pixel_values, inputs: see `ed_models.body.vision.VisionTower`.
        """
        return self.vision_model(pixel_values, **inputs).pooler_output

    def __call__(
        self,
        input_ids: Int[Array, "b s"],
        pixel_values: Float[Array, "i c h w"],
        *,
        attention_mask: Int[Array, "b s"] | None = None,
        interpolate_pos_encoding: bool | None = None,
        key: jax.Array | None = None,
        **images: object,
    ) -> ImageTextOutput:
        """Compare all images with all texts.

        Args:
            input_ids: token ids of texts [b, s].
            pixel_values: images [i, c, h, w].
            attention_mask: nonzero = a token, [b, s].
            interpolate_pos_encoding: see `ed_models.body.vision.VisionTower`.
            key: dropout key; None = deterministic.
            images: further arrays of images, of towers that read them.
        """
        seen = self.get_image_features(
            pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, key=key, **images
        )
        texts = self.get_text_features(input_ids, attention_mask, key=key)
        seen, texts = _unit(seen), _unit(texts)
        cosines = jnp.matmul(texts, seen.T, precision=jax.lax.Precision.HIGHEST)
        logits = self.scale_cosines(cosines)
        return ImageTextOutput(logits.T, logits, texts, seen)

    def compute_loss(
        self,
        input_ids: Int[Array, "b s"],
        pixel_values: Float[Array, "b c h w"],
        **inputs: Any,
    ) -> tuple[ImageTextOutput, Float[Array, ""]]:
        """Compute the mean contrastive loss of pairs: text n belongs to image n.

        Returns:
            The output with `loss`, and the number of pairs.
        """
        output = self(input_ids, pixel_values, **inputs)
        pairs = jnp.ones(output.text_embeds.shape[0])
        total, count = type(self).pair_loss(output.logits_per_text, pairs)
        return output.replace(loss=total / count), count


def _unit(vectors: Float[Array, "*rows e"]) -> Float[Array, "*rows e"]:
    """Return the vectors in float32, scaled to length one."""
    x = vectors.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))


def softmax_pair_loss(
    logits: Float[Array, "n n"], pairs: Float[Array, " n"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the mean of both cross-entropies of each pair (CLIP), summed over the pairs.

    Args:
        logits: of texts and images; the diagonal belongs to the pairs.
        pairs: 1 for a pair, 0 for a row that is ignored, also as a negative.
    """
    outside = jnp.where(pairs > 0, 0.0, -jnp.inf)
    right = jnp.diagonal(logits)
    texts = jax.nn.logsumexp(logits + outside, axis=1) - right
    images = jax.nn.logsumexp(logits + outside[:, None], axis=0) - right
    return jnp.sum(jnp.where(pairs > 0, (texts + images) / 2, 0.0)), jnp.sum(pairs)


def sigmoid_pair_loss(
    logits: Float[Array, "n n"], pairs: Float[Array, " n"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the binary cross-entropies of each text with all images (SigLIP), summed.

    Args:
        logits, pairs: as for `softmax_pair_loss`.
    """
    signs = 2 * jnp.eye(logits.shape[0]) - 1
    pair_mask = pairs[:, None] * pairs[None, :]
    return -jnp.sum(pair_mask * jax.nn.log_sigmoid(signs * logits)), jnp.sum(pairs)


def add_scale_and_bias(model: Any, parts: Parts) -> None:
    """Add a trained scale and bias of the similarities, with the initial values of SigLIP's paper:
    a scale of 10, and few positive pairs."""
    model.logit_scale = nnx.Param(jnp.full(1, jnp.log(10.0), parts.param_dtype), axes=(None,))
    model.logit_bias = nnx.Param(jnp.full(1, -10.0, parts.param_dtype), axes=(None,))


def with_scale_and_bias(model: Any, cosines: Float[Array, "b i"]) -> Float[Array, "b i"]:
    """Return the similarities of a model with the parameters of `add_scale_and_bias`."""
    scale, bias = model.logit_scale.get_value(), model.logit_bias.get_value()
    return cosines * jnp.exp(scale.astype(jnp.float32)) + bias.astype(jnp.float32)
