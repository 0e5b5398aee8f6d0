"""ERNIE 4.5 MoE (Baidu 2025): ERNIE 4.5 with experts.

- a bias that training moves without a gradient joins in the choice of experts, not in their weights
- shared experts as one feed-forward layer
- `moe_layer_start_index`, `moe_layer_end_index` and `moe_layer_interval` select the layers with
  experts
- rotary pairs are neighbours

Numbers follow Hugging Face's `modeling_ernie4_5_moe.py`; parameter names are its names.
"""

from __future__ import annotations

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, renamed


@register_config("ernie4_5_moe")
class Ernie4_5_MoeConfig(EasyDeLBaseConfig, transformers.Ernie4_5_MoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "ernie4_5_moe"


def is_sparse(config: EasyDeLBaseConfig, index: int) -> bool:
    """Whether a layer has experts."""
    within = config.moe_layer_start_index <= index <= config.moe_layer_end_index
    return within and (index + 1) % config.moe_layer_interval == 0


class Ernie4_5_MoeDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Ernie4_5_MoeConfig = parts.config
        bias = config.use_bias
        mlp = self.sparse(parts) if is_sparse(config, index) else GatedMLP(parts, bias=bias)
        attention = SelfAttention(parts, bias=bias, position=Rotary(interleaved=True))
        super().__init__(parts, self_attn=attention, mlp=mlp)

    @staticmethod
    def sparse(parts: Parts) -> SparseMLP:
        """The layer with experts."""
        config: Ernie4_5_MoeConfig = parts.config
        experts, f = config.moe_num_experts, config.moe_intermediate_size
        gate = Router(parts, experts, config.moe_k, selection_bias=True)
        # The checkpoint's is a row of a table with one row.
        gate.e_score_correction_bias.set_value(jnp.zeros((1, experts), jnp.float32))
        shared = config.moe_num_shared_experts
        return SparseMLP(
            parts,
            gate=gate,
            experts=Experts(parts, experts, f),
            shared=GatedMLP(parts, f * shared, bias=config.use_bias) if shared else None,
        )


class Ernie4_5_MoeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Ernie4_5_MoeConfig
    layer_class = Ernie4_5_MoeDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [is_sparse(config, i) for i in range(config.num_hidden_layers)]


@register_module(TaskType.CAUSAL_LM, config=Ernie4_5_MoeConfig, model_type="ernie4_5_moe")
class Ernie4_5_MoeForCausalLM(CausalLM):
    """ERNIE 4.5 MoE with a language-model head."""

    body_class = Ernie4_5_MoeModel
    WEIGHTS = renamed(
        {"gate.e_score_correction_bias": "moe_statics.e_score_correction_bias"}, EXPERTS, *STANDARD
    )

    @property
    def head_bias(self):
        return self.config.use_bias
