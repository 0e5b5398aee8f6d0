"""Vision towers over packed patches of images of different sizes (Qwen2-VL and its successors).

Attention connects the patches of one image, or of one window of an image, and rotary positions are
the row and the column of a patch. Blocks of neighboring patches are merged into one feature.

Legend: b rows, i images of a row, p patches of a row, c channels, t frames of a patch, s side of a
patch, f = c * t * s * s, d hidden, m patches along the side of a block, n = p / m², e features.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.activations import activation
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, Rotary
from ed_layers.cache.protocol import Cache
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.mlp import MLP, GatedMLP
from ed_layers.parts import MakePart, Parts
from ed_layers.projections.matmul import matmul
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.context import layer_context
from ed_models.body.layers import DecoderLayer, FeedForward, Stream
from ed_models.body.patch_grids import PatchPlaces, get_patch_order


class PatchProjection(nnx.Module):
    """A linear map of patches: a convolution in space, and in time if patches have several frames,
    whose stride is its size.

    Args:
        parts: creates the kernel.
        features: size d of the result.
        bias: whether there is a bias.
        flat: whether the kernel is that of a linear layer, [f, d].
    """

    def __init__(self, parts: Parts, features: int, *, bias: bool = False, flat: bool = False):
        config = parts.config
        self.dtype, side = parts.dtype, config.patch_size
        if bias:
            self.bias = nnx.Param(jnp.zeros(features, parts.param_dtype), axes=("embed",))
        if flat:
            shape = config.num_channels * side**2, features
        elif hasattr(config, "temporal_patch_size"):
            shape = config.in_channels, config.temporal_patch_size, side, side, features
        else:
            shape = config.num_channels, side, side, features
        kernel = parts.initializer(parts.rngs.params(), shape, parts.param_dtype)
        self.kernel = nnx.Param(kernel, axes=(*[None] * (len(shape) - 1), "embed"))

    def __call__(self, patches: Float[Array, "b p f"]) -> Float[Array, "b p d"]:
        kernel = self.kernel.get_value().astype(self.dtype)
        size = kernel.size // kernel.shape[-1]
        if patches.shape[-1] != size:
            raise ConfigError(
                f"pixel_values has patches of {patches.shape[-1]} numbers, but the vision tower "
                f"reads patches of {size}: use the image processor of the checkpoint"
            )
        x = matmul(patches.astype(self.dtype), kernel.reshape(size, -1))
        return x + self.bias.get_value().astype(self.dtype) if hasattr(self, "bias") else x


class PatchLayer(DecoderLayer):
    """A pre-norm layer whose tokens attend to the patches of their frame, or of their window."""

    def __init__(
        self,
        parts: Parts,
        *,
        mlp: FeedForward,
        windowed: bool = False,
        bias: bool = True,
        out_bias: bool = True,
        position: Rotary = Rotary(),  # noqa: B008
    ):
        attention = SelfAttention(
            parts, bias=bias, out_bias=out_bias, position=position, mask=MaskRule(causal=False)
        )
        super().__init__(parts, self_attn=attention, mlp=mlp)
        self.windowed = windowed

    def __call__(self, x: Stream, ctx: Ctx, cache: Cache | None, layer: Layer):
        """Return the stream after the layer, the cache, and the report of the layer."""
        if self.windowed:
            ctx = replace(ctx, mask_info=ctx.windows)
        return super().__call__(x, ctx, cache, layer)


class PatchMerger(nnx.Module):
    """A norm, and two linear layers from the patches of a block to one feature.

    Args:
        parts: creates the layers.
        features: size of a feature, e.
        norm_blocks: whether the norm is that of a block, instead of a patch.
    """

    def __init__(self, parts: Parts, features: int, *, norm_blocks: bool = False):
        config = parts.config
        self.size, self.whole = config.spatial_merge_size**2, norm_blocks
        inner = config.hidden_size * self.size
        self.norm = parts.own_norm(inner if norm_blocks else config.hidden_size)
        self.linear_1 = parts.linear(inner, inner, axes=(None, "embed"), bias=True)
        self.linear_2 = parts.linear(inner, features, axes=("embed", None), bias=True)

    def __call__(self, x: Float[Array, "b p d"]) -> Float[Array, "b n e"]:
        blocks = x.shape[0], x.shape[1] // self.size, x.shape[2] * self.size
        x = self.norm(x.reshape(blocks)) if self.whole else self.norm(x).reshape(blocks)
        return self.linear_2(activation("gelu")(self.linear_1(x)))


class PatchTower(nnx.Module):
    """Projection, layers and merger.

    Args:
        parts: creates the layers; `config` has the size d as `hidden_size`, and `own_norm` creates
            the norms.
        layer: creates a layer: `layer(parts, index)`.
        depth: number of layers.
        features: size of a feature, e.
        kinds: one value per layer if the layers differ.
        window: blocks along the side of a window; None = no layer has windows.
        bias, flat: see `PatchProjection`.
        positions: number of rows and columns of a table of learned positions, which is resized to
            each image; None = no table.
        cubic: resize the table with a cubic kernel and borders of patches at its borders (GLM-4V),
            instead of linearly and with aligned corners.
        normed: whether a norm follows the projection of patches.
        merger: creates the merger: `merger(parts, features)`.
        deep: numbers of the layers whose outputs are merged into further features.
    """

    def __init__(
        self,
        parts: Parts,
        layer: MakePart,
        *,
        depth: int,
        features: int,
        kinds: Sequence[Hashable] | None = None,
        window: int | None = None,
        bias: bool = False,
        flat: bool = False,
        positions: int | None = None,
        cubic: bool = False,
        normed: bool = False,
        merger: Callable[[Parts, int], Any] = PatchMerger,
        deep: Sequence[int] = (),
    ):
        self.config = parts.config
        self.merge: int = self.config.spatial_merge_size
        self.window = window
        d = self.config.hidden_size
        self.patch_embed = PatchProjection(parts, d, bias=bias, flat=flat)
        if normed:
            self.patch_norm = parts.own_norm(d)
        self.positions, self.cubic, self.deep = positions, cubic, tuple(deep)
        if positions is not None:
            self.pos_embed = self.position_table(parts, positions)
        self.blocks = parts.stack(layer, depth, kinds=kinds)
        self.merger = merger(parts, features)
        if deep:
            mergers = [PatchMerger(parts, features, norm_blocks=True) for _ in deep]
            self.deepstack_merger_list = nnx.List(mergers)
        self.features = features * (1 + len(self.deep))

    def __call__(
        self, patches: Float[Array, "b p f"], grids: Int[Array, "b i 3"]
    ) -> Float[Array, "b n _"]:
        """Return the features of the images of each row, one image after another.

        A feature contains the merged output of the last layer, then those of the layers `deep`.

        Args:
            patches: packed patches; their number is a multiple of m².
            grids: number of patches of each image along time, height and width.

        Raises:
            ConfigError: the number of patches is no multiple of m².
        """
        count = patches.shape[1]
        if count % self.merge**2:
            raise ConfigError(
                f"pixel_values has {count} patches in a row, but blocks of {self.merge} x "
                f"{self.merge} patches become one feature: pad to a multiple of {self.merge**2}"
            )
        x = self.patch_embed(patches)
        if hasattr(self, "patch_norm"):
            x = self.patch_norm(x)
        places = PatchPlaces.of(grids, count, merge=self.merge, window=self.window)
        order = None
        if self.window is not None:
            # The patches of a window are neighbors, so attention skips blocks of other windows.
            places, order = places.by_window(self.merge)
            x = jnp.take_along_axis(x, get_patch_order(order, self.merge)[..., None], axis=1)
        if self.positions is not None:
            x = x + self.learned_positions(places).astype(x.dtype)
        ctx = self.context(places)
        if self.window is not None:
            windows = MaskInfo.from_segments(places.windows, causal=False)
            ctx = replace(ctx, windows=windows)
        x, _, _, hidden = self.blocks(x, ctx, keep_hidden=bool(self.deep))
        features = self.merger(x)
        if hidden is not None:
            mergers = zip(self.deepstack_merger_list, self.deep, strict=True)
            deep_features = [merger(hidden[layer + 1]) for merger, layer in mergers]
            features = jnp.concatenate([features, *deep_features], axis=-1)
        if order is not None:
            back = jnp.argsort(order, axis=1)
            features = jnp.take_along_axis(features, back[..., None], axis=1)
        return features

    @staticmethod
    def position_table(parts: Parts, side: int) -> nnx.Param[jax.Array]:
        """Create the table of learned positions of `side` rows and columns."""
        return parts.table(side**2, parts.config.hidden_size, axes=(None, "embed"))

    def context(self, places: PatchPlaces) -> Ctx:
        """Return masks and rotary positions of patches."""
        rows, count = places.frames.shape
        ctx, _ = layer_context(
            self.config,
            (rows, count),
            segment_ids=places.frames,
            position_ids=places.position_ids,
        )
        return ctx

    def learned_positions(self, places: PatchPlaces) -> Float[Array, "b p d"]:
        """Return the learned positions of patches, between those of the table."""
        assert self.positions is not None
        last, patch = self.positions - 1, places.position_ids.astype(jnp.float32)
        if self.cubic:
            at = (patch + 0.5) / places.sizes * self.positions - 0.5
            neighbor_offsets, kernel = (-1, 0, 1, 2), cubic_kernel
        else:
            at = patch * last / jnp.maximum(places.sizes - 1, 1)
            neighbor_offsets, kernel = (0, 1), linear_kernel
        low = jnp.floor(at).astype(jnp.int32)
        table = self.pos_embed.get_value().astype(jnp.float32)
        table = table.reshape(self.positions**2, -1)
        total = jnp.zeros((), jnp.float32)
        for corner in itertools.product(neighbor_offsets, neighbor_offsets):
            across = jnp.stack([low[axis] + corner[axis] for axis in (0, 1)])
            row, column = jnp.clip(across, 0, last)
            weight = jnp.prod(kernel(jnp.abs(at - across)), axis=0)
            total = total + weight[..., None] * table[row * self.positions + column]
        return total


def linear_kernel(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return the weights of linear interpolation at distances x."""
    return jnp.maximum(1 - x, 0)


