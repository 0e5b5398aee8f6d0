"""Which function carries out which mechanism. All of one kind have one signature."""

from __future__ import annotations

from collections.abc import Callable

import jax

from ed_layers.attention.blockwise import blockwise_attention
from ed_layers.attention.paged import paged_attention
from ed_layers.attention.vanilla import vanilla_attention

#: Keys and values of the call: `(q, k, v, mask_info, scoring, mechanism) -> out`, all [b, s, h, k].
PROJECTED: dict[str, Callable[..., jax.Array]] = {
    "vanilla": vanilla_attention,
    "blockwise": blockwise_attention,
}

#: The engine's pages: `(q [T, h, k], pages, ragged, scoring, mechanism) -> out`.
PAGED: dict[str, Callable[..., jax.Array]] = {
    "ragged_page_attention_v3": paged_attention,
}
