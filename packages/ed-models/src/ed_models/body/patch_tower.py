"""Vision towers over packed patches of images of different sizes (Qwen2-VL and its successors).

Attention connects the patches of one image, or of one window of an image, and rotary positions are
the row and the column of a patch. Blocks of neighboring patches are merged into one feature.

Legend: b rows, i images of a row, p patches of a row, c channels, t frames of a patch, s side of a
patch, f = c * t * s * s, d hidden, m patches along the side of a block, n = p / m², e features.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.activations import activation
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.context import Ctx
from ed_layers.parts import MakePart, Parts
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.context import layer_context
from ed_models.body.layers import DecoderLayer, FeedForward, Stream
from ed_models.body.patch_grids import PatchPlaces, patches_of


class PatchProjection(nnx.Module):
    """A linear map of patches: a convolution in space and time whose stride is its size."""

    def __init__(self, parts: Parts, features: int):
        config: Any = parts.config
        self.dtype, side = parts.dtype, config.patch_size
        shape = config.in_channels, config.temporal_patch_size, side, side, features
        kernel = parts.initializer(parts.rngs.params(), shape, parts.param_dtype)
        self.kernel = nnx.Param(kernel, axes=(None, None, None, None, "embed"))

    def __call__(self, patches: Float[Array, "b p f"]) -> Float[Array, "b p d"]:
        kernel = self.kernel.get_value().astype(self.dtype)
        size = kernel.size // kernel.shape[-1]
        if patches.shape[-1] != size:
            raise ConfigError(
                f"pixel_values has patches of {patches.shape[-1]} numbers, but the vision tower "
                f"reads patches of {size}: use the image processor of the checkpoint"
            )
        return patches.astype(self.dtype) @ kernel.reshape(size, -1)


class PatchLayer(DecoderLayer):
    """A pre-norm layer whose tokens attend to the patches of their frame, or of their window."""

    def __init__(self, parts: Parts, *, mlp: FeedForward, windowed: bool = False):
        attention = SelfAttention(parts, bias=True, mask=MaskRule(causal=False))
        super().__init__(parts, self_attn=attention, mlp=mlp)
        self.windowed = windowed

    def __call__(self, x: Stream, ctx: Ctx, cache: Any, layer: Any):
        """Return the stream after the layer, the cache, and the report of the layer."""
        if self.windowed:
            ctx = replace(ctx, mask_info=ctx.windows)
        return super().__call__(x, ctx, cache, layer)


class PatchMerger(nnx.Module):
    """A norm of patches, and two linear layers from the patches of a block to one feature."""

    def __init__(self, parts: Parts, features: int):
        config: Any = parts.config
        self.size = config.spatial_merge_size**2
        inner = config.hidden_size * self.size
        self.ln_q = parts.own_norm(config.hidden_size)
        self.linear_1 = parts.linear(inner, inner, axes=(None, "embed"), bias=True)
        self.linear_2 = parts.linear(inner, features, axes=("embed", None), bias=True)

    def __call__(self, x: Float[Array, "b p d"]) -> Float[Array, "b n e"]:
        x = self.ln_q(x).reshape(x.shape[0], x.shape[1] // self.size, -1)
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
    ):
        self.config: Any = parts.config
        self.merge: int = self.config.spatial_merge_size
        self.window = window
        self.patch_embed = PatchProjection(parts, self.config.hidden_size)
        self.blocks = parts.stack(layer, depth, kinds=kinds)
        self.merger = PatchMerger(parts, features)

    def __call__(
        self, patches: Float[Array, "b p f"], grids: Int[Array, "b i 3"]
    ) -> Float[Array, "b n e"]:
        """Return the features of the images of each row, one image after another.

        Args:
            patches: packed patches; their number is a multiple of m².
            grids: number of patches of each image along time, height and width.

        Raises:
            ConfigError: the number of patches is no multiple of m².
        """
        rows, count, _ = patches.shape
        if count % self.merge**2:
            raise ConfigError(
                f"pixel_values has {count} patches in a row, but blocks of {self.merge} x "
                f"{self.merge} patches become one feature: pad to a multiple of {self.merge**2}"
            )
        x = self.patch_embed(patches)
        places = PatchPlaces.of(grids, count, merge=self.merge, window=self.window)
        order = None
        if self.window is not None:
            # The patches of a window are neighbors, so attention skips blocks of other windows.
            places, order = places.by_window(self.merge)
            x = jnp.take_along_axis(x, patches_of(order, self.merge)[..., None], axis=1)
        ctx, _ = layer_context(
            self.config,
            (rows, count),
            segment_ids=places.frames,
            position_ids=places.position_ids,
        )
        if self.window is not None:
            windows = MaskInfo.from_segments(places.windows, causal=False)
            ctx = replace(ctx, windows=windows)
        x, *_ = self.blocks(x, ctx)
        features = self.merger(x)
        if order is not None:
            back = jnp.argsort(order, axis=1)
            features = jnp.take_along_axis(features, back[..., None], axis=1)
        return features
