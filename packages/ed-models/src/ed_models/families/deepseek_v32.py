"""DeepSeek-V3.2 (DeepSeek-AI 2025): DeepSeek-V3 whose queries see the keys that an index chooses.

- keys and values of all heads come from one latent; a cache stores it and the index's keys
- small heads score all keys of a query, and attention reads the `index_topk` best
- scores of experts are sigmoids, chosen from the best groups, as in DeepSeek-V3

Numbers follow Hugging Face's `modeling_deepseek_v32.py`; parameter names are its names. Layers that
predict further tokens are not loaded. The index has no loss, so training does not change it.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
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


@register_config("deepseek_v32")
class DeepseekV32Config(EasyDeLBaseConfig, transformers.DeepseekV32Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "deepseek_v32"


class DeepseekV32DecoderLayer(DecoderLayer):
    """Latent attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        sparse = parts.config.mlp_layer_types[index] == "sparse"
        attention = LatentAttention(parts, indexer=Indexer(parts, interleaved=False))
        super().__init__(
            parts,
            self_attn=attention,
            mlp=sigmoid_experts(parts) if sparse else GatedMLP(parts),
        )


class DeepseekV32Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = DeepseekV32Config
    layer_class = DeepseekV32DecoderLayer

    @staticmethod
    def layer_kinds(config):
        return config.mlp_layer_types


@register_module(TaskType.CAUSAL_LM, config=DeepseekV32Config, model_type="deepseek_v32")
class DeepseekV32ForCausalLM(CausalLM):
    """DeepSeek-V3.2 with a language-model head."""

    body_class = DeepseekV32Model
    WEIGHTS = (EXPERTS, *STANDARD, carry("model.layers.61.{path}"))
