"""Converts the arguments of a model call into the context of its layers.

Legend: b batch, s sequence, n sequences of a serving step, r rotary dimension.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo, segment_index
from ed_infra.rope import frequencies as rope
from ed_infra.rope.frequencies import RopeSettings
from ed_infra.rope.rotation import get_section_axes, select_axis
from ed_infra.sharding.placement import constrain
from ed_layers.cache.protocol import ContiguousCache
from ed_layers.context import ALL_LAYERS, Ctx, Mode, Rope
from ed_layers.dropout import select_dropout_key
from ed_layers.rotary import rope_tables
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from ed_layers.cache.protocol import Cache
    from ed_layers.cache.ragged import RaggedBatch


def layer_context(
    config: EasyDeLBaseConfig,
    shape: tuple[int, int],
    *,
    attention_mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    mask_info: MaskInfo | None = None,
    ahead: jax.Array | None = None,
    cache: Cache | None = None,
    ragged: RaggedBatch | None = None,
    key: jax.Array | None = None,
    routed_experts: jax.Array | None = None,
    output_routed_experts: bool = False,
    ropes: Mapping[str, RopeSettings] | None = None,
) -> tuple[Ctx, Cache | None]:
    """Compute masks and positions for training, generation or serving.

    Args:
        config: the model's config: rope, head dim, `easy_method` (only `"train"` uses noise and a
            backward pass), `fcm_min_ratio` and `fcm_max_ratio`.
        shape: (b, s) of the tokens.
        attention_mask: [b, s], nonzero = a token.
        segment_ids: [b, s], 0 = padding; has precedence over `attention_mask`.
        position_ids: rotary positions [b, s], or [3, b, s] with the axes of images and videos; the
            default counts the tokens of a segment.
        mask_info: a complete mask.
        ahead: number of later tokens that each token attends to, [b, s]; None = 0.
        cache: a contiguous cache, in which this call registers the new tokens; a paged cache is
            passed with `ragged` instead.
        ragged: the flat batch of a serving step.
        key: random key of dropout and forgetful masking; None = deterministic.
        routed_experts: experts that replace the choice of the routers, [b, s, layers, k].
        output_routed_experts: whether the routers report their experts.
        ropes: rotary settings by kind of layer; default: the settings of the config.

    Returns:
        The context of the layers, and the cache for the layers.
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
        if not getattr(cache, "trains", False):
            mode = "decode" if s == 1 else "prefill"
            segments = (segments != 0).astype(jnp.int32)
        cache, mask_info, counted = cast(ContiguousCache, cache).begin(segments)
    elif mask_info is not None:
        counted, segments = mask_info.q_index, mask_info.q_segment_ids
    elif segment_ids is not None:
        counted, mask_info = segment_index(segment_ids), MaskInfo.from_segments(segment_ids)
    else:
        segments = (segments != 0).astype(jnp.int32)
        counted = jnp.maximum(jnp.cumsum(segments, axis=1, dtype=jnp.int32) - 1, 0)
        mask_info = MaskInfo.from_segments(segments)
    if ahead is not None and ragged is not None:
        ragged = replace(ragged, ahead=ahead[0])
    elif ahead is not None and mask_info is not None:
        mask_info = replace(mask_info, ahead=ahead)
    position_ids = counted if position_ids is None else position_ids
    if mode == "train" and key is not None and mask_info is not None and config.fcm_max_ratio > 0:
        site = jax.random.fold_in(key, zlib.crc32(b"fcm"))
        mask_info = mask_info.forgetful(site, config.fcm_min_ratio, config.fcm_max_ratio)
    # Positions and masks are not sharded along the sequence: they are small, and the partitioner
    # produced wrong positions for scans over a sharded sequence (sp > 1).
    axes = (None, "batch", None)[3 - position_ids.ndim :]
    position_ids = constrain(position_ids, axes, config)
    if mask_info is not None:
        mask_info = jax.tree.map(lambda x: constrain(x, ("batch", None), config), mask_info)
    tables = {
        kind: _tables(settings, position_ids, segments, ragged)
        for kind, settings in (rope_settings(config) if ropes is None else ropes).items()
    }
    sums = None
    if ragged is not None:
        from ed_layers.stream_gpu import StreamSums  # for serving only

        sums = StreamSums.create(b * s)
    ctx = Ctx(
        position_ids=position_ids,
        rope=tables,
        mask_info=mask_info,
        ragged=ragged,
        adapter_ids=None if ragged is None else ragged.adapter_of_token(),
        key=None if key is None else select_dropout_key(key),
        routed_experts=routed_experts,
        returns_experts=output_routed_experts,
        mode=mode,
        config=config,
        sums=sums,
    )
    return ctx, cache


