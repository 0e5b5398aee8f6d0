"""Mamba (Gu & Dao 2023): a state space for each channel, and no attention.

- a layer is one mixer: a short convolution, the recurrence, a gate
- the stream is float32 if `residual_in_fp32` is set

Numbers follow Hugging Face's `modeling_mamba.py`; parameter names are its names. The
biases of the step sizes are initialized from their fields of the configuration, and matrices from a
normal distribution with `initializer_range`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts

from ed_models.body.layers import MixerLayer
from ed_models.body.mamba import MixerDecoder, mamba_mixer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import BACKBONE, MAMBA, renamed


@register_config("mamba")
class MambaConfig(EasyDeLBaseConfig, transformers.MambaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "mamba"


class MambaBlock(MixerLayer):
    """A mixer, normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        super().__init__(parts, mixer=mamba_mixer(parts))


class MambaModel(MixerDecoder):
    """Embedding, mixers, final norm."""

    config_class = MambaConfig
    layer_class = MambaBlock


@register_module(TaskType.CAUSAL_LM, config=MambaConfig, model_type="mamba")
class MambaForCausalLM(CausalLM):
    """Mamba with a language-model head."""

    body_class = MambaModel
    WEIGHTS = renamed(BACKBONE, *MAMBA)
