"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention, small experts of which some are shared.

- keys and values of all heads come from one latent, which is all that a cache stores
- queries are compressed too, but in the Lite model
- experts are chosen from the best groups where `topk_method` is `group_limited_greedy`; the score
  of a group is that of its best expert, and weights are not normalised
- the first `first_k_dense_replace` layers are dense

Numbers follow Hugging Face's `modeling_deepseek_v2.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.latent_attention import LatentAttention
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD


@register_config("deepseek_v2")
class DeepseekV2Config(EasyDeLBaseConfig, transformers.DeepseekV2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "deepseek_v2"


class DeepseekV2DecoderLayer(DecoderLayer):
    """Latent attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: DeepseekV2Config = parts.config
        sparse = index >= config.first_k_dense_replace
        super().__init__(
            parts,
            self_attn=LatentAttention(parts),
            mlp=self.sparse(parts) if sparse else GatedMLP(parts, bias=config.mlp_bias),
        )

    @staticmethod
    def sparse(parts: Parts) -> SparseMLP:
        """The layer with experts."""
        config: DeepseekV2Config = parts.config
        limited = config.topk_method == "group_limited_greedy"
        gate = Router(
            parts,
            config.n_routed_experts,
            config.num_experts_per_tok,
            normalize=False,
            scale=config.routed_scaling_factor,
            groups=config.n_group if limited else 1,
            groups_chosen=config.topk_group if limited else 1,
            group_score=1,
        )
        f = config.moe_intermediate_size
        return SparseMLP(
            parts,
            gate=gate,
            experts=Experts(parts, config.n_routed_experts, f),
            shared=GatedMLP(parts, f * config.n_shared_experts, bias=config.mlp_bias),
        )


class DeepseekV2Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = DeepseekV2Config
    layer_class = DeepseekV2DecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [i >= config.first_k_dense_replace for i in range(config.num_hidden_layers)]


@register_module(TaskType.CAUSAL_LM, config=DeepseekV2Config, model_type="deepseek_v2")
class DeepseekV2ForCausalLM(CausalLM):
    """DeepSeek-V2 with a language-model head."""

    body_class = DeepseekV2Model
    WEIGHTS = (EXPERTS, *STANDARD)
