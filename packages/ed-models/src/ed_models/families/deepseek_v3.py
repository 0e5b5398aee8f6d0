"""DeepSeek-V3 and R1 (DeepSeek-AI 2024), and Kimi-K2: latent attention, sigmoid routing by groups.

- keys and values of all heads come from one latent, which is all that a cache stores
- scores of experts are sigmoids; a bias that training moves without a gradient joins in the choice
- experts are chosen from the best groups; weights add up to `routed_scaling_factor`
- the first `first_k_dense_replace` layers are dense

Numbers follow Hugging Face's `modeling_deepseek_v3.py`; parameter names are its names. Layers that
predict further tokens are not loaded.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.latent_attention import LatentAttention
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.experts import sigmoid_experts
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, carry


@register_config("deepseek_v3")
class DeepseekV3Config(EasyDeLBaseConfig, transformers.DeepseekV3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "deepseek_v3"


class DeepseekV3DecoderLayer(DecoderLayer):
    """Latent attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: DeepseekV3Config = parts.config
        sparse = index >= config.first_k_dense_replace
        super().__init__(
            parts,
            self_attn=LatentAttention(parts, interleaved=config.rope_interleave),
            mlp=sigmoid_experts(parts) if sparse else GatedMLP(parts),
        )


class DeepseekV3Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = DeepseekV3Config
    layer_class = DeepseekV3DecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [i >= config.first_k_dense_replace for i in range(config.num_hidden_layers)]


@register_module(TaskType.CAUSAL_LM, config=DeepseekV3Config, model_type="deepseek_v3")
class DeepseekV3ForCausalLM(CausalLM):
    """DeepSeek-V3 with a language-model head."""

    body_class = DeepseekV3Model
    WEIGHTS = (EXPERTS, *STANDARD, carry("model.layers.61.{path}"))


@register_config("kimi_k2")
class KimiK2Config(DeepseekV3Config):
    """Kimi-K2 is DeepSeek-V3 by another name, which `transformers` does not know."""

    model_type = "kimi_k2"


class KimiK2Model(DeepseekV3Model):
    """The body of Kimi-K2."""

    config_class = KimiK2Config


@register_module(TaskType.CAUSAL_LM, config=KimiK2Config, model_type="kimi_k2")
class KimiK2ForCausalLM(DeepseekV3ForCausalLM):
    """Kimi-K2 with a language-model head."""

    body_class = KimiK2Model
    architecture = "DeepseekV3ForCausalLM"
