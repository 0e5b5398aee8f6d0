"""DBRX (Databricks 2024): sixteen experts, four of them chosen, layer norms without biases.

- queries, keys and values are clipped to `clip_qkv`
- the weights of the chosen experts are divided by their norm, of the order
  `moe_normalize_expert_weights`
- each projection of all experts of a layer is one tensor

Numbers follow Hugging Face's `modeling_dbrx.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers import sums
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, Rule, concat, equal, fused, renamed

EPS = 1e-5  # of torch's layer norm


@register_config("dbrx")
class DbrxConfig(EasyDeLBaseConfig, transformers.DbrxConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "dbrx"
    attn_config: Any = None
    ffn_config: Any = None

    @property
    def router_aux_loss_coef(self) -> float:
        """Factor on the loss that balances the experts."""
        return self.ffn_config.moe_loss_weight

    @property
    def attention_dropout(self) -> float:
        """Dropout of the weights of attention."""
        return self.attn_config.attn_pdrop


class DbrxRouter(Router):
    """Weights are divided by their norm."""

    def __init__(self, parts: Parts):
        ffn = parts.config.ffn_config
        super().__init__(parts, ffn.moe_num_experts, ffn.moe_top_k, normalize=False)
        self.order = ffn.moe_normalize_expert_weights

    def choose(self, logits, forced_ids=None):
        expert_ids, weights = super().choose(logits, forced_ids)
        if self.order is not None:
            powers = sums.total(jnp.abs(weights) ** self.order)
            weights = weights / powers ** (1 / self.order)
        return expert_ids, weights


class DbrxDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config = parts.config
        ffn = config.ffn_config
        experts = Experts(
            parts, ffn.moe_num_experts, ffn.ffn_hidden_size, hidden_act=ffn.ffn_act_fn["name"]
        )
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, norm=QKNorm(clip=config.attn_config.clip_qkv)),
            mlp=SparseMLP(parts, gate=DbrxRouter(parts), experts=experts),
        )


class DbrxModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = DbrxConfig
    layer_class = DbrxDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=EPS, bias=False)

    def rope_settings(self):
        # Published configurations have the base here, where transformers 5 does not look for it.
        theta = getattr(self.config.attn_config, "rope_theta", None)
        theta_settings = {} if theta is None else {"rope_theta": theta}
        return {
            kind: replace(settings, parameters={**settings.parameters, **theta_settings})
            for kind, settings in super().rope_settings().items()
        }


@register_module(TaskType.CAUSAL_LM, config=DbrxConfig, model_type="dbrx")
class DbrxForCausalLM(CausalLM):
    """DBRX with a language-model head."""

    body_class = DbrxModel
    WEIGHTS = renamed(
        {
            "model.norm": "transformer.norm_f",
            "model": "transformer",
            "embed_tokens": "wte",
            "layers": "blocks",
            "input_layernorm": "norm_attn_norm.norm_1",
            "post_attention_layernorm": "norm_attn_norm.norm_2",
            "self_attn": "norm_attn_norm.attn",
            "o_proj": "out_proj",
            "mlp.gate": "ffn.router.layer",
            "mlp.experts": "ffn.experts.mlp",
            "mlp": "ffn",
        },
        *fused(("q_proj", "k_proj", "v_proj"), "Wqkv"),
        Rule("{path}.experts.gate_proj.kernel", "{path}.experts.w1", concat(0)),
        Rule("{path}.experts.up_proj.kernel", "{path}.experts.v1", concat(0)),
        Rule("{path}.experts.down_proj.kernel", "{path}.experts.w2", concat(0, equal)),
        *STANDARD,
    )
    # Fields that transformers' class expects under DBRX's names, and unknown fields.
