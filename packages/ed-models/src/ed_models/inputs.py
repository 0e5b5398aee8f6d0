"""What a model is called with, turned into what its layers are told.

Legend: b batch, s sequence, k head dim.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo, segment_index
from ed_infra.rope import inv_frequencies
from ed_infra.sharding import constrain
from ed_layers.cache import RaggedBatch
from ed_layers.context import Ctx, Mode
from ed_layers.rotary import rope_tables


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
) -> tuple[Ctx, Any]:
    """Work out masks and positions for the three lives of a model: train, generate, serve.

    Args:
        config: the model's config: rope, head dim, `easy_method` (only `"train"` has noise, and a
            backward pass), `fcm_min_ratio` and `fcm_max_ratio`.
        shape: (b, s) of the tokens.
        attention_mask: [b, s], nonzero = a token.
        segment_ids: [b, s], 0 = padding; wins over `attention_mask`.
        position_ids: rotary positions [b, s]; by default they count the tokens of a segment.
        mask_info: the mask itself, if the caller has it.
        cache: a DenseCache, which is told of the new tokens; a PagedCache comes with `ragged`.
        ragged: the flat batch of a serving step.
        key: of dropout and forgetful masking; None = deterministic.

    Returns:
        the context of the layers, and the cache to hand to them.
    """
    b, s = shape
    mode: Mode = "train"
    if config.easy_method != "train":
        mode, key = "prefill", None
    if ragged is not None:
        mode = "decode"
        if position_ids is None:
            position_ids = ragged.positions()
    elif cache is not None:
        mode = "decode" if s == 1 else "prefill"
        segments = attention_mask if segment_ids is None else segment_ids
        segments = jnp.ones((b, s), jnp.int32) if segments is None else segments
        cache, mask_info, counted = cache.begin((segments != 0).astype(jnp.int32))
        position_ids = counted if position_ids is None else position_ids
    elif mask_info is None:
        if segment_ids is None:
            ones = jnp.ones((b, s), jnp.int32)
            segment_ids = (
                ones if attention_mask is None else (attention_mask != 0).astype(jnp.int32)
            )
            counted = jnp.maximum(jnp.cumsum(segment_ids, axis=1, dtype=jnp.int32) - 1, 0)
        else:
            counted = segment_index(segment_ids)
        position_ids = counted if position_ids is None else position_ids
        mask_info = MaskInfo.from_segments(segment_ids)
    elif position_ids is None:
        position_ids = mask_info.q_index
    assert position_ids is not None
    if mode == "train" and key is not None and mask_info is not None and config.fcm_max_ratio > 0:
        site = jax.random.fold_in(key, zlib.crc32(b"fcm"))
        mask_info = mask_info.forgetful(site, config.fcm_min_ratio, config.fcm_max_ratio)
    # Whole along the sequence on every device: they are small, and the partitioner was seen to give
    # wrong positions for scans over a sequence that is split (sp > 1).
    position_ids = constrain(position_ids, ("batch", None), config)
    if mask_info is not None:
        mask_info = jax.tree.map(lambda x: constrain(x, ("batch", None), config), mask_info)
    inv_freq, scaling = inv_frequencies(config, config.head_dim, seq_len=s)
    rope = rope_tables(position_ids, jnp.asarray(inv_freq, jnp.float32), scaling)
    ctx = Ctx(
        position_ids=position_ids,
        rope=rope,
        mask_info=mask_info,
        ragged=ragged,
        key=key,
        mode=mode,
    )
    return ctx, cache
