"""dots.llm1 (rednote 2025): the experts of DeepSeek-V3, with plain attention.

- query and key heads are RMS-normed; with a window, only layers from `max_window_layers` on see it
- scores of experts are sigmoids; a bias that training moves without a gradient joins in the choice
- experts are chosen from the best groups; weights add up to `routed_scaling_factor`
- the first `first_k_dense_replace` layers are dense

Numbers follow Hugging Face's `modeling_dots1.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.experts import sigmoid_experts
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD


@register_config("dots1")
class Dots1Config(EasyDeLBaseConfig, transformers.Dots1Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "dots1"


class Dots1DecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Dots1Config = parts.config
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            norm=QKNorm(parts.norm),
            mask=MaskRule(window=get_layer_window(config, index)),
        )
        sparse = index >= config.first_k_dense_replace
        super().__init__(
            parts, self_attn=attention, mlp=sigmoid_experts(parts) if sparse else GatedMLP(parts)
        )


class Dots1Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Dots1Config
    layer_class = Dots1DecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [(i >= config.first_k_dense_replace, t) for i, t in enumerate(config.layer_types)]


@register_module(TaskType.CAUSAL_LM, config=Dots1Config, model_type="dots1")
class Dots1ForCausalLM(CausalLM):
    """dots.llm1 with a language-model head."""

    body_class = Dots1Model
    WEIGHTS = (EXPERTS, *STANDARD)
