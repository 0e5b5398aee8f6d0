"""Decoder layers: the order of norms, attention, feed-forward and residual additions.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.outputs import LayerReport
from ed_layers.cache.spec import LayerSpecs
from ed_layers.context import ALL_LAYERS, Ctx
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from ed_layers.cache.protocol import Cache
    from ed_layers.cache.storage import Layer

Stream = Float[Array, "b s d"]
#: `(x, ctx) -> x`, or `(x, report)` of a layer that reports (`ed_layers.moe.layer.SparseMLP`).
FeedForward = Callable[[Stream, Ctx], Stream | tuple[Stream, LayerReport]]
MakeNorm = Callable[[int], nnx.Module]


class Attention(Protocol):
    """The attention of a layer, such as `SelfAttention` of ed-layers."""

    @property
    def cache_spec(self) -> LayerSpecs:
        """The memory of the attention in a cache."""
        ...

    def __call__(self, x: Stream, ctx: Ctx, cache: Any, layer: Layer) -> tuple[Stream, Any]:
        """Return the output of the attention, and the cache: a `Cache`, or a `StateCache`."""
        ...


class DecoderLayer(nnx.Module):
    """The pre-norm layer of most decoders: norm, attention, addition; norm, feed-forward, addition.

    The stack creates a layer as `layer(parts, index)`. A family with another formula overrides
    `__call__`.

    Args:
        parts: creates the norms.
        self_attn: `(x, ctx, cache, layer) -> (x, cache)`, with a `cache_spec`.
        mlp: `(x, ctx) -> x`, or `(x, ctx) -> (x, report)`.
        norm: creates a norm from the number of features; default: the family's.
        dropout: dropout rate of the outputs of attention and feed-forward in training.
        factor: factor on the outputs of attention and feed-forward (Granite).
        name: attribute name of the first part if it is not attention: `mamba` in a hybrid.
    """

    #: Attribute name of the part that mixes tokens.
    mixes: str = "self_attn"
    self_attn: Attention

    def __init__(
        self,
        parts: Parts,
        *,
        self_attn: Attention,
        mlp: FeedForward,
        norm: MakeNorm | None = None,
        dropout: float = 0.0,
        factor: float = 1.0,
        name: str = "self_attn",
    ):
        norm, d = norm or parts.own_norm, parts.config.hidden_size
        self.input_layernorm = norm(d)
        setattr(self, name, self_attn)
        self.post_attention_layernorm = norm(d)
        self.mlp = mlp
        self.dropout, self.factor, self.mixes = dropout, factor, name

    def __call__(
        self, x: Stream, ctx: Ctx, cache: Cache | None, layer: Layer
    ) -> tuple[Stream, Cache | None, LayerReport]:
        """Return the stream after the layer, the cache, and the report of the layer."""
        mixer = getattr(self, self.mixes)
        normed = ctx.normalize(self.input_layernorm, x)
        attended, cache = mixer(normed, ctx, cache, layer)
        added = ctx.apply_dropout(self.scale(attended), self.dropout, "attention")
        x = ctx.name_activation(ctx.add_to_stream(x, added), "residual")
        out, report = self.feed_forward(ctx.normalize(self.post_attention_layernorm, x), ctx)
        added = ctx.apply_dropout(self.scale(out), self.dropout, "mlp")
        return ctx.add_to_stream(x, added), cache, report

    def scale(self, x: Stream) -> Stream:
        """Return the output of attention or feed-forward times its factor."""
        return x if self.factor == 1 else x * self.factor

    def feed_forward(self, x: Stream, ctx: Ctx) -> tuple[Stream, LayerReport]:
        """Return the output and the report of the feed-forward layer."""
        return split_report(self.mlp(x, ctx), "mlp")

    def cache_specs(self) -> LayerSpecs:
        """The memory of the layer in a cache."""
        return getattr(self, self.mixes).cache_spec


class AddingLayer(DecoderLayer):
    """A pre-norm layer that adds features of images to its output, if it is one of the first layers
    (Qwen3-VL)."""

    def __call__(
        self, x: Stream, ctx: Ctx, cache: Cache | None, layer: Layer
    ) -> tuple[Stream, Cache | None, LayerReport]:
        """Return the stream after the layer, the cache, and the report of the layer."""
        x, cache, report = super().__call__(x, ctx, cache, layer)
        return ctx.with_added(x, layer), cache, report


class SandwichLayer(DecoderLayer):
    """A layer with norms before and after attention and feed-forward (Gemma 2, GLM-4).

    Args:
        parts, self_attn, mlp, norm: as for `DecoderLayer`.
        dropout: dropout rate of the normed outputs in training (T5Gemma).
        factor: factor on the normed outputs (HyperCLOVA X).
    """

    def __init__(
        self,
        parts: Parts,
        *,
        self_attn: Attention,
        mlp: FeedForward,
        norm: MakeNorm | None = None,
        dropout: float = 0.0,
        factor: float = 1.0,
    ):
        norm, d = norm or parts.own_norm, parts.config.hidden_size
        self.input_layernorm = norm(d)
        self.self_attn = self_attn
        self.post_attention_layernorm = norm(d)
        self.pre_feedforward_layernorm = norm(d)
        self.mlp = mlp
        self.post_feedforward_layernorm = norm(d)
        self.dropout, self.factor = dropout, factor

    def __call__(
        self, x: Stream, ctx: Ctx, cache: Cache | None, layer: Layer
    ) -> tuple[Stream, Cache | None, LayerReport]:
        """Return the stream after the layer, the cache, and the report of the layer."""
        attended, cache = self.self_attn(self.input_layernorm(x), ctx, cache, layer)
        added = self.factor * self.post_attention_layernorm(attended)
        added = ctx.apply_dropout(added, self.dropout, "attention")
        x = ctx.name_activation(x + added, "residual")
        out, report = self.branch(x, ctx)
        added = self.factor * self.post_feedforward_layernorm(out)
        return x + ctx.apply_dropout(added, self.dropout, "mlp"), cache, report

    def branch(self, x: Stream, ctx: Ctx) -> tuple[Stream, LayerReport]:
        """Return the output of the feed-forward layer before its second norm, and the report."""
        return self.feed_forward(self.pre_feedforward_layernorm(x), ctx)


class PostNormLayer(DecoderLayer):
    """A layer with norms after attention and feed-forward (OLMo 2)."""

    def __init__(
        self, parts: Parts, *, self_attn: Attention, mlp: FeedForward, norm: MakeNorm | None = None
    ):
        norm, d = norm or parts.own_norm, parts.config.hidden_size
        self.self_attn = self_attn
        self.post_attention_layernorm = norm(d)
        self.mlp = mlp
        self.post_feedforward_layernorm = norm(d)

    def __call__(
        self, x: Stream, ctx: Ctx, cache: Cache | None, layer: Layer
    ) -> tuple[Stream, Cache | None, LayerReport]:
        """Return the stream after the layer, the cache, and the report of the layer."""
        attended, cache = self.self_attn(x, ctx, cache, layer)
        x = ctx.name_activation(x + self.post_attention_layernorm(attended), "residual")
        out, report = self.feed_forward(x, ctx)
        return x + self.post_feedforward_layernorm(out), cache, report


class ParallelLayer(DecoderLayer):
    """A layer with attention and feed-forward in parallel (GPT-J, Cohere, Falcon).

    Args:
        norms: 1 = both parts share one norm; 2 = the feed-forward layer has a separate norm.
        dropout: dropout rate of both outputs in training.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        self_attn: Attention,
        mlp: FeedForward,
        norm: MakeNorm | None = None,
        norms: int = 1,
        dropout: float = 0.0,
    ):
        norm, d = norm or parts.own_norm, parts.config.hidden_size
        self.input_layernorm = norm(d)
        self.self_attn = self_attn
        if norms == 2:
            self.post_attention_layernorm = norm(d)
        self.norms = norms
        self.mlp = mlp
        self.dropout = dropout

    def __call__(
        self, x: Stream, ctx: Ctx, cache: Cache | None, layer: Layer
    ) -> tuple[Stream, Cache | None, LayerReport]:
        """Return the stream after the layer, the cache, and the report of the layer."""
        normed = self.input_layernorm(x)
        attended, cache = self.self_attn(normed, ctx, cache, layer)
        if self.norms == 2:
            normed = self.post_attention_layernorm(x)
        out, report = self.feed_forward(normed, ctx)
        attended = ctx.apply_dropout(attended, self.dropout, "attention")
        return x + attended + ctx.apply_dropout(out, self.dropout, "mlp"), cache, report


