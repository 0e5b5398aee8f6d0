"""The layers that decoders are made of: where the norms stand, and what is added to what.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ed_infra.outputs import Report
from ed_layers.cache.spec import LayerSpecs
from ed_layers.cache.storage import Layer
from ed_layers.context import ALL_LAYERS, Ctx
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

Stream = Float[Array, "b s d"]
#: `(x, ctx) -> x`, or `(x, report)` of a layer that reports (`ed_layers.moe.SparseMLP`).
FeedForward = Callable[[Stream, Ctx], Stream | tuple[Stream, Report]]
MakeNorm = Callable[[int], nnx.Module]


class Attention(Protocol):
    """What a layer needs of its attention, such as `ed_layers.self_attention.SelfAttention`."""

    @property
    def cache_spec(self) -> LayerSpecs:
        """What it keeps in a cache."""
        ...

    def __call__(self, x: Stream, ctx: Ctx, cache: Any, layer: Layer) -> tuple[Stream, Any]:
        """Return what is added to the stream, and the cache."""
        ...


class DecoderLayer(nnx.Module):
    """The layer of most decoders: attention and feed-forward, each normed before and added after.

    A family's layer is made as `layer(parts, index)`. Where its formula is another, it defines a
    `__call__` of its own.

    Args:
        parts: makes the norms.
        self_attn: `(x, ctx, cache, layer) -> (x, cache)`, with the `cache_spec` that it needs.
        mlp: `(x, ctx) -> x`, or `(x, ctx) -> (x, report)`.
        norm: makes a norm from the number of features; default: the family's.
        dropout: in training, of what attention and feed-forward add to the stream.
        factor: on what attention and feed-forward add to the stream (Granite).
        name: of the first part, where it is no attention: `mamba` in a hybrid.
    """

    #: Name of the part that mixes tokens.
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

    def __call__(self, x: Stream, ctx: Ctx, cache: Any, layer: Layer) -> tuple[Stream, Any, Report]:
        """Return the stream after the layer, the cache, and what the layer reports."""
        mixer = getattr(self, self.mixes)
        attended, cache = mixer(self.input_layernorm(x), ctx, cache, layer)
        added = ctx.dropped(attended * self.factor, self.dropout, "attention")
        x = ctx.named(x + added, "residual")
        out, report = self.feed_forward(self.post_attention_layernorm(x), ctx)
        return x + ctx.dropped(out * self.factor, self.dropout, "mlp"), cache, report

    def feed_forward(self, x: Stream, ctx: Ctx) -> tuple[Stream, Report]:
        """Call the feed-forward layer; return what it adds to the stream, and its report."""
        return reported(self.mlp(x, ctx), "mlp")

    def cache_specs(self) -> LayerSpecs:
        """What the layer keeps in a cache."""
        return getattr(self, self.mixes).cache_spec


class SandwichLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and after (Gemma 2, GLM-4)."""

    def __init__(
        self, parts: Parts, *, self_attn: Attention, mlp: FeedForward, norm: MakeNorm | None = None
    ):
        norm, d = norm or parts.own_norm, parts.config.hidden_size
        self.input_layernorm = norm(d)
        self.self_attn = self_attn
        self.post_attention_layernorm = norm(d)
        self.pre_feedforward_layernorm = norm(d)
        self.mlp = mlp
        self.post_feedforward_layernorm = norm(d)

    def __call__(self, x: Stream, ctx: Ctx, cache: Any, layer: Layer) -> tuple[Stream, Any, Report]:
        """Return the stream after the layer, the cache, and what the layer reports."""
        attended, cache = self.self_attn(self.input_layernorm(x), ctx, cache, layer)
        x = ctx.named(x + self.post_attention_layernorm(attended), "residual")
        out, report = self.branch(x, ctx)
        return x + self.post_feedforward_layernorm(out), cache, report

    def branch(self, x: Stream, ctx: Ctx) -> tuple[Stream, Report]:
        """The feed-forward layer of the stream, between its two norms."""
        return self.feed_forward(self.pre_feedforward_layernorm(x), ctx)


