"""Vision-language models: images and text in, text out.

Legend: b batch, s sequence, i images of a row, n image features of a row, d hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, cast

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import IMAGE_FEATURES, Encoded, Features, Inputs
from ed_infra.outputs import CausalLMOutput
from jaxtyping import Array, Float, Int

from ed_models.body.ahead import ahead_in_image, ahead_in_prompt
from ed_models.tasks.causal_lm import CausalLM


class ImageBody(Protocol):
    """A body with a vision tower."""

    def encode(self, pixel_values: jax.Array, /, **extra_inputs: jax.Array) -> Encoded:
        """Return the features of all images of a row."""
        ...


class ImageTextLM(CausalLM):
    """A vision tower and a language model under `model`, and a head.

    The body has a method `encode(pixel_values)` that returns `Encoded`. Its `__call__` accepts
    `features` and passes the other arguments to the language model. The k-th token
    `config.image_token_id` of a row gets the k-th feature of the images of the row.
    """

    #: Names of the arrays of images.
    image_names: ClassVar[tuple[str, ...]] = ("pixel_values",)
    input_names = (*CausalLM.input_names, *image_names, IMAGE_FEATURES)
    #: Further arrays of processors of transformers, which `batched_inputs` reads, or which follow
    #: from the tokens.
    processor_names: ClassVar[tuple[str, ...]] = ("mm_token_type_ids",)
    #: Which tokens attend to later ones: those of an image, those of a prompt, or none. A step of
    #: the engine computes them together.
    reads_ahead: Literal["image", "prompt"] | None = None

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Compute the features of `pixel_values` [b, i, c, h, w], in the order of the images."""
        names = [name for name in self.image_names if name != "pixel_values"]
        extra_inputs = inputs.select(names)
        return cast(ImageBody, self.model).encode(inputs["pixel_values"], **extra_inputs)

    def batched_inputs(self, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of prompts with a row for each prompt.

        A processor of transformers returns the images of all prompts in one array [t, c, h, w].

        Raises:
            ConfigError: the prompts have no equal number of image tokens for each image.
        """
        pixels = arrays.get("pixel_values")
        array_names = [name for name in self.image_names if arrays.get(name) is not None]
        if pixels is None or np.ndim(pixels) != 4 or array_names != ["pixel_values"]:
            return arrays
        image_token_id: int = self.config.image_token_id
        tokens = (np.asarray(input_ids) == image_token_id).sum(axis=1)
        return {**arrays, "pixel_values": split_images(np.asarray(pixels), tokens)}

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        pixel_values: Float[Array, "b i c h w"] | None = None,
        image_features: Float[Array, "b n d"] | None = None,
        features: Features | None = None,
        token_type_ids: Int[Array, "b s"] | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """Run the vision tower, unless there are `features` or no images, and the language model.

        Args:
            input_ids: token ids [b, s], with one image token for each image feature.
            pixel_values: images [b, i, c, h, w]; rows with fewer images are padded at the end.
            image_features: embeddings that `encode` returned for the images of each row, padded
                with zeros, instead of `pixel_values`.
            features: outputs of `encode` assigned to tokens, instead of `pixel_values`.
            token_type_ids: 0 for the tokens of a prompt, 1 for those after a prompt. Only models
                whose prompt tokens attend to later ones read the types.
            inputs: further arguments of `CausalLM.__call__`, and further arrays of `image_names`.
        """
        image_inputs = {name: inputs.pop(name, None) for name in self.image_names}
        extra_inputs = {name: array for name, array in image_inputs.items() if array is not None}
        if features is None and (pixel_values is not None or image_features is not None):
            if input_ids is None:
                raise ConfigError("images require input_ids, which contain the image tokens")
            if pixel_values is not None:
                encoded = self.encode(Inputs({"pixel_values": pixel_values, **extra_inputs}))
                image_features = encoded.embeddings
            assert image_features is not None
            image_token_id: int = self.config.image_token_id
            features = Features.at(image_features, input_ids == image_token_id)
        if self.reads_ahead == "image" and features is not None:
            inputs["ahead"] = ahead_in_image(features.index >= 0, inputs)
        elif self.reads_ahead == "prompt":
            tokens = inputs.get("inputs_embeds") if input_ids is None else input_ids
            assert tokens is not None, "a call has tokens or embeddings"
            shape = tokens.shape[0], tokens.shape[1]
            inputs["ahead"] = ahead_in_prompt(token_type_ids, shape, inputs)
        return super().__call__(input_ids, features=features, **inputs)


def split_images(
    pixels: Float[np.ndarray, "t c h w"], tokens: Int[np.ndarray, " b"]
) -> Float[np.ndarray, "b i c h w"]:
    """Assign images to prompts by their image tokens; rows with fewer images end with zeros.

    Args:
        pixels: images of all prompts, in the order of the prompts.
        tokens: number of image tokens of each prompt.

    Raises:
        ConfigError: the prompts have no equal number of image tokens for each image.
    """
    per_image = int(tokens.sum()) // max(1, len(pixels))
    counts = tokens // max(1, per_image)
    if not per_image or (counts * per_image != tokens).any() or counts.sum() != len(pixels):
        raise ConfigError(
            f"pixel_values has {len(pixels)} images, and the prompts have {tokens.tolist()} image "
            "tokens: pass as many tokens for each image as the processor of the checkpoint does, "
            "or an array [rows, images, channels, height, width]"
        )
    rows = np.zeros((len(tokens), int(counts.max()), *pixels.shape[1:]), pixels.dtype)
    first = 0
    for row, count in zip(rows, counts.tolist(), strict=True):
        row[:count] = pixels[first : first + count]
        first += count
    return rows
