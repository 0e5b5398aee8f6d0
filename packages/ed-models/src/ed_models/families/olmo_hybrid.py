"""OLMo Hybrid (Ai2 2026): three layers of the gated delta rule, then one of OLMo 3's attention.

- layers of the delta rule are normed before, those of attention after
- beta reaches 2, so that a state may change its sign
- queries and keys of attention are RMS-normed, over all heads together
- nothing turns where `rope_parameters` has no `rope_theta`

Numbers follow Hugging Face's `modeling_olmo_hybrid.py`; parameter names are its names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts
from flax import nnx

from ed_models.body.decoder import Decoder
from ed_models.body.gated_delta import delta_mixer
from ed_models.body.layers import DecoderLayer, PostNormLayer
from ed_models.checkpoints.tensor_files import Computed, Index, TensorFiles
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.blocks import Shape
from ed_models.weights.rules import STANDARD, renamed


@register_config("olmo_hybrid")
class OlmoHybridConfig(EasyDeLBaseConfig, transformers.OlmoHybridConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "olmo_hybrid"


def turns(config: OlmoHybridConfig) -> bool:
    """Whether attention knows positions."""
    return (config.rope_parameters or {}).get("rope_theta") is not None


def _layer(parts: Parts, index: int) -> nnx.Module:
    """A layer of either kind."""
    config = parts.config
    if config.layer_types[index] == "linear_attention":
        mixer = delta_mixer(
            parts,
            beta_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
            eps=1e-5,
            rates=(config.linear_a_log_min, config.linear_a_log_max),
            steps=(config.linear_dt_min, config.linear_dt_max),
        )
        return DecoderLayer(parts, self_attn=mixer, mlp=GatedMLP(parts), name="linear_attn")
    attention = SelfAttention(
        parts,
        bias=config.attention_bias,
        norm=QKNorm(parts.norm, heads="all"),
        position=Rotary() if turns(config) else None,
    )
    return PostNormLayer(parts, self_attn=attention, mlp=GatedMLP(parts))


class OlmoHybridModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = OlmoHybridConfig
    layer_class = staticmethod(_layer)

    def rope_settings(self):
        return super().rope_settings() if turns(self.config) else {}


def joined_convolutions(files: TensorFiles, shapes: Mapping[str, Shape]) -> TensorFiles:
    """Cut the convolutions of queries, keys and values again where transformers wrote them.

    transformers joins the three tensors when it loads a model. It cuts the joined tensor into three
    equal parts when it saves the model (`Chunk` in its `core_model_loading`). Where values are not
    as wide as keys, the equal parts are not the three convolutions.
    """

    def read(names: list[str], rows: slice, index: Index) -> np.ndarray:
        return np.concatenate([files.read(name) for name in names])[rows][index]

    computed: dict[str, Computed] = {}
    for first in (name for name in shapes if name.endswith(".q_conv1d.weight")):
        stem = first.removesuffix("q_conv1d.weight")
        names = [f"{stem}{letter}_conv1d.weight" for letter in "qkv"]
        if not all(name in files and name in shapes for name in names):
            continue
        sizes = [files[name].shape[0] for name in names]
        ends = np.cumsum([shapes[name][0] for name in names]).tolist()
        part = -(-ends[-1] // 3)
        if sizes != [part, part, ends[-1] - 2 * part]:
            continue
        for name, start, stop in zip(names, [0, *ends], ends, strict=False):
            shape = (stop - start, *files[name].shape[1:])
            entry = replace(files[name], shape=shape)
            computed[name] = Computed(entry, partial(read, names, slice(start, stop)))
    return files.add_tensors(computed) if computed else files


@register_module(TaskType.CAUSAL_LM, config=OlmoHybridConfig, model_type="olmo_hybrid")
class OlmoHybridForCausalLM(CausalLM):
    """OLMo Hybrid with a language-model head."""

    body_class = OlmoHybridModel
    # transformers writes these names in layers of both kinds, and reads the others too.
    OTHER_NAMES = {
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
    }
    WEIGHTS = renamed(OTHER_NAMES, *STANDARD)
    as_published = staticmethod(joined_convolutions)
