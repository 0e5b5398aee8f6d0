"""Vision-language models for images of different sizes, as packed patches.

Legend: b rows, s positions, i images of a row, p patches of a row, f numbers of a patch, n features
of a row, d hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded, Features, Inputs
from ed_infra.outputs import CausalLMOutput
from ed_infra.rope.grids import grid_positions
from ed_layers.cache.protocol import ContiguousCache
from jaxtyping import Array, Float, Int

from ed_models.body.image_rows import rows_of_images
from ed_models.body.packed_images import PatchForm
from ed_models.tasks.image_text import ImageTextLM

_ArrayT = TypeVar("_ArrayT", jax.Array, np.ndarray)


class PatchedImageBody(Protocol):
    """A body with a vision tower over packed patches."""

    @property
    def encoded_features(self) -> int:
        """Size of the embeddings that `encode` returns."""
        ...

    def encode(self, patches: jax.Array, grids: jax.Array, /) -> Encoded:
        """Return the features of all images of a row."""
        ...


class PatchedImageTextLM(ImageTextLM):
    """A vision tower over packed patches and a language model under `model`, and a head.

    `pixel_values` [b, p, f] contains the patches of the images of a row, and `image_grid_thw`
    [b, i, 3] their numbers along time, height and width, padded with zeros. The k-th token
    `config.image_token_id` of a row gets the k-th feature of the images of the row. Tokens have
    rotary positions on three axes (`ed_infra.rope.grids`).
    """

    input_names = (*ImageTextLM.input_names, "image_grid_thw")

    @property
    def image_token(self) -> int:
        """Id of the placeholder token of a feature."""
        return self.config.image_token_id

    @property
    def encoded_features(self) -> int:
        """Size of the embeddings that `encode` returns."""
        return cast(PatchedImageBody, self.model).encoded_features

    @property
    def patch_form(self) -> PatchForm:
        """The patches that the tower reads."""
        vision = self.config.vision_config
        frames = vision.in_channels * vision.temporal_patch_size
        merge: int = vision.spatial_merge_size
        return PatchForm(vision.patch_size, frames, merge, has_axes=True)

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Compute the features of `pixel_values` [b, p, f] with `image_grid_thw` [b, i, 3]."""
        body = cast(PatchedImageBody, self.model)
        return body.encode(inputs["pixel_values"], inputs["image_grid_thw"])

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        pixel_values: Float[Array, "b p f"] | None = None,
        image_grid_thw: Int[Array, "b i 3"] | None = None,
        image_features: Float[Array, "b n d"] | None = None,
        features: Features | None = None,
        position_ids: Int[Array, "b s"] | Int[Array, "3 b s"] | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """Run the vision tower, unless there are `features` or no images, and the language model.

        Args:
            input_ids: token ids [b, s], with one image token for each image feature.
            pixel_values: patches [b, p, f]; rows with fewer patches are padded at the end.
            image_grid_thw: number of patches of each image along time, height and width.
            image_features: embeddings that `encode` returned for the images of each row, padded
                with zeros, instead of `pixel_values`.
            features: outputs of `encode` assigned to tokens, instead of `pixel_values`.
            position_ids: rotary positions [3, b, s]. Positions [b, s] are those of texts without
                images: with `image_grid_thw`, the positions are computed from the tokens, and the
                positions of later calls with the same cache continue after them.
            inputs: further arguments of `CausalLM.__call__`.
        """
        if image_grid_thw is None:
            if features is None and (pixel_values is not None or image_features is not None):
                raise ConfigError("images are packed patches: pass image_grid_thw, too")
            return super().__call__(
                input_ids, features=features, position_ids=position_ids, **inputs
            )
        if input_ids is None:
            raise ConfigError("images require input_ids, which contain the image tokens")
        placeholders = jnp.asarray(input_ids) == self.image_token
        image_grid_thw = jnp.asarray(image_grid_thw)
        if pixel_values is not None and features is None:
            arrays = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
            image_features = self.encode(Inputs(arrays)).embeddings
        if image_features is not None and features is None:
            features = Features.at(image_features, placeholders)
        cache, offsets = inputs.get("past_key_values"), None
        if position_ids is None or position_ids.ndim == 2:
            segments = get_segment_ids(input_ids, inputs)
            grids = self.feature_grids(image_grid_thw)
            position_ids = grid_positions(placeholders, segments, grids)
            if cache is not None and inputs.get("ragged") is None:
                position_ids, offsets = _continue_positions(cache, position_ids, segments)
        output = super().__call__(input_ids, features=features, position_ids=position_ids, **inputs)
        if offsets is None:
            return output
        cache = cast(ContiguousCache, output.past_key_values).with_offsets(offsets)
        return output.replace(past_key_values=cache)

    def feature_grids(self, grids: _ArrayT) -> _ArrayT:
        """Return the number of features of each image along time, height and width."""
        merge = self.patch_form.merge
        return grids // np.asarray([1, merge, merge], np.int32)

    def batched_inputs(self, input_ids: Any, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of prompts with a row for each prompt; see `rows_of_images`."""
        placeholders = np.asarray(input_ids) == self.image_token
        return rows_of_images(placeholders, arrays, self.patch_form.merge)


def get_segment_ids(input_ids: Int[Array, "b s"], inputs: Mapping[str, Any]) -> Int[Array, "b s"]:
    """Return the segments of the tokens of a call; 0 = padding."""
    mask_info = inputs.get("mask_info")
    if mask_info is not None:
        return mask_info.q_segment_ids
    for name in ("segment_ids", "attention_mask"):
        if inputs.get(name) is not None:
            return jnp.asarray(inputs[name]).astype(jnp.int32)
    return jnp.ones(input_ids.shape, jnp.int32)


def _continue_positions(
    cache: ContiguousCache, positions: Int[Array, "3 b s"], segments: Int[Array, "b s"]
) -> tuple[Int[Array, "3 b s"], Int[Array, " b"]]:
    """Return the positions after the tokens of a cache, and the offsets of the cache after them."""
    tokens = cache.tokens
    assert tokens is not None, "a contiguous cache counts the tokens of its rows"
    first_positions = tokens if cache.offsets is None else tokens + cache.offsets
    positions = positions + first_positions[:, None]
    following = jnp.max(jnp.where(segments != 0, positions, -1), axis=(0, 2)) + 1
    offsets = following - tokens - jnp.count_nonzero(segments, axis=1)
    return positions, offsets.astype(jnp.int32)
