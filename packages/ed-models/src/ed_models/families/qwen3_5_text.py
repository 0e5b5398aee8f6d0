"""Qwen3.5, text (Qwen Team 2026): the layers of Qwen3-Next without experts.

- three layers of the gated delta rule, then one of attention with a gate on its outputs
- the projections of the delta rule are separate tensors in the checkpoint
- norms store `weight - 1`; a quarter of each attention head turns, in sections of time, height and
  width where positions have these axes

Numbers follow Hugging Face's `modeling_qwen3_5.py`; parameter names are its names. Layers that
predict further tokens are not loaded.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.gated_delta import SPLIT_DELTA, GatedHybrid, GatedHybridLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("qwen3_5_text")
class Qwen3_5TextConfig(EasyDeLBaseConfig, transformers.Qwen3_5TextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_5_text"


class Qwen3_5DecoderLayer(GatedHybridLayer):
    """The delta rule or attention, then a feed-forward layer."""

    def __init__(self, parts: Parts, index: int):
        super().__init__(parts, index, GatedMLP(parts))


class Qwen3_5TextModel(GatedHybrid):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen3_5TextConfig
    layer_class = Qwen3_5DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Qwen3_5TextConfig, model_type="qwen3_5_text")
class Qwen3_5ForCausalLM(CausalLM):
    """Qwen3.5 with a language-model head."""

    body_class = Qwen3_5TextModel
    WEIGHTS = SPLIT_DELTA