class PostNormLayer(DecoderLayer):
    """Attention and feed-forward, each normed after (OLMo 2)."""

    def __init__(
        self, parts: Parts, *, self_attn: Attention, mlp: FeedForward, norm: MakeNorm | None = None
    ):
        norm, d = norm or parts.own_norm, parts.config.hidden_size
        self.self_attn = self_attn
        self.post_attention_layernorm = norm(d)
        self.mlp = mlp
        self.post_feedforward_layernorm = norm(d)

    def __call__(self, x: Stream, ctx: Ctx, cache: Any, layer: Layer) -> tuple[Stream, Any, Report]:
        """Return the stream after the layer, the cache, and what the layer reports."""
        attended, cache = self.self_attn(x, ctx, cache, layer)
        x = ctx.named(x + self.post_attention_layernorm(attended), "residual")
        out, report = self.feed_forward(x, ctx)
        return x + self.post_feedforward_layernorm(out), cache, report


class ParallelLayer(DecoderLayer):
    """Attention and feed-forward side by side, both added to the stream (GPT-J, Cohere, Falcon).

    Args:
        norms: 1 = both read the same normed stream; 2 = the feed-forward has a norm of its own.
        dropout: in training, of what is added.
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

    def __call__(self, x: Stream, ctx: Ctx, cache: Any, layer: Layer) -> tuple[Stream, Any, Report]:
        """Return the stream after the layer, the cache, and what the layer reports."""
        normed = self.input_layernorm(x)
        attended, cache = self.self_attn(normed, ctx, cache, layer)
        if self.norms == 2:
            normed = self.post_attention_layernorm(x)
        out, report = self.feed_forward(normed, ctx)
        attended = ctx.dropped(attended, self.dropout, "attention")
        return x + attended + ctx.dropped(out, self.dropout, "mlp"), cache, report


class MixerLayer(nnx.Module):
    """One mixer, normed before and added after: recurrence, attention or feed-forward (Mamba).

    Args:
        parts: makes the norm.
        mixer: called as attention is, with a `cache_spec`; or as a feed-forward layer, without one.
        norm: makes a norm from the number of features; default: the family's.
    """

    def __init__(
        self, parts: Parts, *, mixer: Attention | FeedForward, norm: MakeNorm | None = None
    ):
        self.norm = (norm or parts.own_norm)(parts.config.hidden_size)
        self.mixer: Any = mixer

    def __call__(self, x: Stream, ctx: Ctx, cache: Any, layer: Layer) -> tuple[Stream, Any, Report]:
        """Return the stream after the layer, the cache, and what the layer reports."""
        normed, report = self.norm(x), Report()
        if hasattr(self.mixer, "cache_spec"):
            mixed, cache = self.mixer(normed, ctx, cache, layer)
        else:
            mixed, report = reported(self.mixer(normed, ctx), "mixer")
        return x + mixed, cache, report

    def cache_specs(self) -> LayerSpecs:
        """What the layer keeps in a cache; nothing where the mixer is a feed-forward layer."""
        return getattr(self.mixer, "cache_spec", ())


def reported(out: Stream | tuple[Stream, Report], name: str) -> tuple[Stream, Report]:
    """What a feed-forward layer of that name returned, with its report or an empty one."""
    return (out[0], out[1].under(name)) if isinstance(out, tuple) else (out, Report())


def window_of(config: Any, index: int) -> int | None:
    """The window of a layer: `sliding_window` where its type is `sliding_attention`."""
    return config.sliding_window if config.layer_types[index] == "sliding_attention" else None


def rope_kind(config: Any, layer_type: str) -> str:
    """Whose rotary tables a layer takes: its type's where each has parameters of its own."""
    parameters = config.rope_parameters or {}
    return layer_type if isinstance(parameters.get(layer_type), Mapping) else ALL_LAYERS
