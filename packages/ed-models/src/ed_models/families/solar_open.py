"""SolarOpen (Upstage 2026): Glm4Moe without norms of queries and keys.

- `num_experts_per_tok` of `n_routed_experts` experts for each token, weighted by sigmoids
- a bias that takes part only in the choice of experts
- shared experts for all tokens

Numbers follow Hugging Face's `modeling_solar_open.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD


@register_config("solar_open")
class SolarOpenConfig(EasyDeLBaseConfig, transformers.SolarOpenConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "solar_open"


class SolarOpenDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: SolarOpenConfig = parts.config
        experts, k = config.n_routed_experts, config.num_experts_per_tok
        mlp = SparseMLP(
            parts,
            gate=Router(
                parts,
                experts,
                k,
                score="sigmoid",
                normalize=config.norm_topk_prob,
                scale=config.routed_scaling_factor,
                selection_bias=True,
                groups=config.n_group,
                groups_chosen=config.topk_group,
            ),
            experts=Experts(parts, experts, config.moe_intermediate_size),
            shared=GatedMLP(parts, config.moe_intermediate_size * config.n_shared_experts),
        )
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.attention_bias, out_bias=False),
            mlp=mlp,
        )


class SolarOpenModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = SolarOpenConfig
    layer_class = SolarOpenDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=SolarOpenConfig, model_type="solar_open")
class SolarOpenForCausalLM(CausalLM):
    """SolarOpen with a language-model head."""

    body_class = SolarOpenModel

    WEIGHTS = (EXPERTS, *STANDARD)
