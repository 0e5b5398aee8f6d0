"""Which function carries out which mechanism. All of one kind have one signature."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from ed_layers.attention.blockwise import blockwise_attention
from ed_layers.attention.decode import decode_attention
from ed_layers.attention.flash import cudnn_attention, flash_attention
from ed_layers.attention.paged_tpu import ragged_page_attention
from ed_layers.attention.ring import ring_attention
from ed_layers.attention.sdpa import sdpa_attention
from ed_layers.attention.splash import blocksparse_attention
from ed_layers.attention.vanilla import vanilla_attention

#: Keys and values of the call: `(q, k, v, mask_info, scoring, mechanism) -> out`, all [b, s, h, k].
PROJECTED: dict[str, Callable[..., jax.Array]] = {
    "vanilla": vanilla_attention,
    "blockwise": blockwise_attention,
    "flash_attn2": flash_attention,
    "blocksparse": blocksparse_attention,
    "cudnn": cudnn_attention,
    "sdpa": sdpa_attention,
    "ring": ring_attention,
}

#: A contiguous cache: `(q [b, s, h, k], stored, scoring, mechanism) -> out`.
CACHED: dict[str, Callable[..., jax.Array]] = {
    "autoregressive_decodeattn": decode_attention,
}

#: The engine's pages: `(q [T, h, k], pages, ragged, scoring, mechanism) -> out`.
PAGED: dict[str, Callable[..., jax.Array]] = {
    "ragged_page_attention_v3": partial(ragged_page_attention, "ragged_page_attention_v3"),
    "ragged_page_attention_v2": partial(ragged_page_attention, "ragged_page_attention_v2"),
    "page_attention": partial(ragged_page_attention, "page_attention"),
}
