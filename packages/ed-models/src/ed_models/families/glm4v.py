"""GLM-4V (Zhipu 2025, GLM-4.1V): a vision tower over packed patches, and GLM-4 with M-RoPE.

- patches have learned positions, resized to the image, in addition to row and column
- a block of patches becomes one feature by a convolution, and a gated layer follows
- the language model has norms before and after attention and feed-forward

Numbers follow Hugging Face's `modeling_glm4v.py`; parameter names are its names.

Legend: b rows, p patches of a row, d hidden, m patches along the side of a block, n = p / m²,
e features.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.activations import activation
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float
from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig as _Text
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig as _Vision

from ed_models.body.decoder import Decoder
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.layers import SandwichLayer
from ed_models.body.patch_tower import PatchLayer, PatchTower
from ed_models.body.patch_weights import NESTED, TOWER, patch_weights
from ed_models.modalities.images import PATCHES
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, STANDARD, Rule, fused, permute, renamed

#: Rules of the language model.
_TEXT_WEIGHTS = renamed(
    {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    *fused(("gate_proj", "up_proj"), "gate_up_proj"),
    *STANDARD,
)
#: Our names of parts of the tower -> those of checkpoints.
_NAMES = {
    "patch_norm": "post_conv_layernorm",
    "pos_embed": "embeddings.position_embedding.weight",
    "merger.norm": "post_layernorm",
    "merger.downsample": "downsample",
}


class Glm4vVisionConfig(EasyDeLBaseConfig, _Vision):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4v_vision"


@register_config("glm4v_text")
class Glm4vTextConfig(EasyDeLBaseConfig, _Text):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4v_text"


@register_config("glm4v")
class Glm4vConfig(EasyDeLBaseConfig, transformers.Glm4vConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4v"
    nested_configs = {"vision_config": Glm4vVisionConfig}


class Glm4vTextDecoderLayer(SandwichLayer):
    """Attention and feed-forward, each normed before and after."""

    def __init__(self, parts: Parts, index: int):
        attention = SelfAttention(
            parts, bias=True, out_bias=False, position=Rotary(interleaved=True)
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Glm4vTextModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Glm4vTextConfig
    layer_class = Glm4vTextDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Glm4vTextConfig, model_type="glm4v_text")
class Glm4vTextForCausalLM(CausalLM):
    """The language model of GLM-4V."""

    body_class = Glm4vTextModel
    WEIGHTS = _TEXT_WEIGHTS


class Glm4vVisionBlock(PatchLayer):
    """Attention and a gated feed-forward layer, each normed before."""

    def __init__(self, parts: Parts, index: int):
        config: Glm4vVisionConfig = parts.config
        mlp = GatedMLP(parts, config.out_hidden_size, bias=False)
        super().__init__(parts, mlp=mlp, bias=config.attention_bias, out_bias=False)


class Glm4vMerger(nnx.Module):
    """A norm, a convolution from the patches of a block to one feature, and a gated layer."""

    def __init__(self, parts: Parts, features: int):
        config: Glm4vVisionConfig = parts.config
        self.norm = parts.own_norm(config.hidden_size)
        self.downsample = Downsample(parts, features)
        self.proj = parts.linear(features, features, axes=(None, "embed"))
        self.post_projection_norm = parts.layer_norm(features, eps=1e-5)
        self.gate_proj = parts.linear(features, config.intermediate_size, axes=("embed", "mlp"))
        self.up_proj = parts.linear(features, config.intermediate_size, axes=("embed", "mlp"))
        self.down_proj = parts.linear(config.intermediate_size, features, axes=("mlp", "embed"))
        self.act = config.hidden_act

    def __call__(self, x: Float[Array, "b p d"]) -> Float[Array, "b n e"]:
        x = self.proj(self.downsample(self.norm(x)))
        x = activation("gelu")(self.post_projection_norm(x))
        return self.down_proj(activation(self.act)(self.gate_proj(x)) * self.up_proj(x))


class Downsample(nnx.Module):
    """A convolution whose stride is its size, over the patches of a block."""

    def __init__(self, parts: Parts, features: int):
        config: Glm4vVisionConfig = parts.config
        side, self.precision = config.spatial_merge_size, parts.precision
        shape = side, side, config.hidden_size, features
        kernel = parts.initializer(parts.rngs.params(), shape, parts.param_dtype)
        self.kernel = nnx.Param(kernel, axes=(None, None, None, "embed"))
        self.bias = nnx.Param(jnp.zeros(features, parts.param_dtype), axes=("embed",))

    def __call__(self, x: Float[Array, "b p d"]) -> Float[Array, "b n e"]:
        kernel, bias = (value.get_value().astype(x.dtype) for value in (self.kernel, self.bias))
        kernel = kernel.reshape(-1, kernel.shape[-1])
        blocks = x.reshape(x.shape[0], -1, kernel.shape[0])
        return jnp.matmul(blocks, kernel, precision=self.precision) + bias


class Glm4vModel(PatchedImageTextModel):
    """Vision tower and decoder."""

    config_class = Glm4vConfig

    def tower(self, parts: Parts) -> PatchTower:
        config: Glm4vVisionConfig = parts.config
        return PatchTower(
            replace(parts, norm_of_family=partial(parts.norm, eps=config.rms_norm_eps)),
            Glm4vVisionBlock,
            depth=config.depth,
            features=config.out_hidden_size,
            bias=True,
            positions=config.image_size // config.patch_size,
            cubic=True,
            normed=True,
            merger=Glm4vMerger,
        )


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Glm4vConfig, model_type="glm4v")
class Glm4vForConditionalGeneration(ConditionalLM):
    """GLM-4V with a language-model head."""

    body_class = Glm4vModel
    modality = PATCHES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = (
        Rule(
            f"{TOWER}.merger.downsample.kernel", f"{TOWER}.downsample.weight", permute(2, 3, 1, 0)
        ),
        *patch_weights(_NAMES, text=_TEXT_WEIGHTS, stored=NESTED),
    )
