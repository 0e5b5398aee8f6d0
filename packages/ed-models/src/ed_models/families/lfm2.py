"""LFM2 (Liquid AI 2025): gated short convolutions, and some layers of attention.

- most layers mix tokens by a convolution over three of them, between two gates
- queries and keys of attention are RMS-normed
- the size of the feed-forward layer is adjusted if `block_auto_adjust_ff_dim` is set

Numbers follow Hugging Face's `modeling_lfm2.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.short_conv import SHORT_CONV, ShortConvDecoder, ShortConvLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("lfm2")
class Lfm2Config(EasyDeLBaseConfig, transformers.Lfm2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "lfm2"

    @property
    def feed_forward_size(self) -> int:
        """The size of the feed-forward layers, which `block_*` derive from `intermediate_size`."""
        size = self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return size
        size = 2 * size // 3
        if self.block_ffn_dim_multiplier is not None:
            size = int(self.block_ffn_dim_multiplier * size)
            size = -(-size // self.block_multiple_of) * self.block_multiple_of
        return size


class Lfm2DecoderLayer(ShortConvLayer):
    """A convolution or attention, then a feed-forward layer."""

    def __init__(self, parts: Parts, index: int):
        mlp = GatedMLP(parts, parts.config.feed_forward_size, hidden_act="silu")
        super().__init__(parts, index, mlp)


class Lfm2Model(ShortConvDecoder):
    """Embedding, decoder layers, final norm."""

    config_class = Lfm2Config
    layer_class = Lfm2DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Lfm2Config, model_type="lfm2")
class Lfm2ForCausalLM(CausalLM):
    """LFM2 with a language-model head."""

    body_class = Lfm2Model
    WEIGHTS = SHORT_CONV
