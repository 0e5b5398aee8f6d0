"""Gemma 4 (Gemma Team 2026): a vision tower for images of any size, and the text model of
`gemma4_text`.

- attention connects the patches of one image; half of a head rotates by column, half by row
- rows and columns have learned positions; queries, keys and values are normed
- squares of patches are averaged, and projected to one feature
- linear layers of small models clip their inputs and outputs (`use_clipped_linears`)
- the tokens of an image attend to each other in layers with a window
  (`use_bidirectional_attention: vision`)

Numbers follow Hugging Face's `modeling_gemma4.py`, without videos and recordings.

Legend: b rows, p patches of a row, f numbers of a patch, d hidden, m patches along the side of a
square, n = p / m², e features, h heads, k head dimension.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger, once
from ed_infra.registry import register_config, register_module
from ed_infra.rope.rotation import angles
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm, ScoreRule
from ed_layers.context import Ctx
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts
from ed_layers.projections.linear import Linear
from ed_layers.rotary import apply_rotary
from flax import nnx
from jaxtyping import Array, Float
from transformers.models.gemma4.configuration_gemma4 import Gemma4Config as _Config
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig as _Vision

from ed_models.body.context import layer_context
from ed_models.body.gemma4_weights import GEMMA4_TEXT
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.layers import SandwichLayer
from ed_models.body.packed_images import PatchForm
from ed_models.body.patch_grids import PatchPlaces
from ed_models.body.patch_tower import PatchTower
from ed_models.body.patch_weights import TOWER
from ed_models.body.vision import tower_rules
from ed_models.modalities.images import PLACES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, STANDARD, Rule, carry, transpose

logger = get_logger(__name__)

#: Our names of parts of the tower -> those of checkpoints.
_NAMES = {
    "patch_embed": "patch_embedder.input_proj",
    "pos_embed": "patch_embedder.position_embedding_table",
    "blocks": "encoder.layers",
    "merger": "",
}
#: Most features of an image: the largest `max_soft_tokens` of the image processor.
_MOST_FEATURES = 1120
PROJECTION = Rule(
    f"{TOWER}.merger.embedding_projection.kernel",
    "model.embed_vision.embedding_projection.weight",
    transpose,
)
BOUNDS = {"input_min": -np.inf, "input_max": np.inf, "output_min": -np.inf, "output_max": np.inf}


class Gemma4VisionConfig(EasyDeLBaseConfig, _Vision):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gemma4_vision"

    @property
    def num_channels(self) -> int:
        """Channels of an image."""
        return 3

    @property
    def spatial_merge_size(self) -> int:
        """Patches along the side of a square, m."""
        return self.pooling_kernel_size


@register_config("gemma4")
class Gemma4Config(EasyDeLBaseConfig, _Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    Recordings are not supported: `audio_config` becomes None, and its tower is not read.
    """

    model_type = "gemma4"
    audio_config: Any = None  # no tower reads it
    nested_configs = {"vision_config": Gemma4VisionConfig}

    def __post_init__(self, **kwargs: object):
        if self.audio_config is not None:
            message = "gemma4 reads images and text: the audio tower of the checkpoint is not read"
            once(logger, message)
            self.audio_config = None
        super().__post_init__(**kwargs)


class Gemma4ClippableLinear(nnx.Module):
    """A linear layer whose inputs and outputs may be clipped to constants of the checkpoint."""

    def __init__(self, linear: Linear, *, clips: bool):
        self.linear, self.clips = linear, clips
        for name, bound in BOUNDS.items() if clips else ():
            setattr(self, name, nnx.Variable(jnp.asarray(bound, linear.kernel.dtype), axes=()))

    def clip_values(self, x: Float[Array, "b p _"], part: str) -> Float[Array, "b p _"]:
        """Return x between the bounds of a part: `input` or `output`."""
        if not self.clips:
            return x
        low, high = (getattr(self, f"{part}_{end}").get_value() for end in ("min", "max"))
        return jnp.minimum(jnp.maximum(x, low.astype(x.dtype)), high.astype(x.dtype))

    def __call__(self, x: Float[Array, "b p _"], ctx: Ctx) -> Float[Array, "b p _"]:
        return self.clip_values(self.linear(self.clip_values(x, "input"), ctx), "output")


class Gemma4VisionAttention(SelfAttention):
    """Normed values, and heads whose halves have rotary positions by column and by row."""

    def __init__(self, parts: Parts):
        super().__init__(
            parts,
            norm=QKNorm(parts.own_norm),
            position=None,
            mask=MaskRule(causal=False),
            scores=ScoreRule(scale=1.0),
        )
        self.v_norm = parts.norm(self.head_dim, weight=False)

    def project_qkv(self, x, ctx):
        q, k, v = super().project_qkv(x, ctx)
        return q, k, self.v_norm(v)

    def compute_qkv(self, x, ctx):
        q, k, v = self.project_qkv(x, ctx)

        def rotate_heads(heads: Float[Array, "b p h k"]) -> Float[Array, "b p h k"]:
            halves = zip(jnp.split(heads, 2, axis=-1), ("column", "row"), strict=True)
            turns = [apply_rotary(half, ctx.rope[axis]) for half, axis in halves]
            return jnp.concatenate(turns, axis=-1)

        return rotate_heads(q), rotate_heads(k), v


