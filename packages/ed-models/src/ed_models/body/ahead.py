"""How many later tokens a token attends to: those of its image, or of its prompt.

Legend: b rows, s positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from ed_layers.context import Ctx
from jaxtyping import Array, Bool, Int


def ahead_in_image(image: Bool[Array, "b s"], inputs: Mapping[str, Any]) -> Int[Array, "b s"]:
    """Return the number of later tokens of the same image; 0 for a token outside of images.

    Adjacent images are one image.

    Args:
        image: which tokens are features of images.
        inputs: arguments of a model call, of which `ragged` or `segment_ids` separates texts.
    """
    ragged, segments = inputs.get("ragged"), inputs.get("segment_ids")
    return ahead_in_run(image, segments if ragged is None else ragged.seq_of_token[None])


def ahead_in_prompt(
    token_type_ids: Int[Array, "b s"] | None, shape: tuple[int, int], inputs: Mapping[str, Any]
) -> Int[Array, "b s"] | None:
    """Return the number of later tokens of the same prompt; None if each token only attends to
    earlier ones.

    The prompt of a step of the engine follows from the batch. The first tokens of a cache are a
    prompt. In training, the token types tell the prompt; without types there is no prompt.

    Args:
        token_type_ids: 0 for the tokens of prompts, 1 for those after a prompt.
        shape: (b, s) of the tokens.
        inputs: arguments of a model call, of which `ragged`, `segment_ids`, `attention_mask` and
            `past_key_values` are read.
    """
    ragged, cache = inputs.get("ragged"), inputs.get("past_key_values")
    if ragged is not None:
        if ragged.decode_only:
            return None
        prompts = ragged.kv_lens if ragged.prompt_lens is None else ragged.prompt_lens
        lengths = prompts[jnp.clip(ragged.seq_of_token, 0, prompts.shape[0] - 1)]
        return jnp.maximum(lengths[None] - 1 - ragged.positions(), 0)
    if shape[1] == 1 or (token_type_ids is None and cache is None):
        return None
    segments = inputs.get("segment_ids")
    real = inputs.get("attention_mask") if segments is None else segments
    prompt = jnp.ones(shape, bool) if token_type_ids is None else jnp.asarray(token_type_ids) == 0
    if token_type_ids is None and cache is not None:
        prompt &= (cache.tokens == 0)[:, None]
    if real is not None:
        prompt &= jnp.asarray(real) != 0
    return ahead_in_run(prompt, segments)


def ahead_in_run(member: Bool[Array, "b s"], segments: object = None) -> Int[Array, "b s"]:
    """Return the number of later tokens of the same run of members in one segment."""
    continues = member[:, :-1] & member[:, 1:]
    if segments is not None:
        segments = jnp.asarray(segments)
        continues &= segments[:, :-1] == segments[:, 1:]
    s = member.shape[1]
    places = jnp.arange(s, dtype=jnp.int32)
    ends = jnp.where(jnp.pad(continues, ((0, 0), (0, 1))), s, places)
    return jax.lax.cummin(ends, axis=1, reverse=True) - places


def looking_back(ctx: Ctx) -> Ctx:
    """Return a context in which no token attends to later ones."""
    mask, ragged = ctx.mask_info, ctx.ragged
    return replace(
        ctx,
        mask_info=None if mask is None else replace(mask, ahead=None),
        ragged=None if ragged is None else replace(ragged, ahead=None),
    )
