"""Kimi Linear (Kimi Team 2025): three layers of Kimi delta attention, then one of latent attention.

- each channel of a key of the delta rule has a separate decay
- latent attention without positions: nothing turns
- scores of experts are sigmoids; a bias that training moves without a gradient joins in the choice
- `mlp_layer_types` selects the dense layers

Numbers follow Hugging Face's `modeling_kimi_linear.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.latent_attention import LatentAttention
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts
from ed_layers.recurrence.delta import KimiDelta

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.experts import sigmoid_experts
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, renamed


@register_config("kimi_linear")
class KimiLinearConfig(EasyDeLBaseConfig, transformers.KimiLinearConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "kimi_linear"


class StillLatentAttention(LatentAttention):
    """Latent attention of which nothing turns."""

    def turn(self, x, first, ctx):
        return x


class KimiLinearDecoderLayer(DecoderLayer):
    """Delta attention or latent attention, then a feed-forward layer or experts."""

    def __init__(self, parts: Parts, index: int):
        config = parts.config
        if config.layer_types[index] == "linear_attention":
            attention = KimiDelta(
                parts,
                key_heads=config.linear_num_heads,
                value_heads=config.linear_num_heads,
                key_dim=config.linear_head_dim,
                value_dim=config.linear_head_dim,
                taps=config.linear_conv_kernel_dim,
            )
        else:
            attention = StillLatentAttention(parts)
        sparse = config.mlp_layer_types[index] == "sparse"
        mlp = sigmoid_experts(parts) if sparse else GatedMLP(parts)
        super().__init__(parts, self_attn=attention, mlp=mlp)


class KimiLinearModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = KimiLinearConfig
    layer_class = KimiLinearDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(zip(config.layer_types, config.mlp_layer_types, strict=True))

    def rope_settings(self):
        return {}


@register_module(TaskType.CAUSAL_LM, config=KimiLinearConfig, model_type="kimi_linear")
class KimiLinearForCausalLM(CausalLM):
    """Kimi Linear with a language-model head."""

    body_class = KimiLinearModel
    WEIGHTS = renamed(
        {"mlp": "block_sparse_moe"},
        *renamed({"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}, EXPERTS),
        *STANDARD,
    )
    # transformers writes dense layers as `block_sparse_moe` too; Moonshot's files have `mlp`.
    OTHER_NAMES = {"mlp": "block_sparse_moe"}
    MODULES = Modules(
        {
            "block_sparse_moe": "mlp",
            "self_attn.f_a_proj": "self_attn.forget_gate.f_a_proj",
            "self_attn.f_b_proj": "self_attn.forget_gate.f_b_proj",
        }
    )
