"""FlexOlmo (2025): Olmoe with norms behind attention and feed-forward instead of before.

- norms behind attention and feed-forward instead of before
- norms of queries and keys over all heads together
- `num_experts_per_tok` of `num_experts` experts for each token, weighted by a softmax

Numbers follow Hugging Face's `modeling_flex_olmo.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import PostNormLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD


@register_config("flex_olmo")
class FlexOlmoConfig(EasyDeLBaseConfig, transformers.FlexOlmoConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "flex_olmo"


class FlexOlmoDecoderLayer(PostNormLayer):
    """Attention and experts, each normed after."""

    def __init__(self, parts: Parts, index: int):
        config: FlexOlmoConfig = parts.config
        experts, k = config.num_experts, config.num_experts_per_tok
        mlp = SparseMLP(
            parts,
            gate=Router(parts, experts, k, normalize=config.norm_topk_prob),
            experts=Experts(parts, experts, config.intermediate_size),
        )
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts, bias=config.attention_bias, norm=QKNorm(parts.own_norm, heads="all")
            ),
            mlp=mlp,
        )


class FlexOlmoModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = FlexOlmoConfig
    layer_class = FlexOlmoDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, scale_first=True)


@register_module(TaskType.CAUSAL_LM, config=FlexOlmoConfig, model_type="flex_olmo")
class FlexOlmoForCausalLM(CausalLM):
    """FlexOlmo with a language-model head."""

    body_class = FlexOlmoModel

    WEIGHTS = (EXPERTS, *STANDARD)
