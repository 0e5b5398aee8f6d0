"""MiniMax-Text-01 (MiniMax 2025): lightning attention and full attention in turns, with experts.

- lightning attention is linear; its heads forget at rates that follow from head and layer
- the residual is the normed stream, and each addition has a separate factor
- the softmax weights of the chosen experts add up to one

Numbers follow Hugging Face's `modeling_minimax.py`; parameter names are its names.
"""

from __future__ import annotations

from typing import Any

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts
from ed_layers.recurrence.lightning import LightningAttention

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import BLOCK_SPARSE, ignore

#: Tensors of some checkpoints that follow from the configuration.
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


@register_config("minimax")
class MiniMaxConfig(EasyDeLBaseConfig, transformers.MiniMaxConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "minimax"


class MiniMaxDecoderLayer(DecoderLayer):
    """Attention of either kind, and experts; each is added to its own normed input."""

    def __init__(self, parts: Parts, index: int):
        config = parts.config
        linear = config.layer_types[index] == "linear_attention"
        experts = config.num_local_experts
        mlp = SparseMLP(
            parts,
            gate=Router(parts, experts, config.num_experts_per_tok),
            experts=Experts(parts, experts, config.intermediate_size),
        )
        full = (
            SelfAttention(parts, mask=MaskRule(window=config.sliding_window))
            if not linear
            else None
        )
        super().__init__(parts, self_attn=full or LightningAttention(parts), mlp=mlp)
        kind = "linear" if linear else "full"
        names = (f"{kind}_attn_alpha", f"{kind}_attn_beta", "mlp_alpha", "mlp_beta")
        self.factors: tuple[Any, ...] = tuple(getattr(config, f"{n}_factor") for n in names)

    def __call__(self, x, ctx, cache, layer):
        keep, add, mlp_keep, mlp_add = self.factors
        x = self.input_layernorm(x)
        attended, cache = self.self_attn(x, ctx, cache, layer)
        x = ctx.name_activation(x * keep + attended * add, "residual")
        x = self.post_attention_layernorm(x)
        out, report = self.feed_forward(x, ctx)
        return x * mlp_keep + out * mlp_add, cache, report


class MiniMaxModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = MiniMaxConfig
    layer_class = MiniMaxDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=MiniMaxConfig, model_type="minimax")
class MiniMaxForCausalLM(CausalLM):
    """MiniMax-Text-01 with a language-model head."""

    body_class = MiniMaxModel
    WEIGHTS = (
        *BLOCK_SPARSE,
        *(ignore(f"{{path}}.self_attn.{name}") for name in DERIVED),
    )
    # Attention comes first: transformers counts the tokens of its cache in layer 0.
    MODULES = Modules({"block_sparse_moe": "mlp"})
