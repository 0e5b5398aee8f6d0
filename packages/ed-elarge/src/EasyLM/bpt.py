"""The import path of EasyLM's documentation; see `ed_elarge.easylm.blockwise`."""

from ed_elarge.easylm.blockwise import blockwise_attn as blockwise_attn
from ed_elarge.easylm.blockwise import blockwise_ffn as blockwise_ffn
