"""Vision-language models: images and text in, text out.

Legend: b batch, s sequence, i images of a row, n image features of a row, d hidden.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import jax
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded, Features, Inputs
from ed_infra.outputs import CausalLMOutput
from jaxtyping import Array, Float, Int

from ed_models.tasks.causal_lm import CausalLM


class ImageBody(Protocol):
    """A body with a vision tower."""

    def encode(self, pixel_values: jax.Array, /) -> Encoded:
        """Return the features of all images of a row."""
        ...


class ImageTextLM(CausalLM):
    """A vision tower and a language model under `model`, and a head.

    The body has a method `encode(pixel_values)` that returns `Encoded`. Its `__call__` accepts
    `features` and passes the other arguments to the language model. The k-th token
    `config.image_token_id` of a row gets the k-th feature of the images of the row.
    """

    input_names = (*CausalLM.input_names, "pixel_values")

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Compute the features of `pixel_values` [b, i, c, h, w], in the order of the images."""
        return cast(ImageBody, self.model).encode(inputs["pixel_values"])

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        pixel_values: Float[Array, "b i c h w"] | None = None,
        features: Features | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """Run the vision tower, unless there are `features` or no images, and the language model.

        Args:
            input_ids: token ids [b, s], with one image token for each image feature.
            pixel_values: images [b, i, c, h, w]; rows with fewer images are padded at the end.
            features: outputs of `encode` assigned to tokens, instead of `pixel_values`.
            inputs: further arguments of `CausalLM.__call__`.
        """
        if pixel_values is not None and features is None:
            if input_ids is None:
                raise ConfigError("pixel_values require input_ids, which contain the image tokens")
            encoded = self.encode(Inputs({"pixel_values": pixel_values}))
            image_token_id: int = self.config.image_token_id
            features = Features.at(encoded.embeddings, input_ids == image_token_id)
        return super().__call__(input_ids, features=features, **inputs)