def cubic_kernel(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return the weights of torch's cubic interpolation at distances x, at most 2."""
    a = -0.75
    inner_weights = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return jnp.where(x <= 1, inner_weights, far)


class PlainPatchLayer(PatchLayer):
    """A layer with a feed-forward layer without a gate, of the width `intermediate_size`."""

    def __init__(self, parts: Parts, index: int):
        super().__init__(parts, mlp=MLP(parts))


def deep_tower(parts: Parts) -> PatchTower:
    """Create the tower of Qwen3-VL: learned positions, and features of several layers. That of
    Qwen3.5 has the features of the last layer only."""
    config = parts.config
    return PatchTower(
        replace(parts, norm_of_family=partial(parts.layer_norm, eps=1e-6)),
        PlainPatchLayer,
        depth=config.depth,
        features=config.out_hidden_size,
        bias=True,
        positions=isqrt(config.num_position_embeddings),
        deep=getattr(config, "deepstack_visual_indexes", ()),
    )


class WindowedPatchLayer(PatchLayer):
    """A layer with a gated feed-forward layer, and windows unless `fullatt_block_indexes` names
    it."""

    def __init__(self, parts: Parts, index: int):
        windowed = index not in parts.config.fullatt_block_indexes
        super().__init__(parts, mlp=GatedMLP(parts, bias=True), windowed=windowed)


def windowed_tower(parts: Parts) -> PatchTower:
    """Create the tower of Qwen2.5-VL: RMS norms, and windows in most layers."""
    config = parts.config
    return PatchTower(
        replace(parts, norm_of_family=partial(parts.norm, eps=1e-6)),
        WindowedPatchLayer,
        depth=config.depth,
        features=config.out_hidden_size,
        kinds=[index not in config.fullatt_block_indexes for index in range(config.depth)],
        window=config.window_size // config.patch_size // config.spatial_merge_size,
    )
