"""The body of decoders: embedding, layers, final norm. A family sets the class of its layer.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.outputs import BaseModelOutput, LayerReport
from ed_infra.rope import frequencies as rope
from ed_infra.rope.frequencies import RopeSettings
from ed_layers import native
from ed_layers.cache.protocol import ContiguousCache
from ed_layers.cache.spec import LayerSpecs
from ed_layers.context import Ctx, name_activation
from ed_layers.parts import MakePart, Parts
from ed_layers.projections.embed import Embed
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.context import embed_input_ids, layer_context, rope_settings
from ed_models.weights.rules import STANDARD

if TYPE_CHECKING:
    from ed_infra.inputs import Features
    from ed_layers.cache.protocol import Cache


class Decoder(EasyDeLBaseModule):
    """`norm(layers(embed(tokens)))` with Hugging Face's parameter names.

    Subclasses set `layer_class`, and override the methods that differ.
    """

    layer_class: ClassVar[MakePart]
    WEIGHTS = STANDARD
    can_be_batch_invariant = True
    can_have_mtp_head = True

    def __init__(
        self,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        parts = Parts(config, rngs, self.dtype, self.param_dtype, precision)
        parts = replace(parts, norm_of_family=self.build_norm(parts))
        self.embed_tokens = self.embedding(parts)
        self.layers = parts.stack(
            type(self).layer_class, self.depth(config), kinds=self.layer_kinds(config)
        )
        self.norm = self.final_norm(parts)
        self.add_parts(parts)

    @staticmethod
    def depth(config: EasyDeLBaseConfig) -> int:
        """Return the number of layers."""
        return config.num_hidden_layers

    @staticmethod
    def layer_kinds(config: EasyDeLBaseConfig) -> Sequence[Hashable] | None:
        """Return one value per layer, equal for equal structure; None = all layers are equal."""
        return getattr(config, "layer_types", None)

    @staticmethod
    def embedding(parts: Parts) -> Embed:
        """Create the token embedding."""
        return parts.embed(parts.config.vocab_size, parts.config.hidden_size)

    @staticmethod
    def build_norm(parts: Parts) -> Callable[..., nnx.Module]:
        """Return the function that creates the family's norms from the shape of the weights."""
        return parts.norm

    @staticmethod
    def final_norm(parts: Parts) -> nnx.Module | None:
        """Create the norm after the last layer; None = no norm."""
        return parts.own_norm(parts.config.hidden_size)

    def add_parts(self, parts: Parts) -> None:
        """Create further parts, such as learned positions, for `enter` and `leave`."""

    def embed(
        self, input_ids: Int[Array, "b s"] | None, inputs_embeds: Float[Array, "b s d"] | None
    ) -> Float[Array, "b s d"]:
        """Return the embeddings of the tokens; features of images later replace some of them."""
        return embed_input_ids(self.embed_tokens, input_ids, inputs_embeds)

    def enter(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s d"]:
        """Transform the hidden states before the first layer (scale, learned positions)."""
        return x

    def through(
        self,
        x: Float[Array, "b s d"],
        ctx: Ctx,
        cache: Cache | None,
        input_ids: Int[Array, "b s"] | None,
        *,
        keep_hidden: bool,
    ) -> tuple[Float[Array, "b s d"], Cache | None, LayerReport, tuple[jax.Array, ...] | None]:
        """Run the layers; see `ed_layers.depth.stack.Stack`."""
        return self.layers(x, ctx, cache, keep_hidden=keep_hidden)

    def leave(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s d"]:
        """Transform the hidden states after the last layer."""
        return x if self.norm is None else ctx.normalize(self.norm, x)

    @property
    def features(self) -> int:
        """Size of the hidden states, d."""
        return self.embed_tokens.embedding.shape[-1]

    def rope_settings(self) -> Mapping[str, RopeSettings]:
        """Return rotary settings by kind of layer; empty without rotary positions."""
        return rope_settings(self.config)

    def prompt_class(self, prompt_len: int) -> int:
        """Return the class of a prompt length: prompts of one class have equal rotary factors."""
        classes = (rope.length_class(s, prompt_len) for s in self.rope_settings().values())
        return max(classes, default=0)

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_embeds: Float[Array, "b s d"] | None = None,
        past_key_values: Cache | None = None,
        features: Features | None = None,
        output_hidden_states: bool = False,
        **inputs: Any,
    ) -> BaseModelOutput:
        """See `CausalLM.__call__`; returns hidden states [b, s, d]."""

        def run():
            x = self.embed(input_ids, inputs_embeds)
            if features is not None:
                x = features.insert(x)
            b, s, _ = x.shape
            ctx, cache = layer_context(
                self.config, (b, s), cache=past_key_values, ropes=self.rope_settings(), **inputs
            )
            if features is not None:
                ctx = replace(ctx, added=features.get_layer_features(x))
            x, cache, report, hidden = self.through(
                self.enter(x, ctx), ctx, cache, input_ids, keep_hidden=output_hidden_states
            )
            if cache is not None and ctx.ragged is None:
                cache = cast(ContiguousCache, cache).advance(s)
            return self.leave(x, ctx), cache, report, hidden

        with native.chosen_by(self.config):
            if self.config.batch_invariant:
                from ed_layers.ordered_program import call_ordered

                x, cache, report, hidden = call_ordered(run)
            else:
                x, cache, report, hidden = run()
        if report.losses or report.metrics:
            from ed_layers.moe.layer import balance

            report = balance(report, self.config)
        return BaseModelOutput(
            last_hidden_state=name_activation(x, "model_output"),
            past_key_values=cache,
            hidden_states=hidden,
            losses=report.losses,
            aux=report.metrics,
            updates=report.under("layers").updates,
            routed_experts=report.routed_experts(self.depth(self.config)),
        )

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """Return the memory of each layer."""
        return self.layers.cache_specs()


class ScaledDecoder(Decoder):
    """A body that multiplies the embeddings of tokens by the square root of the hidden size
    (Gemma). `inputs_embeds` are not multiplied, as in transformers 5."""

    multiplies_by_width = True

    def embed(self, input_ids, inputs_embeds):
        x = super().embed(input_ids, inputs_embeds)
        if inputs_embeds is not None:
            return x
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)
