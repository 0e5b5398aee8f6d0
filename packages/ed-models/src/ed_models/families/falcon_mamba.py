"""Falcon Mamba (TII 2024): Mamba whose step sizes, inputs and outputs of the state are normed.

- dt, B and C are RMS-normed, without weights

Numbers follow Hugging Face's `modeling_falcon_mamba.py`; parameter names are its names. The
biases of the step sizes are initialized from their fields of the configuration, and matrices from a
normal distribution with `initializer_range`.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts

from ed_models.body.layers import MixerLayer
from ed_models.body.mamba import MixerDecoder, mamba_mixer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import BACKBONE, MAMBA, renamed


@register_config("falcon_mamba")
class FalconMambaConfig(EasyDeLBaseConfig, transformers.FalconMambaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "falcon_mamba"


class FalconMambaBlock(MixerLayer):
    """A mixer, normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: FalconMambaConfig = parts.config
        mixer = mamba_mixer(parts, norm=partial(parts.norm, eps=config.mixer_rms_eps, weight=False))
        super().__init__(parts, mixer=mixer)


class FalconMambaModel(MixerDecoder):
    """Embedding, mixers, final norm."""

    config_class = FalconMambaConfig
    layer_class = FalconMambaBlock


@register_module(TaskType.CAUSAL_LM, config=FalconMambaConfig, model_type="falcon_mamba")
class FalconMambaForCausalLM(CausalLM):
    """Falcon Mamba with a language-model head."""

    body_class = FalconMambaModel
    WEIGHTS = renamed(BACKBONE, *MAMBA)