class Gemma4VisionLayer(SandwichLayer):
    """Attention and feed-forward, each normed before and after."""

    def __init__(self, parts: Parts, index: int):
        config: Gemma4VisionConfig = parts.config
        attention, act = Gemma4VisionAttention(parts), config.hidden_activation
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts, hidden_act=act))
        for part in (self.self_attn, self.mlp):
            for name, linear in list(vars(part).items()):
                if isinstance(linear, Linear):
                    clips = config.use_clipped_linears
                    setattr(part, name, Gemma4ClippableLinear(linear, clips=clips))


class Gemma4Pooler(nnx.Module):
    """Averages squares of patches, and projects the scaled and normed averages."""

    def __init__(self, parts: Parts, features: int):
        config: Gemma4VisionConfig = parts.config
        d, self.size = config.hidden_size, config.spatial_merge_size**2
        self.standardize = config.standardize
        if config.standardize:
            self.std_bias = nnx.Variable(jnp.zeros((d,), parts.param_dtype), axes=("norm",))
            self.std_scale = nnx.Variable(jnp.ones((d,), parts.param_dtype), axes=("norm",))
        self.norm = parts.norm(d, weight=False)
        self.embedding_projection = parts.linear(d, features, axes=(None, "embed"))

    def __call__(self, x: Float[Array, "b p d"]) -> Float[Array, "b n e"]:
        b, p, d = x.shape
        squares = x.reshape(b, p // self.size, self.size, d).astype(jnp.float32)
        mean = jnp.mean(squares, axis=2).astype(x.dtype)
        mean = mean.astype(jnp.float32) * d**0.5
        if self.standardize:
            bias, scale = self.std_bias.get_value(), self.std_scale.get_value()
            mean = (mean - bias.astype(mean.dtype)) * scale.astype(mean.dtype)
        return self.embedding_projection(self.norm(mean.astype(x.dtype)))


class Gemma4VisionTower(PatchTower):
    """Learned positions of rows and of columns, layers, and averages of squares."""

    def __init__(self, parts: Parts, features: int):
        config: Gemma4VisionConfig = parts.config
        super().__init__(
            replace(parts, norm_of_family=partial(parts.norm, scale_first=True)),
            Gemma4VisionLayer,
            depth=config.num_hidden_layers,
            features=features,
            flat=True,
            positions=config.position_embedding_size,
            merger=Gemma4Pooler,
        )

    @staticmethod
    def position_table(parts: Parts, side: int):
        return parts.table(2, side, parts.config.hidden_size, axes=(None, None, "embed"))

    def __call__(self, patches, grids):
        return super().__call__(2 * (patches - 0.5), grids)

    def learned_positions(self, places: PatchPlaces) -> Float[Array, "b p d"]:
        column_table, row_table = self.pos_embed.get_value()
        row, column = places.position_ids
        return column_table[column] + row_table[row]

    def context(self, places: PatchPlaces) -> Ctx:
        config, half = self.config, self.config.head_dim // 2
        base = float(config.rope_parameters["rope_theta"])
        frequencies = (1 / base ** (np.arange(0, half, 2) / half)).astype(np.float32)
        row, column = (angles(at, frequencies) for at in places.position_ids)
        shape = places.frames.shape[0], places.frames.shape[1]
        ctx, _ = layer_context(config, shape, segment_ids=places.frames, ropes={})
        return replace(ctx, rope={"row": row, "column": column})


class Gemma4Model(PatchedImageTextModel):
    """Vision tower with its projection, and decoder."""

    config_class = Gemma4Config

    def tower(self, parts: Parts) -> PatchTower:
        config = self.config
        if config.vision_config is None:
            raise ConfigError(
                "the gemma4 configuration has no vision_config, so the model reads text only: load "
                "the checkpoint with AutoEasyDeLModelForCausalLM"
            )
        return Gemma4VisionTower(parts, config.text_config.hidden_size)

    def __call__(self, input_ids=None, *, features=None, **inputs):
        # In the place of features, the text model looks up the input of each layer for padding.
        if features is not None and input_ids is not None:
            padding = self.config.text_config.pad_token_id or 0
            input_ids = jnp.where(features.index < 0, input_ids, padding)
        return super().__call__(input_ids, features=features, **inputs)

    @property
    def patch_form(self) -> PatchForm:
        """The patches that the tower reads."""
        vision = self.config.vision_config
        merge = vision.spatial_merge_size
        return PatchForm(vision.patch_size, vision.num_channels, merge, most=_MOST_FEATURES)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Gemma4Config, model_type="gemma4")
class Gemma4ForConditionalGeneration(ConditionalLM):
    """Gemma 4 with a language-model head."""

    body_class = Gemma4Model
    modality = PLACES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = (
        PROJECTION,
        *tower_rules(TOWER, "model.vision_tower", _NAMES, STANDARD),
        *GEMMA4_TEXT,
        *(carry(f"model.{part}.{{path}}") for part in ("audio_tower", "embed_audio")),
    )

    @property
    def reads_ahead(self):
        """Whether the tokens of an image attend to each other."""
        both_ways = self.config.text_config.use_bidirectional_attention == "vision"
        return "image" if both_ways else None

    def head(self):
        return replace(super().head(), soft_cap=self.config.text_config.final_logit_softcapping)
