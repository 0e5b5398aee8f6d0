"""EXAONE 3, 3.5 and Deep (LG AI Research 2024): Llama with the names of GPT-2.

Parameter names and numbers follow the authors' `modeling_exaone.py`.
"""

from __future__ import annotations

from typing import Any

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("exaone")
class ExaoneConfig(EasyDeLBaseConfig):
    """The authors' fields, and execution fields from `EasyDeLBaseConfig`."""

    model_type = "exaone"
    attribute_map = {
        "num_hidden_layers": "num_layers",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    vocab_size: int = 102400
    hidden_size: int = 2048
    intermediate_size: int | None = None
    num_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    activation_function: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-5
    embed_dropout: float = 0.0
    attention_dropout: float = 0.0
    rope_parameters: dict[str, Any] | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True


class ExaoneDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: ExaoneConfig = parts.config
        mlp = GatedMLP(parts, config.intermediate_size or 4 * config.hidden_size)
        super().__init__(parts, self_attn=SelfAttention(parts), mlp=mlp)


class ExaoneModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = ExaoneConfig
    layer_class = ExaoneDecoderLayer

    def enter(self, x, ctx):
        return ctx.apply_dropout(x, self.config.embed_dropout, "embeddings")


@register_module(TaskType.CAUSAL_LM, config=ExaoneConfig, model_type="exaone")
class ExaoneForCausalLM(CausalLM):
    """EXAONE with a language-model head."""

    body_class = ExaoneModel
    WEIGHTS = renamed(
        {
            "model": "transformer",
            "embed_tokens": "wte",
            "layers": "h",
            "self_attn.o_proj": "attn.attention.out_proj",
            "self_attn": "attn.attention",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "mlp.gate_proj": "mlp.c_fc_0",
            "mlp.up_proj": "mlp.c_fc_1",
            "mlp.down_proj": "mlp.c_proj",
            "norm": "ln_f",
        },
        *STANDARD,
    )
