"""MPT (MosaicML 2023): ALiBi, no biases at all.

- layer norms without bias; one tensor for queries, keys and values, which may be clipped
- head tied to the embedding

Numbers follow Hugging Face's `modeling_mpt.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm, ScoreRule
from ed_layers.attention.scoring import Alibi, alibi_slopes
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, fused, renamed


@register_config("mpt")
class MptConfig(EasyDeLBaseConfig, transformers.MptConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "mpt"

    @property
    def attention_dropout(self) -> float:
        """Dropout of attention weights."""
        attn_config: Any = self.attn_config
        return attn_config.attn_pdrop

    def validate(self):
        """Refuse fields that change the authors' computation, but not that of `transformers`.

        `expansion_ratio` is not among the fields: the feed-forward layer of `transformers` is four
        times as wide as the model for any value, and so is ours.
        """
        super().validate()
        attn_config: Any = self.attn_config
        fixed_values = {
            "attn_config.alibi": (attn_config.alibi, True),
            "attn_config.alibi_bias_max": (attn_config.alibi_bias_max, 8),
            "attn_config.attn_type": (attn_config.attn_type, "multihead_attention"),
            "attn_config.qk_ln": (attn_config.qk_ln, False),
            "attn_config.prefix_lm": (attn_config.prefix_lm, False),
            "no_bias": (self.no_bias, True),
            "logit_scale": (self.logit_scale, None),
        }
        for name, (value, only) in fixed_values.items():
            if value != only:
                raise ConfigError(f"mpt: {name}={value!r} is not supported, only {only!r}")


class MptDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: MptConfig = parts.config
        attn_config: Any = config.attn_config
        attention = SelfAttention(
            parts,
            position=Alibi(alibi_slopes(config.num_attention_heads)),
            norm=QKNorm(clip=attn_config.clip_qkv or None),
            scores=ScoreRule(scale=attn_config.softmax_scale),
        )
        super().__init__(
            parts,
            self_attn=attention,
            mlp=MLP(parts, 4 * config.hidden_size, hidden_act="gelu", bias=False),
            dropout=attn_config.attn_pdrop,
        )


class MptModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = MptConfig
    layer_class = MptDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_epsilon, bias=False)

    def rope_settings(self):
        return {}


@register_module(TaskType.CAUSAL_LM, config=MptConfig, model_type="mpt")
class MptForCausalLM(CausalLM):
    """Mpt with a language-model head."""

    body_class = MptModel

    WEIGHTS = renamed(
        {
            "model.norm": "transformer.norm_f",
            "model": "transformer",
            "embed_tokens": "wte",
            "layers": "blocks",
            "self_attn": "attn",
            "o_proj": "out_proj",
            "input_layernorm": "norm_1",
            "post_attention_layernorm": "norm_2",
            "mlp": "ffn",
        },
        *fused(("q_proj", "k_proj", "v_proj"), "Wqkv"),
        *STANDARD,
    )
