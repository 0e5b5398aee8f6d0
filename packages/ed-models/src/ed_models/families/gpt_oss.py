"""gpt-oss (OpenAI 2025): experts with biases and a clamped gate, attention with sinks.

- a learned logit per head is included in the softmax of attention
- every second layer sees a window
- gate and up projection alternate in one tensor of the checkpoint; all layers have biases
- the gate is cut off above `swiglu_limit`, the other half at both ends, and one is added to it

Numbers follow Hugging Face's `modeling_gpt_oss.py`; parameter names are its names.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, ScoreRule
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, Rule, equal, interleave, renamed

_EXPERTS = "{path}.experts"


@register_config("gpt_oss")
class GptOssConfig(EasyDeLBaseConfig, transformers.GptOssConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gpt_oss"


class GptOssExperts(Experts):
    """Experts with biases and a clamped gate."""

    def __init__(self, parts: Parts):
        config: GptOssConfig = parts.config
        super().__init__(parts, config.num_local_experts, config.intermediate_size, bias=True)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def glu(self, gate, up):
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * self.alpha)


class GptOssDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GptOssConfig = parts.config
        experts, k = config.num_local_experts, config.num_experts_per_tok
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            mask=MaskRule(window=get_layer_window(config, index)),
            scores=ScoreRule(sinks=True),
        )
        mlp = SparseMLP(
            parts, gate=Router(parts, experts, k, bias=True), experts=GptOssExperts(parts)
        )
        super().__init__(parts, self_attn=attention, mlp=mlp)


class GptOssModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GptOssConfig
    layer_class = GptOssDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=GptOssConfig, model_type="gpt_oss")
class GptOssForCausalLM(CausalLM):
    """gpt-oss with a language-model head."""

    body_class = GptOssModel
    WEIGHTS = renamed(
        {"gate": "router"},
        *(
            Rule(
                (f"{_EXPERTS}.gate_proj.{ours}", f"{_EXPERTS}.up_proj.{ours}"),
                f"{_EXPERTS}.gate_up_proj{theirs}",
                interleave(-1, equal),
            )
            for ours, theirs in (("kernel", ""), ("bias", "_bias"))
        ),
        Rule(f"{_EXPERTS}.down_proj.kernel", f"{_EXPERTS}.down_proj", equal),
        Rule(f"{_EXPERTS}.down_proj.bias", f"{_EXPERTS}.down_proj_bias", equal),
        *STANDARD,
    )
