"""GLM-5 (Zhipu AI 2026): latent attention whose queries see the keys that an index chooses.

- keys and values of all heads come from one latent; a cache stores it and the index's keys
- small heads score all keys of a query, and attention reads the `index_topk` best
- scores of experts are sigmoids, as in DeepSeek-V3

Numbers follow Hugging Face's `modeling_glm_moe_dsa.py`; parameter names are its names. Layers that
predict further tokens are not loaded, nor are models some of whose layers share the choice of
another. The index has no loss, so training does not change it.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.latent_attention import LatentAttention
from ed_layers.attention.blocks.sparse_index import Indexer
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.experts import sigmoid_experts
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, carry


@register_config("glm_moe_dsa")
class GlmMoeDsaConfig(EasyDeLBaseConfig, transformers.GlmMoeDsaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm_moe_dsa"

    def validate(self):
        """Refuse layers that share a choice."""
        super().validate()
        kinds = self.indexer_types or []
        if shared := [i for i, kind in enumerate(kinds) if kind != "full"]:
            raise ConfigError(
                f"glm_moe_dsa: {len(shared)} of {len(kinds)} layers, the first is {shared[0]}, "
                "share the keys that an earlier layer chose (indexer_types); that is not computed "
                "here: each layer should be 'full', as in GLM-5"
            )


class GlmMoeDsaDecoderLayer(DecoderLayer):
    """Latent attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        sparse = parts.config.mlp_layer_types[index] == "sparse"
        attention = LatentAttention(parts, indexer=Indexer(parts, interleaved=True))
        super().__init__(
            parts,
            self_attn=attention,
            mlp=sigmoid_experts(parts) if sparse else GatedMLP(parts),
        )


class GlmMoeDsaModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GlmMoeDsaConfig
    layer_class = GlmMoeDsaDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return config.mlp_layer_types


@register_module(TaskType.CAUSAL_LM, config=GlmMoeDsaConfig, model_type="glm_moe_dsa")
class GlmMoeDsaForCausalLM(CausalLM):
    """GLM-5 with a language-model head."""

    body_class = GlmMoeDsaModel
    WEIGHTS = (EXPERTS, *STANDARD, carry("model.layers.78.{path}"))
