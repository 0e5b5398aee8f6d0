"""Mamba-2 (Dao & Gu 2024): a state space for each head, and no attention.

- a layer is one mixer: short convolutions, the recurrence, a norm with a gate
- heads of a group share B and C, and are normed together
- the stream is float32 if `residual_in_fp32` is set

Numbers follow Hugging Face's `modeling_mamba2.py`; parameter names are its names. The
biases of the step sizes are initialized from their fields of the configuration, and matrices from a
normal distribution with `initializer_range`. `chunk_size` does not change the numbers:
`ed_layers.recurrence.mamba2` chooses its own chunks.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from ed_layers.recurrence.mamba2 import Mamba2Mixer

from ed_models.body.layers import MixerLayer
from ed_models.body.mamba import MixerDecoder
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import BACKBONE, MAMBA2, renamed


@register_config("mamba2")
class Mamba2Config(EasyDeLBaseConfig, transformers.Mamba2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "mamba2"


class Mamba2Block(MixerLayer):
    """A mixer, normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Mamba2Config = parts.config
        mixer = Mamba2Mixer(
            parts,
            heads=config.num_heads,
            head_dim=config.head_dim,
            states=config.state_size,
            groups=config.n_groups,
            taps=config.conv_kernel,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            norm_eps=config.layer_norm_epsilon,
            dt_limits=config.time_step_limit,
            time_step=(config.time_step_min, config.time_step_max, config.time_step_floor),
        )
        super().__init__(parts, mixer=mixer)


class Mamba2Model(MixerDecoder):
    """Embedding, mixers, final norm."""

    config_class = Mamba2Config
    layer_class = Mamba2Block


@register_module(TaskType.CAUSAL_LM, config=Mamba2Config, model_type="mamba2")
class Mamba2ForCausalLM(CausalLM):
    """Mamba-2 with a language-model head."""

    body_class = Mamba2Model
    WEIGHTS = renamed(BACKBONE, *MAMBA2)