class MixerLayer(nnx.Module):
    """A pre-norm layer with one part: recurrence, attention or feed-forward (Mamba).

    Args:
        parts: creates the norm.
        mixer: called like attention if it has a `cache_spec`, otherwise like a feed-forward layer.
        norm: creates a norm from the number of features; default: the family's.
    """

    def __init__(
        self, parts: Parts, *, mixer: Attention | FeedForward, norm: MakeNorm | None = None
    ):
        self.norm = (norm or parts.own_norm)(parts.config.hidden_size)
        self.mixer: Any = mixer

    def __call__(
        self, x: Stream, ctx: Ctx, cache: Cache | None, layer: Layer
    ) -> tuple[Stream, Cache | None, LayerReport]:
        """Return the stream after the layer, the cache, and the report of the layer."""
        normed, report = self.norm(x), LayerReport()
        if hasattr(self.mixer, "cache_spec"):
            mixed, cache = self.mixer(normed, ctx, cache, layer)
        else:
            mixed, report = split_report(self.mixer(normed, ctx), "mixer")
        return x + mixed, cache, report

    def cache_specs(self) -> LayerSpecs:
        """Return the memory of the layer; empty if the mixer is a feed-forward layer."""
        return getattr(self.mixer, "cache_spec", ())


def split_report(out: Stream | tuple[Stream, LayerReport], name: str) -> tuple[Stream, LayerReport]:
    """Return the output of a feed-forward layer, and its report under the given name."""
    return (out[0], out[1].under(name)) if isinstance(out, tuple) else (out, LayerReport())


def get_layer_window(config: EasyDeLBaseConfig, index: int) -> int | None:
    """Return the window of a layer: `sliding_window` if its type is `sliding_attention`."""
    return config.sliding_window if config.layer_types[index] == "sliding_attention" else None


def rope_kind(config: EasyDeLBaseConfig, layer_type: str) -> str:
    """Return the name of a layer's rotary tables: its type if each type has parameters."""
    parameters = config.rope_parameters or {}
    return layer_type if isinstance(parameters.get(layer_type), Mapping) else ALL_LAYERS
