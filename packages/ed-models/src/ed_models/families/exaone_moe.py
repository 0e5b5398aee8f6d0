"""K-EXAONE (LG AI Research 2026): EXAONE 4 with norms before each part, and experts.

- query and key heads are RMS-normed
- only layers that see a window have rotary positions
- scores of experts are sigmoids; a bias that training moves without a gradient joins in the choice
- `mlp_layer_types` selects the dense layers

Numbers follow Hugging Face's `modeling_exaone_moe.py`; parameter names are its names. Layers that
predict further tokens are not loaded.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.experts import sigmoid_experts
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, carry, renamed


@register_config("exaone_moe")
class ExaoneMoeConfig(EasyDeLBaseConfig, transformers.ExaoneMoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "exaone_moe"
    attribute_map = {
        **transformers.ExaoneMoeConfig.attribute_map,
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
    }


class ExaoneMoeDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: ExaoneMoeConfig = parts.config
        window = get_layer_window(config, index)
        attention = SelfAttention(
            parts,
            norm=QKNorm(parts.norm),
            position=None if window is None else Rotary(),
            mask=MaskRule(window=window),
        )
        sparse = config.mlp_layer_types[index] == "sparse"
        super().__init__(
            parts, self_attn=attention, mlp=sigmoid_experts(parts) if sparse else GatedMLP(parts)
        )


class ExaoneMoeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = ExaoneMoeConfig
    layer_class = ExaoneMoeDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(zip(config.layer_types, config.mlp_layer_types, strict=True))


@register_module(TaskType.CAUSAL_LM, config=ExaoneMoeConfig, model_type="exaone_moe")
class ExaoneMoeForCausalLM(CausalLM):
    """K-EXAONE with a language-model head."""

    body_class = ExaoneMoeModel
    WEIGHTS = (
        *renamed({"gate.e_score_correction_bias": "e_score_correction_bias"}, EXPERTS, *STANDARD),
        carry("mtp.{path}"),
    )
