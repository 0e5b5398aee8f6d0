"""MiniMax-M2 (MiniMax 2025): 256 small experts with sigmoid routing, full attention.

- scores of experts are sigmoids; a bias that training moves without a gradient joins in the choice
- queries and keys are RMS-normed over all heads together; a part of each head turns

Numbers follow Hugging Face's `modeling_minimax_m2.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import BLOCK_SPARSE, renamed


@register_config("minimax_m2")
class MiniMaxM2Config(EasyDeLBaseConfig, transformers.MiniMaxM2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "minimax_m2"


class MiniMaxM2DecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: MiniMaxM2Config = parts.config
        experts, k = config.num_local_experts, config.num_experts_per_tok
        mlp = SparseMLP(
            parts,
            gate=Router(parts, experts, k, score="sigmoid", selection_bias=True),
            experts=Experts(parts, experts, config.intermediate_size),
        )
        attention = SelfAttention(parts, norm=QKNorm(parts.norm, heads="all"))
        super().__init__(parts, self_attn=attention, mlp=mlp)


class MiniMaxM2Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = MiniMaxM2Config
    layer_class = MiniMaxM2DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=MiniMaxM2Config, model_type="minimax_m2")
class MiniMaxM2ForCausalLM(CausalLM):
    """MiniMax-M2 with a language-model head."""

    body_class = MiniMaxM2Model
    WEIGHTS = renamed(
        {"gate.e_score_correction_bias": "e_score_correction_bias"},
        *BLOCK_SPARSE,
    )
    MODULES = Modules({"block_sparse_moe": "mlp"})
