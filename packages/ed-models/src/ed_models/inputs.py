"""What a model is called with, turned into what its layers are told.

Legend: b batch, s sequence, n sequences of a serving step, r rotary dimension.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra import rope
from ed_infra.masks import MaskInfo, segment_index
from ed_infra.rope import RopeSettings
from ed_infra.rotary import sections_of, select_axis
from ed_infra.sharding import constrain
from ed_layers.cache import RaggedBatch
from ed_layers.context import ALL_LAYERS, Ctx, Mode, Rope
from ed_layers.rotary import rope_tables
from jaxtyping import Array, Int


def layer_context(
    config: Any,
    shape: tuple[int, int],
    *,
    attention_mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    mask_info: MaskInfo | None = None,
    cache: Any = None,
    ragged: RaggedBatch | None = None,
    key: jax.Array | None = None,
    ropes: Mapping[str, RopeSettings] | None = None,
) -> tuple[Ctx, Any]:
    """Work out masks and positions for the three lives of a model: train, generate, serve.

    Args:
        config: the model's config: rope, head dim, `easy_method` (only `"train"` has noise, and a
            backward pass), `fcm_min_ratio` and `fcm_max_ratio`.
        shape: (b, s) of the tokens.
        attention_mask: [b, s], nonzero = a token.
        segment_ids: [b, s], 0 = padding; wins over `attention_mask`.
        position_ids: rotary positions [b, s], or [3, b, s] with the axes of images and videos; by
            default they count the tokens of a segment.
        mask_info: the mask itself, if the caller has one.
        cache: a contiguous cache, which is told of the new tokens; pages come with `ragged`.
        ragged: the flat batch of a serving step.
        key: of dropout and forgetful masking; None = deterministic.
        ropes: rotary settings by kind of layer; default: those of the config.

    Returns:
        the context of the layers, and the cache to hand to them.
    """
    b, s = shape
    mode: Mode = "train"
    if config.easy_method != "train":
        mode, key = "prefill", None
    segments = attention_mask if segment_ids is None else segment_ids
    segments = jnp.ones((b, s), jnp.int32) if segments is None else segments
    if ragged is not None:
        mode, counted = "decode", ragged.positions()
    elif cache is not None:
        mode = "decode" if s == 1 else "prefill"
        cache, mask_info, counted = cache.begin((segments != 0).astype(jnp.int32))
    elif mask_info is not None:
        counted, segments = mask_info.q_index, mask_info.q_segment_ids
    elif segment_ids is not None:
        counted, mask_info = segment_index(segment_ids), MaskInfo.from_segments(segment_ids)
    else:
        segments = (segments != 0).astype(jnp.int32)
        counted = jnp.maximum(jnp.cumsum(segments, axis=1, dtype=jnp.int32) - 1, 0)
        mask_info = MaskInfo.from_segments(segments)
    position_ids = counted if position_ids is None else position_ids
    if mode == "train" and key is not None and mask_info is not None and config.fcm_max_ratio > 0:
        site = jax.random.fold_in(key, zlib.crc32(b"fcm"))
        mask_info = mask_info.forgetful(site, config.fcm_min_ratio, config.fcm_max_ratio)
    # Whole along the sequence on every device: they are small, and the partitioner was seen to give
    # wrong positions for scans over a sequence that is split (sp > 1).
    axes = (None, "batch", None)[3 - position_ids.ndim :]
    position_ids = constrain(position_ids, axes, config)
    if mask_info is not None:
        mask_info = jax.tree.map(lambda x: constrain(x, ("batch", None), config), mask_info)
    tables = {
        kind: _tables(settings, position_ids, segments, ragged)
        for kind, settings in (rope_settings(config) if ropes is None else ropes).items()
    }
    ctx = Ctx(
        position_ids=position_ids,
        rope=tables,
        mask_info=mask_info,
        ragged=ragged,
        adapter_ids=None if ragged is None else ragged.adapter_of_token(),
        key=key,
        mode=mode,
        config=config,
    )
    return ctx, cache


def rope_settings(config: Any) -> dict[str, RopeSettings]:
    """Rotary settings of a config by kind of layer.

    The kinds are the layer types of `rope_parameters` where each has an entry of its own, else
    `ALL_LAYERS` alone.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [kind for kind, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        return {kind: rope.settings(config, layer_type=kind) for kind in nested}
    return {ALL_LAYERS: rope.settings(config)}


def longest_sequence(config: Any) -> int | None:
    """Positions that a model was made for; None where its rotary factors follow any length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "dynamic":
        return None
    return getattr(config, "max_position_embeddings", None)


def _tables(
    settings: RopeSettings,
    position_ids: Int[Array, "b s"] | Int[Array, "3 b s"],
    segments: Int[Array, "b s"],
    ragged: RaggedBatch | None,
) -> Rope:
    """Cosine and sine of the batch's positions.

    Frequencies that depend on length follow each sequence: a token's length is that of the prompt
    it belongs to, or its own place where that is beyond the prompt. So a generated token has the
    factor that `transformers` gives it with a cache, whatever shares its batch; keys that are
    stored keep the factor they were stored with.
    """
    if rope.depends_on_length(settings):
        lengths = _prompt_lengths(position_ids, segments, ragged)
        frequencies, scaling = rope.inv_frequencies_at(settings, lengths)
    else:
        constant, scaling = rope.inv_frequencies(settings)
        frequencies = jnp.asarray(constant, jnp.float32)
    cos, sin = rope_tables(position_ids, frequencies, scaling)
    if position_ids.ndim == 3:
        sections = sections_of(settings.parameters, cos.shape[-1])
        assert sections is not None, "positions with axes need an mrope_section"
        cos, sin = select_axis(cos, sections), select_axis(sin, sections)
    return cos, sin


def _prompt_lengths(
    position_ids: Int[Array, "b s"], segments: Int[Array, "b s"], ragged: RaggedBatch | None
) -> Int[Array, "b s"]:
    """For each token the length that its rotary factor follows."""
    if ragged is not None:
        prompts = ragged.kv_lens if ragged.prompt_lens is None else ragged.prompt_lens
        of_token = prompts[jnp.clip(ragged.seq_of_token, 0, prompts.shape[0] - 1)]
        return jnp.maximum(of_token[None], position_ids + 1)
    # The last token of a segment knows its length: carry that back to the others.
    s = segments.shape[1]
    following = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    places = jnp.arange(s, dtype=jnp.int32)
    ends = jnp.where(segments != following, places, s)
    end = jax.lax.cummin(ends, axis=1, reverse=True)
    return jnp.take_along_axis(position_ids, end, axis=1) + 1
