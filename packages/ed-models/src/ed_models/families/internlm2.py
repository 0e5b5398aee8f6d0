"""InternLM2 and 2.5 (Shanghai AI Laboratory 2024): Llama with one tensor for queries, keys, values.

- the tensor holds, for each key head, the queries of its group, its key and its value
- one switch for the biases of attention

Parameter names and numbers follow the authors' `modeling_internlm2.py`.
"""

from __future__ import annotations

from typing import Any

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention, get_num_kv_heads
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, fused, renamed


@register_config("internlm2")
class InternLM2Config(EasyDeLBaseConfig):
    """The authors' fields, and execution fields from `EasyDeLBaseConfig`."""

    model_type = "internlm2"
    vocab_size: int = 103168
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    bias: bool = True
    rope_parameters: dict[str, Any] | None = None
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False


class InternLM2DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: InternLM2Config = parts.config
        super().__init__(
            parts, self_attn=SelfAttention(parts, bias=config.bias), mlp=GatedMLP(parts)
        )


class InternLM2Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = InternLM2Config
    layer_class = InternLM2DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=InternLM2Config, model_type="internlm2")
class InternLM2ForCausalLM(CausalLM):
    """InternLM2 with a language-model head."""

    body_class = InternLM2Model
    WEIGHTS = renamed(
        {
            "lm_head": "output",
            "embed_tokens": "tok_embeddings",
            "self_attn.o_proj": "attention.wo",
            "self_attn": "attention",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
        *fused(("q_proj", "k_proj", "v_proj"), "wqkv", groups=get_num_kv_heads),
        *STANDARD,
    )
