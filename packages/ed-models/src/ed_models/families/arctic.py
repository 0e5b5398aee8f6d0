"""Arctic (Snowflake 2024): layers with a feed-forward layer and experts in parallel.

- every `moe_layer_frequency`-th layer has experts; the other layers have a feed-forward layer
- with `parallel_attn_mlp_res`, a layer with experts also has a feed-forward layer of the hidden
  size, and its experts read the input of the layer instead of the output of the attention

Parameter names and numbers follow the authors' `modeling_arctic.py`.
"""

from __future__ import annotations

from typing import Any

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, renamed


@register_config("arctic")
class ArcticConfig(EasyDeLBaseConfig):
    """The authors' fields, and execution fields from `EasyDeLBaseConfig`."""

    model_type = "arctic"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = None
    attention_dropout: float = 0.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 1
    moe_layer_frequency: int = 2
    parallel_attn_mlp_res: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False


def _has_experts(config: ArcticConfig, index: int) -> bool:
    """Return whether a layer has experts."""
    return (index + 1) % config.moe_layer_frequency == 0


class ArcticDecoderLayer(DecoderLayer):
    """Attention, and experts or a feed-forward layer, or both."""

    def __init__(self, parts: Parts, index: int):
        config: ArcticConfig = parts.config
        experts, sparse = config.num_local_experts, _has_experts(config, index)
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, mask=MaskRule(window=config.sliding_window)),
            mlp=SparseMLP(
                parts,
                gate=Router(parts, experts, config.num_experts_per_tok),
                experts=Experts(parts, experts, config.intermediate_size),
            )
            if sparse
            else GatedMLP(parts),
        )
        self.parallel = sparse and config.parallel_attn_mlp_res
        if self.parallel:
            self.residual_layernorm = parts.own_norm(config.hidden_size)
            self.residual_mlp = GatedMLP(parts, config.hidden_size)

    def __call__(self, x, ctx, cache, layer):
        if not self.parallel:
            return super().__call__(x, ctx, cache, layer)
        routed, report = self.feed_forward(self.post_attention_layernorm(x), ctx)
        attended, cache = self.self_attn(self.input_layernorm(x), ctx, cache, layer)
        x = ctx.name_activation(x + attended, "residual")
        return x + self.residual_mlp(self.residual_layernorm(x), ctx) + routed, cache, report


class ArcticModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = ArcticConfig
    layer_class = ArcticDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [_has_experts(config, i) for i in range(config.num_hidden_layers)]


@register_module(TaskType.CAUSAL_LM, config=ArcticConfig, model_type="arctic")
class ArcticForCausalLM(CausalLM):
    """Arctic with a language-model head."""

    body_class = ArcticModel
    WEIGHTS = renamed(
        {
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.experts": "block_sparse_moe.experts",
            "mlp": "block_sparse_moe.mlp",
            "gate_proj": "w1",
            "up_proj": "w3",
            "down_proj": "w2",
        },
        EXPERTS,
        *STANDARD,
    )
