"""Vision transformers: patches of an image, trained tokens in front of them, pre-norm layers.

A family states its tokens, its layer and its pooling. A vision-language family uses a tower by the
`model_type` of its `vision_config`:

    tower = registry.get_module(TaskType.BASE_VISION, config.vision_config.model_type)
    WEIGHTS = (*tower_rules("model.vision_tower", "vision_tower"), ...)

Legend: b images, c channels, h height, w width, p patch size, n positions, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import BaseModelOutput
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.context import ALL_LAYERS, name_activation
from ed_layers.mlp import MLP
from ed_layers.parts import MakePart, Parts
from ed_layers.projections.matmul import matmul
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ed_models.adapters.peft_layout import Modules
from ed_models.base.module import EasyDeLBaseModule
from ed_models.base.new_heads import new_heads, new_training_tensors
from ed_models.body.context import layer_context
from ed_models.body.layers import Attention, DecoderLayer, FeedForward
from ed_models.body.resizing import resized_grid
from ed_models.weights.blocks import Shapes
from ed_models.weights.rules import STANDARD, Rule, fused, ignore, permute, renamed

#: Parts of our names -> those of the towers of CLIP and SigLIP.
CLIP_NAMES: Mapping[str, str] = {
    "embeddings.cls_token": "embeddings.class_embedding",
    "embeddings.patches": "embeddings.patch_embedding",
    "embeddings.position_embedding": "embeddings.position_embedding.weight",
    "pre_norm": "pre_layrnorm",
    "layers": "encoder.layers",
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
    "self_attn.o_proj": "self_attn.out_proj",
    "attention.o_proj": "attention.out_proj",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "pooler": "head",
    "norm": "post_layernorm",
}
#: Parts of our names -> those of ViT.
VIT_NAMES: Mapping[str, str] = {
    "embeddings.patch_embedding": "embeddings.patch_embeddings.projection",
    "embeddings.position_embedding": "embeddings.position_embeddings",
    "layers": "encoder.layer",
    "self_attn.q_proj": "attention.attention.query",
    "self_attn.k_proj": "attention.attention.key",
    "self_attn.v_proj": "attention.attention.value",
    "self_attn.o_proj": "attention.output.dense",
    "input_layernorm": "layernorm_before",
    "post_attention_layernorm": "layernorm_after",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "norm": "layernorm",
}
#: Names of checkpoints -> names of the modules of transformers 5.
VIT_MODULES = Modules(
    {
        "encoder.layer": "layers",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    }
)
#: The kernel of the patches, and the attention of a pooler like SigLIP's.
VISION_RULES = (
    Rule("{path}.patch_embedding.kernel", "{path}.patch_embedding.weight", permute(1, 2, 3, 0)),
    *(
        Rule(rule.ours, rule.hf.replace(".in_proj.", ".in_proj_"), rule.layout)
        for rule in fused(
            ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attention.in_proj"
        )
    ),
    *STANDARD,
)


def tower_rules(
    ours: str,
    theirs: str,
    names: Mapping[str, str] = CLIP_NAMES,
    rules: Sequence[Rule] = VISION_RULES,
) -> tuple[Rule, ...]:
    """Return the weight rules of a tower inside another model.

    Args:
        ours, theirs: path of the tower in the model and in checkpoints.
        names: parts of our names below the path -> those of the checkpoint.
        rules: rules of a tower alone, before the renaming.
    """
    parameter_rules = [rule for rule in rules if rule.ours]
    return tuple(
        Rule(under(ours, rule.ours), f"{theirs}.{rule.hf}", rule.layout)
        for rule in renamed(names, *parameter_rules)
    )


def under(path: str, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Return the name or the names of parameters below a path."""
    if isinstance(names, str):
        return f"{path}.{names}"
    return tuple(f"{path}.{name}" for name in names)


