"""GPT-NeoX and Pythia (Black et al. 2022): attention and feed-forward side by side, two norms.

- one tensor for queries, keys and values, head by head; a quarter of each head turns
- one after another where `use_parallel_residual` is false

Numbers follow Hugging Face's `modeling_gpt_neox.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, ParallelLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, fused, ignore, renamed


@register_config("gpt_neox")
class GPTNeoXConfig(EasyDeLBaseConfig, transformers.GPTNeoXConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gpt_neox"


def _make_layer(parts: Parts, index: int) -> DecoderLayer:
    """Attention and feed-forward, side by side or one after another."""
    config: GPTNeoXConfig = parts.config
    layer = partial(ParallelLayer, norms=2) if config.use_parallel_residual else DecoderLayer
    return layer(
        parts,
        self_attn=SelfAttention(parts, bias=config.attention_bias),
        mlp=MLP(parts),
        dropout=config.hidden_dropout,
    )


class GPTNeoXModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GPTNeoXConfig
    layer_class = staticmethod(_make_layer)

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps)

    def enter(self, x, ctx):
        return ctx.apply_dropout(x, self.config.hidden_dropout, "embeddings")


@register_module(TaskType.CAUSAL_LM, config=GPTNeoXConfig, model_type="gpt_neox")
class GPTNeoXForCausalLM(CausalLM):
    """GPTNeoX with a language-model head."""

    body_class = GPTNeoXModel

    WEIGHTS = (
        *renamed(
            {
                "lm_head": "embed_out",
                "model.norm": "gpt_neox.final_layer_norm",
                "model": "gpt_neox",
                "embed_tokens": "embed_in",
                "self_attn": "attention",
                "o_proj": "dense",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            *fused(("q_proj", "k_proj", "v_proj"), "query_key_value", groups="num_attention_heads"),
            *STANDARD,
        ),
        # The causal mask, in old checkpoints.
        ignore("{path}.attention.bias"),
        ignore("{path}.attention.masked_bias"),
    )
    MODULES = Modules({"embed_out": "lm_head"})