def embed_input_ids(
    embed: Callable[[jax.Array], jax.Array],
    input_ids: Int[Array, "b s"] | None,
    inputs_embeds: Float[Array, "b s d"] | None,
) -> Float[Array, "b s d"]:
    """Return `inputs_embeds`, or the embeddings of the tokens.

    Raises:
        ConfigError: both are None.
    """
    if inputs_embeds is not None:
        return inputs_embeds
    if input_ids is None:
        raise ConfigError("input_ids and inputs_embeds are None: pass one of them")
    return embed(input_ids)


def rope_settings(config: EasyDeLBaseConfig) -> dict[str, RopeSettings]:
    """Return the rotary settings of a config by kind of layer.

    The kinds are the layer types if `rope_parameters` has an entry per layer type, otherwise only
    `ALL_LAYERS`.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [kind for kind, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        return {kind: rope.settings(config, layer_type=kind) for kind in nested}
    return {ALL_LAYERS: rope.settings(config)}


def alternate_axes(
    settings: Mapping[str, RopeSettings], sections: Sequence[int]
) -> dict[str, RopeSettings]:
    """Return rotary settings in which the axes of images alternate.

    Args:
        settings: rotary settings by kind of layer.
        sections: numbers of frequencies of time, height and width, for a configuration without
            them.
    """
    default, alternating = {"mrope_section": [*sections]}, {"mrope_interleaved": True}
    return {
        kind: replace(one, parameters={**default, **one.parameters, **alternating})
        for kind, one in settings.items()
    }


def build_theta_settings(
    config: EasyDeLBaseConfig, thetas: Sequence[float]
) -> dict[str, RopeSettings]:
    """Return rotary settings by base frequency, for layers that have different ones.

    The kinds are the frequencies as text; 0 is a layer without rotary positions (Granite).
    """
    usual = rope.settings(config)
    return {
        str(theta): replace(usual, parameters={**usual.parameters, "rope_theta": theta})
        for theta in dict.fromkeys(thetas)
        if theta
    }


def _tables(
    settings: RopeSettings,
    position_ids: Int[Array, "b s"] | Int[Array, "3 b s"],
    segments: Int[Array, "b s"],
    ragged: RaggedBatch | None,
) -> Rope:
    """Return cosine and sine of the batch's positions.

    Length-dependent frequencies are computed per sequence. The length of a token is the length of
    its prompt, or its position if the position is beyond the prompt. A generated token therefore
    gets the same factor as in `transformers` with a cache, for every composition of the batch.
    Stored keys keep their factor.
    """
    if rope.depends_on_length(settings):
        lengths = _prompt_lengths(position_ids, segments, ragged)
        frequencies, scaling = rope.inv_frequencies_at(settings, lengths)
    else:
        constant, scaling = rope.inv_frequencies(settings)
        frequencies = jnp.asarray(constant, jnp.float32)
    cos, sin = rope_tables(position_ids, frequencies, scaling)
    if position_ids.ndim == 3:
        sections = get_section_axes(settings.parameters, cos.shape[-1])
        assert sections is not None, "positions with axes need an mrope_section"
        cos, sin = select_axis(cos, sections), select_axis(sin, sections)
    return cos, sin


def _prompt_lengths(
    position_ids: Int[Array, "b s"], segments: Int[Array, "b s"], ragged: RaggedBatch | None
) -> Int[Array, "b s"]:
    """Return the length of each token, which determines its rotary factor."""
    if ragged is not None:
        prompts = ragged.kv_lens if ragged.prompt_lens is None else ragged.prompt_lens
        token_lengths = prompts[jnp.clip(ragged.seq_of_token, 0, prompts.shape[0] - 1)]
        return jnp.maximum(token_lengths[None], position_ids + 1)
    # The position of the last token of a segment is its length; copy it to the other tokens.
    s = segments.shape[1]
    following = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    places = jnp.arange(s, dtype=jnp.int32)
    ends = jnp.where(segments != following, places, s)
    end = jax.lax.cummin(ends, axis=1, reverse=True)
    return jnp.take_along_axis(position_ids, end, axis=1) + 1
