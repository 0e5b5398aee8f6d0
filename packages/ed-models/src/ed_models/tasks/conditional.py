"""Language models that read images, videos or recordings besides text.

Legend: b rows, s positions, i images of a row, n features of a row, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.inputs import GRID, SIZES, TIMES, Encoded, Features, Inputs
from ed_infra.outputs import CausalLMOutput
from ed_infra.rope.grids import grid_positions
from ed_layers.cache.protocol import ContiguousCache
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from ed_models.body.ahead import ahead_in_image, ahead_in_prompt
from ed_models.body.packed_images import PatchForm
from ed_models.modalities.audio import RecordingForm
from ed_models.modalities.items import Modality, build_encoder_items
from ed_models.modalities.videos import insert_frames
from ed_models.tasks.causal_lm import CausalLM


class ConditionalLM(CausalLM):
    """A tower and a language model under `model`, and a head. A family names its `modality`.

    The k-th placeholder token of a row gets the k-th feature of the images or recordings of the
    row. The body's `encode` reads the arrays `modality.names`. Its `__call__` accepts
    `features` and passes the other arguments to the language model.
    """

    modality: ClassVar[Modality]
    DERIVED: ClassVar[Mapping[TaskType, Callable[[type[Any]], type]]] = {}
    can_have_mtp_head = False
    #: Which tokens attend to later ones: those of an image, those of a prompt, or none. A step of
    #: the engine computes them together.
    reads_ahead: Literal["image", "prompt"] | None = None

    def __init_subclass__(cls, **options: bool) -> None:
        super().__init_subclass__(**options)
        types = ("token_type_ids",) if cls.reads_ahead == "prompt" else ()
        modality = cls.modality
        media = *modality.call_names, *modality.convertible
        cls.input_names = (*CausalLM.input_names, *media, *types)

    @property
    def placeholder_tokens(self) -> tuple[int, ...]:
        """Ids of the placeholder tokens of a feature: of an image or recording, and of a video."""
        fields = self.modality.token, self.modality.video_token
        return tuple(getattr(self.config, field) for field in fields if field is not None)

    @property
    def patch_form(self) -> PatchForm | None:
        """The patches that the tower reads; None = the tower reads no packed patches."""
        return getattr(self.model, "patch_form", None)

    @property
    def recording_form(self) -> RecordingForm | None:
        """The recordings that the model reads as items of a prompt; None = it reads images."""
        return RecordingForm.of(self) if self.modality.noun == "recordings" else None

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Compute the features of the images or recordings, in their order."""
        return self.model.encode(inputs.select(self.modality.names), key=key)

    def batched_inputs(self, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of prompts with a row for each prompt; see `EncoderItems.batch_rows`.

        A processor of transformers returns the images of all prompts in one array.
        """
        items, ids = build_encoder_items(self), np.asarray(input_ids)
        assert items is not None, "the model has a modality"
        arrays = insert_frames(self, ids, arrays)
        return items.batch_rows(np.isin(ids, self.placeholder_tokens), arrays)

    def _batch_media(
        self, input_ids: Int[Array, "b s"] | None, arrays: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the arrays of a processor, which holds the images of all rows in one array, with
        a row for each row of tokens.

        Raises:
            ConfigError: the arrays are traced by jax, so the tokens have no values yet.
        """
        if input_ids is None or isinstance(input_ids, Tracer):
            shape = list(next(iter(arrays.values())).shape)
            raise ConfigError(
                f"{next(iter(arrays))} has shape {shape}, the images of all rows in one array, and "
                "the rows follow from the values of input_ids, which a compiled function lacks: "
                "call model.batched_inputs(input_ids, arrays) before, and pass its arrays"
            )
        rows = self.batched_inputs(np.asarray(input_ids), jax.tree.map(np.asarray, dict(arrays)))
        return {name: jnp.asarray(array) for name, array in rows.items()}

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        features: Features | None = None,
        token_type_ids: Int[Array, "b s"] | None = None,
        position_ids: Int[Array, "b s"] | Int[Array, "3 b s"] | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """Run the tower, unless there are `features` or no media, and the language model.

        Args:
            input_ids: token ids [b, s], with one placeholder token for each feature.
            features: outputs of `encode` assigned to tokens, instead of images or recordings.
            token_type_ids: 0 for the tokens of a prompt, 1 for those after a prompt. Only models
                whose prompt tokens attend to later ones read the types.
            position_ids: rotary positions [b, s], or [3, b, s] of a model with axes of images. For
                such a model, positions [b, s] are those of texts without images: with
                `image_grid_thw`, the positions are computed from the tokens, and the positions of
                later calls with the same cache continue after them.
            inputs: the arrays `modality.names`, padded at the end of rows, or those of a processor
                of transformers, which returns the images of all rows in one array; or
                `image_features` [b, n, d], the embeddings that `encode` returned for the images of
                each row, padded with zeros; and further arguments of `CausalLM.__call__`.
        """
        modality, form = self.modality, self.patch_form
        names = *modality.call_names, *modality.convertible
        arrays = {name: inputs.pop(name, None) for name in names}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        has_videos = modality.video_token is not None and modality.convertible[0] in arrays
        if features is None and (has_videos or _is_processor_form(arrays)):
            arrays = self._batch_media(input_ids, arrays)
        has_media = features is None and not arrays.keys().isdisjoint(modality.main_names)
        # Side of the blocks of patches of images whose tokens have axes.
        merge = form.merge if form is not None and form.has_axes else None
        if has_media and merge is not None and GRID not in arrays:
            raise ConfigError("images are packed patches: pass image_grid_thw, too")
        if has_media:
            features = self._assign_features(self._find_placeholders(input_ids), arrays)
        offsets = None
        is_counted = position_ids is None or position_ids.ndim == 2
        if merge is not None and GRID in arrays and is_counted:
            placeholders = self._find_placeholders(input_ids)
            segments = _get_segment_ids(placeholders, inputs)
            grids = jnp.asarray(arrays[GRID]) // np.asarray([1, merge, merge], np.int32)
            position_ids = grid_positions(placeholders, segments, grids, arrays.get(TIMES))
            cache = inputs.get("past_key_values")
            if cache is not None and inputs.get("ragged") is None:
                position_ids, offsets = _continue_positions(cache, position_ids, segments)
        if self.reads_ahead == "image" and features is not None:
            inputs["ahead"] = ahead_in_image(features.index >= 0, inputs)
        elif self.reads_ahead == "prompt":
            tokens = inputs.get("inputs_embeds") if input_ids is None else input_ids
            assert tokens is not None, "a call has tokens or embeddings"
            shape = tokens.shape[0], tokens.shape[1]
            inputs["ahead"] = ahead_in_prompt(token_type_ids, shape, inputs)
        output = super().__call__(input_ids, features=features, position_ids=position_ids, **inputs)
        if offsets is None:
            return output
        cache = cast(ContiguousCache, output.past_key_values).with_offsets(offsets)
        return output.replace(past_key_values=cache)

    def _find_placeholders(self, input_ids: Int[Array, "b s"] | None) -> Bool[Array, "b s"]:
        """Return which tokens are features."""
        if input_ids is None:
            raise ConfigError(
                f"{self.modality.noun} require input_ids, which contain the placeholder tokens"
            )
        return jnp.isin(jnp.asarray(input_ids), np.asarray(self.placeholder_tokens))

    def _assign_features(
        self, placeholders: Bool[Array, "b s"], arrays: dict[str, jax.Array]
    ) -> Features:
        """Assign features to placeholder tokens: those of the media, or the given ones."""
        media, *encoded = self.modality.main_names
        if media not in arrays:
            return Features.at(arrays[encoded[0]], placeholders)
        embeddings = self.encode(Inputs(arrays).select(self.modality.names)).embeddings
        return Features.at(embeddings, placeholders)


def _is_processor_form(arrays: Mapping[str, Array]) -> bool:
    """Return whether pixels are [i, c, h, w], [p, f], or tiles whose image_sizes are [i, 2]."""
    pixels, sizes = arrays.get("pixel_values"), arrays.get(SIZES)
    return pixels is not None and (pixels.ndim in (2, 4) or (sizes is not None and sizes.ndim == 2))


def _get_segment_ids(input_ids: Int[Array, "b s"], inputs: Mapping[str, Any]) -> Int[Array, "b s"]:
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
    # The text after a video follows its rows and columns, not its time.
    following = jnp.max(jnp.where(segments != 0, positions[1:], -1), axis=(0, 2)) + 1
    offsets = following - tokens - jnp.count_nonzero(segments, axis=1)
    return positions, offsets.astype(jnp.int32)