def get_height_width(value: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width of a size in a configuration."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return height, width


class PatchEmbedding(nnx.Module):
    """A linear map of the patches of an image: a convolution whose stride is its size."""

    def __init__(self, parts: Parts, *, bias: bool = True):
        config = parts.config
        self.size, self.dtype = get_height_width(config.patch_size), parts.dtype
        self.precision = parts.precision
        shape = config.num_channels, *self.size, config.hidden_size
        kernel = parts.initializer(parts.rngs.params(), shape, parts.param_dtype)
        self.kernel = nnx.Param(kernel, axes=(None, None, None, "embed"))
        if bias:
            zeros = jnp.zeros(config.hidden_size, parts.param_dtype)
            self.bias = nnx.Param(zeros, axes=("embed",))

    def __call__(self, images: Float[Array, "b c h w"]) -> Float[Array, "b rows columns d"]:
        """Return the embeddings of the patches; pixels beyond the last whole patch are cut off."""
        b, c, h, w = images.shape
        (p, q), kernel = self.size, self.kernel.get_value().astype(self.dtype)
        if c != kernel.shape[0] or h < p or w < q:
            raise ConfigError(
                f"pixel_values has images of {c} x {h} x {w}, but the model reads "
                f"{kernel.shape[0]} channels in patches of {p} x {q}"
            )
        rows, columns = h // p, w // q
        x = images[:, :, : rows * p, : columns * q].astype(self.dtype)
        x = x.reshape(b, c, rows, p, columns, q).transpose(0, 2, 4, 1, 3, 5)
        x = x.reshape(b, rows, columns, c * p * q)
        x = matmul(x, kernel.reshape(c * p * q, -1), precision=self.precision)
        return x + self.bias.get_value().astype(self.dtype) if hasattr(self, "bias") else x


class VisionEmbeddings(nnx.Module):
    """Patches with learned positions, after trained tokens.

    Args:
        parts: creates the parts; the configuration has `image_size` and `patch_size`.
        bias: whether the patches have a bias.
        tokens: names of the trained tokens in front of the patches, in their order.
        lead: leading axes of size 1 of tokens and positions in checkpoints (ViT: 2 and 1 axes).
        registers: number of trained tokens without positions, between the others and the patches.
        masks: number of axes of the token for masked patches in checkpoints, without the last;
            None = there is no such token.
        positions: whether there are learned positions.
        antialias: whether smaller grids of positions are antialiased.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        bias: bool = True,
        tokens: Sequence[str] = (),
        lead: int = 0,
        registers: int = 0,
        masks: int | None = None,
        positions: bool = True,
        antialias: bool = False,
    ):
        config, d = parts.config, parts.config.hidden_size
        self.dtype, self.tokens, self.antialias = parts.dtype, tuple(tokens), antialias
        self.image_size = get_height_width(config.image_size)
        height, width = (
            n // p
            for n, p in zip(self.image_size, get_height_width(config.patch_size), strict=True)
        )
        self.grid = height, width
        self.patch_embedding = PatchEmbedding(parts, bias=bias)
        for name in tokens:
            setattr(self, name, self.table(parts, *(1,) * lead, d))
        if masks is not None:
            self.mask_token = self.table(parts, *(1,) * masks, d)
        if registers:
            self.register_tokens = self.table(parts, 1, registers, d)
        if positions:
            count = len(self.tokens) + height * width
            self.position_embedding = self.table(parts, *(1,) * (lead - 1), count, d)

    @property
    def prefix(self) -> int:
        """Number of tokens in front of the patches."""
        registers = self.register_tokens.shape[1] if hasattr(self, "register_tokens") else 0
        return len(self.tokens) + registers

    @staticmethod
    def table(parts: Parts, *shape: int) -> nnx.Param[jax.Array]:
        """Create trained embeddings."""
        return parts.table(*shape, axes=(*[None] * (len(shape) - 1), "embed"))

    def vectors(self, name: str) -> Float[Array, "n d"]:
        """Return trained embeddings."""
        value = getattr(self, name).get_value().astype(self.dtype)
        return value.reshape(-1, value.shape[-1])

    def __call__(
        self,
        images: Float[Array, "b c h w"],
        *,
        interpolate_pos_encoding: bool = False,
        bool_masked_pos: Bool[Array, "b patches"] | None = None,
    ) -> Float[Array, "b n d"]:
        """Return the embeddings of images; arguments as of `VisionTower`."""
        x = self.patch_embedding(images)
        b, height, width, d = x.shape
        x = x.reshape(b, height * width, d)
        if bool_masked_pos is not None:
            if not hasattr(self, "mask_token"):
                raise ConfigError("bool_masked_pos needs a model with a mask token: omit the array")
            x = jnp.where(bool_masked_pos[..., None] != 0, self.vectors("mask_token"), x)
        x = self.after(self.tokens, x)
        if hasattr(self, "position_embedding"):
            size = images.shape[2], images.shape[3]
            if size != self.image_size and not interpolate_pos_encoding:
                raise ConfigError(
                    f"pixel_values has images of {size[0]} x {size[1]}, but image_size is "
                    f"{self.image_size[0]} x {self.image_size[1]}: resize the images, or set "
                    "interpolate_pos_encoding=True"
                )
            x = x + self.positions(height, width)
        if not hasattr(self, "register_tokens"):
            return x
        first = len(self.tokens)
        remaining_tokens = self.after(["register_tokens"], x[:, first:])
        return jnp.concatenate([x[:, :first], remaining_tokens], axis=1)

    def after(self, names: Sequence[str], x: Float[Array, "b n d"]) -> Float[Array, "b m d"]:
        """Return x after trained tokens."""
        tokens = [jnp.broadcast_to(t, (x.shape[0], *t.shape)) for t in map(self.vectors, names)]
        return jnp.concatenate([*tokens, x], axis=1)

    def positions(self, height: int, width: int) -> Float[Array, "n d"]:
        """Return the positions of the tokens and of a grid of patches."""
        table = self.vectors("position_embedding")
        if (height, width) == self.grid:
            return table
        count, d = len(self.tokens), table.shape[-1]
        grid = table[count:].reshape(*self.grid, d)
        grid = resized_grid(grid, height, width, antialias=self.antialias)
        return jnp.concatenate([table[:count], grid.reshape(-1, d)])


class VisionLayer(DecoderLayer):
    """A pre-norm layer with bidirectional attention."""

    def __init__(
        self,
        parts: Parts,
        index: int,
        *,
        self_attn: Attention | None = None,
        mlp: FeedForward | None = None,
    ):
        config = parts.config
        if self_attn is None:
            self_attn = SelfAttention(
                parts,
                bias=getattr(config, "qkv_bias", True),
                out_bias=True,
                position=None,
                mask=MaskRule(causal=False),
            )
        rate = getattr(config, "hidden_dropout_prob", 0.0)
        super().__init__(parts, self_attn=self_attn, mlp=mlp or MLP(parts), dropout=rate)


class VisionTower(EasyDeLBaseModule):
    """Embeddings, layers and a norm. Subclasses override the methods that differ.

    Args:
        pooling: whether to create a pooler that a classifier does not read (ViT).

    Attributes:
        layer_class: class of the layers.
        interpolates: default of `interpolate_pos_encoding`.
        reads: the features that a classifier of images reads: the first token, the mean of the
            patches, or both.
        names: parts of our names -> those of checkpoints.
        rules: weight rules before the renaming.
        others: tensors of heads in checkpoints, which are ignored.
        new_layers: layers of a pooler, which checkpoints of classifiers lack.
    """

    layer_class: ClassVar[MakePart] = VisionLayer
    input_names = ("pixel_values",)
    interpolates: ClassVar[bool] = False
    reads: ClassVar[Literal["first", "mean", "both"]] = "first"
    names: ClassVar[Mapping[str, str]] = CLIP_NAMES
    rules: ClassVar[tuple[Rule, ...]] = VISION_RULES
    ignored_names: ClassVar[tuple[str, ...]] = ()
    new_layers: ClassVar[tuple[str, ...]] = ()
    #: Names of the modules of transformers 5.
    MODULES: ClassVar[Modules] = Modules()
    #: Names of the tower in multimodal checkpoints, and in checkpoints of a tower alone.
    TOWER_NAMES: ClassVar[tuple[str, ...]] = (
        *("model.vision_tower.vision_model", "vision_tower.vision_model", "model.vision_tower"),
        *("vision_tower", "vision_model"),
    )

    def __init_subclass__(cls, **options: bool):
        super().__init_subclass__(**options)
        cls.WEIGHTS = (*renamed(cls.names, *cls.rules), *map(ignore, cls.ignored_names))

    def __init__(
        self,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        pooling: bool = True,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        self.pooling = pooling
        parts = Parts(config, rngs, self.dtype, self.param_dtype, precision)
        parts = replace(parts, norm_of_family=self.build_norm(parts))
        self.embeddings = self.embedding(parts)
        self.layers = parts.stack(type(self).layer_class, config.num_hidden_layers)
        self.norm = self.last_norm(parts)
        self.add_parts(parts)

    @staticmethod
    def build_norm(parts: Parts) -> Callable[..., nnx.Module]:
        """Return the function that creates the norms."""
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps)

    @staticmethod
    def last_norm(parts: Parts) -> Any:
        """Create the norm after the last layer; None = there is none."""
        return parts.own_norm(parts.config.hidden_size)

    @staticmethod
    def embedding(parts: Parts) -> Any:
        """Create the embeddings of patches and tokens."""
        return VisionEmbeddings(parts)

    def add_parts(self, parts: Parts) -> None:
        """Create further parts, for `enter`, `leave` and `pool_features`."""

    def rope(
        self, size: tuple[int, int], key: jax.Array | None
    ) -> tuple[Float[Array, "n half"], Float[Array, "n half"]] | None:
        """Return cosine and sine of the rotary positions of an image; None = there are none.

        Args:
            size: height and width of the image.
            key: key of a random change of the positions in training; None = deterministic.
        """
        return None

    def enter(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Transform the embeddings before the first layer."""
        return x

    def leave(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Transform the output of the last layer."""
        return x if self.norm is None else self.norm(x)

    def pool_features(self, x: Float[Array, "b n d"]) -> Float[Array, "b d"] | None:
        """Return the features of each image; None = the tower has no pooling."""
        return None

    @classmethod
    def new_tensors(cls, config: EasyDeLBaseConfig, missing: Shapes) -> Mapping[str, np.ndarray]:
        """Return a random pooler for a checkpoint without one, and log a warning."""
        pooler = new_heads(TaskType.BASE_VISION, config, missing, cls.new_layers)
        return {**pooler, **new_training_tensors(config, missing)}

    @property
    def features(self) -> int:
        """Size of the hidden states, d."""
        return self.config.hidden_size

    def get_classifier_features(
        self, x: Float[Array, "b n d"], **inputs: object
    ) -> Float[Array, "b f"]:
        """Return the features of each image that a classifier reads; see `reads`.

        Args:
            x: outputs of the tower.
            inputs: the arguments of the tower, such as masks.
        """
        if self.reads == "first":
            return x[:, 0]
        mean = jnp.mean(x[:, self.embeddings.prefix :], axis=1)
        return mean if self.reads == "mean" else jnp.concatenate([x[:, 0], mean], axis=-1)

    def __call__(
        self,
        pixel_values: Float[Array, "b c h w"],
        *,
        interpolate_pos_encoding: bool | None = None,
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Encode images.

        Args:
            pixel_values: images [b, c, h, w].
            interpolate_pos_encoding: accept images of another size than `image_size`, and resize
                the grid of positions; None = `interpolates`.
            key: dropout key; None = deterministic.
            output_hidden_states: also return the input of every layer and the output of the last.
            inputs: `bool_masked_pos` [b, patches], nonzero = the mask token replaces the patch, of
                models with a mask token.

        Returns:
            Hidden states [b, n, d] of the tokens and patches, and the pooled features [b, d].

        Raises:
            ConfigError: the images do not have the size `image_size`.
        """
        resizes = (
            self.interpolates if interpolate_pos_encoding is None else interpolate_pos_encoding
        )
        x = self.embeddings(pixel_values, interpolate_pos_encoding=resizes, **inputs)
        ctx, _ = layer_context(self.config, (x.shape[0], x.shape[1]), key=key, ropes={})
        rope = self.rope((pixel_values.shape[2], pixel_values.shape[3]), ctx.key)
        if rope is not None:
            tables = [jnp.broadcast_to(t, (*x.shape[:2], t.shape[-1])) for t in rope]
            ctx = replace(ctx, rope={ALL_LAYERS: (tables[0], tables[1])})
        rate = getattr(self.config, "hidden_dropout_prob", 0.0)
        x = self.enter(ctx.apply_dropout(x, rate, "embeddings"))
        x, _, _, hidden = self.layers(x, ctx, keep_hidden=output_hidden_states)
        x = name_activation(self.leave(x), "model_output")
        return BaseModelOutput(x, hidden_states=hidden, pooler_output=self.pool_features(x))
