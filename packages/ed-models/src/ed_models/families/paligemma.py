"""PaliGemma (Beyer et al. 2024) and PaliGemma 2: a SigLIP vision tower, a linear projector, and
Gemma or Gemma 2.

- all tokens of a prompt attend to each other in both directions; generated tokens attend to earlier
  ones
- in layers with a window, a token attends to the last `window` tokens also within a prompt;
  `transformers` ignores the window there, which changes prompts longer than the window

The numbers follow Hugging Face's `modeling_paligemma.py`.

Legend: t images, n patches of an image, v and d hidden size of the tower and of the text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.tiles import TILED_MODULES, TILED_NAMES, TILED_WEIGHTS, TiledImageTextModel
from ed_models.modalities.images import TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


@register_config("paligemma")
class PaliGemmaConfig(EasyDeLBaseConfig, transformers.PaliGemmaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "paligemma"


class PaliGemmaProjector(nnx.Module):
    """A linear layer from the tower to the decoder."""

    def __init__(self, parts: Parts):
        config: PaliGemmaConfig = parts.config
        sizes = config.vision_config.hidden_size, config.text_config.hidden_size
        self.linear = parts.linear(*sizes, axes=(None, "embed"), bias=True)

    def __call__(self, x: Float[Array, "t n v"]) -> Float[Array, "t n d"]:
        return self.linear(x)


class PaliGemmaModel(TiledImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = PaliGemmaConfig
    projector_class = PaliGemmaProjector

    @staticmethod
    def decoder_config(config: EasyDeLBaseConfig) -> Any:
        # `transformers` marks the decoder as bidirectional, although only prompts are.
        return config.text_config.replace(use_bidirectional_attention=False)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=PaliGemmaConfig, model_type="paligemma")
class PaliGemmaForConditionalGeneration(ConditionalLM):
    """PaliGemma with a language-model head."""

    body_class = PaliGemmaModel
    modality = TILES
    reads_ahead = "prompt"
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = TILED_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = TILED_WEIGHTS

    def head(self):
        soft_cap = getattr(self.config.text_config, "final_logit_softcapping", None)
        return replace(super().head(), soft_cap=soft_cap)
