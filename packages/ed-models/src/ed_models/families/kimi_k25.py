"""Kimi K2.5 (Moonshot AI 2026): the vision tower MoonViT, a projector, and DeepSeek-V3.

- images keep their size: attention connects the patches of one image
- patches have learned positions, resized to the image, in addition to row and column
- text has the positions of texts

Numbers follow Hugging Face's `modeling_kimi_k25.py`, without videos. Names are those of the
published checkpoints.

Legend: b rows, p patches of a row, d hidden, m patches along the side of a block, n = p / m²,
e features, k head dimension.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_infra.rope.rotation import angles
from ed_layers.activations import activation
from ed_layers.attention.blocks.settings import Rotary
from ed_layers.context import ALL_LAYERS, Ctx
from ed_layers.mlp import MLP
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config as _Config
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig as _Vision

from ed_models.adapters.peft_layout import Modules
from ed_models.body.context import layer_context
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.packed_images import PatchForm
from ed_models.body.patch_grids import PatchPlaces
from ed_models.body.patch_tower import PatchLayer, PatchTower
from ed_models.body.patch_weights import TOWER
from ed_models.body.vision import tower_rules
from ed_models.modalities.images import RASTER_PATCHES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import (
    EXPERTS,
    NESTED_TIED,
    STANDARD,
    Rule,
    carry,
    equal,
    fused,
    permute,
    renamed,
)

#: Our names of parts of the tower -> those of checkpoints.
_NAMES = {
    "patch_embed": "patch_embed.proj",
    "pos_embed": "patch_embed.pos_emb.weight",
    "merger.final_norm": "encoder.final_layernorm",
    "blocks": "encoder.blocks",
    "input_layernorm": "norm0",
    "post_attention_layernorm": "norm1",
    "self_attn.o_proj": "wo",
    "mlp.up_proj": "mlp.fc0",
    "mlp.down_proj": "mlp.fc1",
}
_RULES = (
    Rule("patch_embed.kernel", "patch_embed.weight", permute(1, 2, 3, 0)),
    Rule("merger.final_norm.{name}", "merger.final_norm.{name}", equal),
    *fused(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "wqkv"),
)
PROJECTOR = {"norm": "pre_norm", "linear_1": "proj.0", "linear_2": "proj.2"}
#: Names that transformers 5.23 writes -> names of published checkpoints.
_OTHER_NAMES = {
    "language_model.model.blocks": "language_model.model.layers",
    "vision_tower.encoder.patch_embed": "vision_tower.patch_embed",
    "model.mm_projector": "mm_projector",
}
#: Names of checkpoints -> names of the modules of transformers 5.
_MODULES = Modules(
    {
        "language_model.lm_head": "lm_head",
        "language_model.model": "model.language_model",
        "vision_tower.encoder.blocks.{i}.mlp.fc0": "model.vision_tower.layers.{i}.mlp.fc1",
        "vision_tower.encoder.blocks.{i}.mlp.fc1": "model.vision_tower.layers.{i}.mlp.fc2",
        "vision_tower.encoder.blocks.{i}.wo": "model.vision_tower.layers.{i}.attn.proj",
        "vision_tower.encoder.blocks": "model.vision_tower.layers",
        "vision_tower": "model.vision_tower",
        "mm_projector.proj.0": "model.mm_projector.in_proj",
        "mm_projector.proj.2": "model.mm_projector.out_proj",
        "mm_projector": "model.mm_projector",
    },
    separate={"wqkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj")},
    halves=("attn.q_proj", "attn.k_proj"),
    halved_heads=lambda config: config.vision_config.num_attention_heads,
)
_STORED = {"model.language_model": "language_model.model", "lm_head": "language_model.lm_head"}


class KimiK25VisionConfig(EasyDeLBaseConfig, _Vision):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "kimi_k25_vision"

    @property
    def num_channels(self) -> int:
        """Channels of an image."""
        return 3

    @property
    def spatial_merge_size(self) -> int:
        """Patches along the side of a block, m."""
        height, width = self.merge_kernel_size
        if height != width:
            raise ConfigError(
                f"merge_kernel_size={self.merge_kernel_size} is not supported: blocks of patches "
                "are squares"
            )
        return height


@register_config("kimi_k25")
class KimiK25Config(EasyDeLBaseConfig, _Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "kimi_k25"
    nested_configs = {"vision_config": KimiK25VisionConfig}


def kimi_layer(parts: Parts, index: int) -> PatchLayer:
    """Create a layer of the tower."""
    return PatchLayer(parts, mlp=MLP(parts), position=Rotary(interleaved=True))


class KimiMerger(nnx.Module):
    """The norm of the last layer, a norm, and two linear layers from the patches of a block to one
    feature."""

    def __init__(self, parts: Parts, features: int, *, eps: float):
        config: KimiK25VisionConfig = parts.config
        d, self.size = config.hidden_size, config.spatial_merge_size**2
        self.final_norm, self.norm = parts.own_norm(d), parts.layer_norm(d, eps=eps)
        inner = d * self.size
        self.linear_1 = parts.linear(inner, inner, axes=(None, "embed"), bias=True)
        self.linear_2 = parts.linear(inner, features, axes=("embed", None), bias=True)

    def __call__(self, x: Float[Array, "b p d"]) -> Float[Array, "b n e"]:
        b, p, d = x.shape
        x = self.norm(self.final_norm(x)).reshape(b, p // self.size, d * self.size)
        return self.linear_2(activation("gelu")(self.linear_1(x)))


class KimiTower(PatchTower):
    """MoonViT: even pairs of a head rotate by the column of a patch, odd ones by the row."""

    def __init__(self, parts: Parts, features: int, *, eps: float):
        config: KimiK25VisionConfig = parts.config
        side = config.pos_emb_height
        if config.pos_emb_width != side:
            raise ConfigError(
                f"pos_emb_height={side} and pos_emb_width={config.pos_emb_width} are not "
                "supported: the table of positions is a square"
            )
        super().__init__(
            replace(parts, norm_of_family=partial(parts.layer_norm, eps=1e-5)),
            kimi_layer,
            depth=config.num_hidden_layers,
            features=features,
            bias=True,
            positions=side,
            cubic=True,
            merger=partial(KimiMerger, eps=eps),
        )

    @staticmethod
    def position_table(parts: Parts, side: int):
        d = parts.config.hidden_size
        return parts.table(side, side, d, axes=(None, None, "embed"))

    def context(self, places: PatchPlaces) -> Ctx:
        config = self.config
        half = config.hidden_size // config.num_attention_heads // 2
        base = float(config.rope_parameters["rope_theta"])
        frequencies = (1 / base ** (np.arange(0, half, 2) / half)).astype(np.float32)
        rows, columns = (angles(at, frequencies) for at in places.position_ids)
        cos, sin = (
            jnp.stack(pair, axis=-1).reshape(*places.frames.shape, half)
            for pair in zip(columns, rows, strict=True)
        )
        shape = places.frames.shape[0], places.frames.shape[1]
        ctx, _ = layer_context(config, shape, segment_ids=places.frames, ropes={})
        return replace(ctx, rope={ALL_LAYERS: (cos, sin)})


class KimiK25Model(PatchedImageTextModel):
    """Vision tower with its projector, and decoder."""

    config_class = KimiK25Config

    def tower(self, parts: Parts) -> PatchTower:
        config = self.config
        d = config.vision_config.hidden_size
        if config.projection_hidden_size != d:
            raise ConfigError(
                f"projection_hidden_size={config.projection_hidden_size} must be the hidden_size "
                f"of vision_config, {d}"
            )
        eps = config.projection_layer_norm_eps
        return KimiTower(parts, config.text_config.hidden_size, eps=eps)

    @property
    def patch_form(self) -> PatchForm:
        """The patches that the tower reads."""
        vision = self.config.vision_config
        return PatchForm(vision.patch_size, vision.num_channels, vision.spatial_merge_size)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=KimiK25Config, model_type="kimi_k25")
class KimiK25ForConditionalGeneration(ConditionalLM):
    """Kimi K2.5 with a language-model head."""

    body_class = KimiK25Model
    architecture = "Kimi_K25ForConditionalGeneration"
    modality = RASTER_PATCHES
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = _OTHER_NAMES
    MODULES = _MODULES
    WEIGHTS = (
        *tower_rules(TOWER, "vision_tower", _NAMES, _RULES),
        *tower_rules(f"{TOWER}.merger", "mm_projector", PROJECTOR, STANDARD),
        *tower_rules(TOWER, "vision_tower", _NAMES, STANDARD),
        *renamed(_STORED, EXPERTS, *STANDARD),
        *(carry(f"{part}model.layers.61.{{path}}") for part in ("", "language_model.")),
    )
