"""The encoder of T5 and its relatives alone: text encoders, and bodies of embedding models.

Numbers and names follow `T5EncoderModel` of Hugging Face. Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from ed_infra.enums import TaskType
from ed_infra.outputs import BaseModelOutput
from ed_layers import native
from ed_layers.context import name_activation
from ed_layers.parts import Parts
from jaxtyping import Array, Float, Int

from ed_models.body.context import embed_input_ids, layer_context
from ed_models.body.encoder_decoder import EncoderDecoder
from ed_models.weights.rules import Rule, ignore

_BODY = "model."


class SeparateEncoder(EncoderDecoder):
    """A mixin in front of an encoder-decoder body: the encoder without the decoder.

    The names of the parameters are those of the encoder-decoder. Checkpoints of both halves load,
    too: the tensors of the decoder and of the head are ignored.
    """

    input_names = ("input_ids", "attention_mask", "segment_ids", "position_ids")

    @classmethod
    def for_family(cls, family: type[Any]) -> type[SeparateEncoder]:
        """Return the encoder of the body of a family."""
        stem = family.body_class.__name__.removesuffix("Model")
        content = {
            "__doc__": f"The encoder of `{family.body_class.__name__}`.",
            "__module__": family.__module__,
            "WEIGHTS": encoder_rules(family.WEIGHTS),
        }
        metaclass = type(cls)
        return metaclass(f"{stem}EncoderModel", (cls, family.body_class), content)

    @property
    def features(self) -> int:
        """Size of the hidden states, d."""
        return self.encoder_config.hidden_size

    @classmethod
    def decoder_stack(cls, parts: Parts) -> None:
        """Create no decoder."""

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_embeds: Float[Array, "b s d"] | None = None,
        attention_mask: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        position_ids: Int[Array, "b s"] | None = None,
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
        **inputs: object,
    ) -> BaseModelOutput:
        """Run the encoder.

        Args:
            input_ids: token ids [b, s], or `inputs_embeds` [b, s, d] instead.
            attention_mask: nonzero = a token, [b, s].
            segment_ids: packed texts 1, 2, ...; 0 = padding.
            position_ids: positions of the tokens; default: count the tokens of a text.
            key: dropout key; None = deterministic.
            output_hidden_states: also return the input of every layer and the last hidden state.
            inputs: none; there is no decoder.

        Raises:
            TypeError: there are further arguments.
        """
        if inputs:
            raise TypeError(f"{type(self).__name__} has no decoder: omit {', '.join(inputs)}")
        table = getattr(self, "encoder_embed_tokens", self.embed_tokens)
        x = embed_input_ids(table, input_ids, inputs_embeds)
        x = x * self.encoder_embed_scale if inputs_embeds is None else x
        ctx, _ = layer_context(
            self.encoder_config,
            (x.shape[0], x.shape[1]),
            attention_mask=attention_mask,
            segment_ids=segment_ids,
            position_ids=position_ids,
            key=key,
            ropes=self.ropes,
        )
        with native.chosen_by(self.config):
            x, _, report, hidden = self.encoder(x, ctx, None, keep_hidden=output_hidden_states)
        return BaseModelOutput(
            last_hidden_state=name_activation(x, "model_output"),
            hidden_states=hidden,
            losses=report.losses,
            aux=report.metrics,
            updates=report.under("encoder/layers").updates,
        )

    def cache_specs(self) -> Any:
        """Raise a TypeError: an encoder has no cache."""
        return super(EncoderDecoder, self).cache_specs()


def encoder_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules of an encoder alone, from those of the class with the body under `model`."""
    body_rules = []
    for rule in rules:
        names = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        if names:
            is_open = names[0].startswith("{") and rule.hf.startswith("{")
            shorter = tuple(name.removeprefix(_BODY) for name in names)
            rule = rule._replace(ours=shorter, hf=_BODY + rule.hf if is_open else rule.hf)
        body_rules.append(rule)
    return (*body_rules, ignore("decoder.{path}"), ignore("lm_head.weight"))


def _embedder(family: type[Any]) -> type[Any]:
    from ed_models.tasks.embedding import Embedder

    return Embedder.for_family(family)


#: Further tasks of encoder-decoders whose encoder is published alone.
ENCODER_CLASSES: Mapping[TaskType, Callable[[type[Any]], type]] = {
    TaskType.BASE_MODULE: SeparateEncoder.for_family,
    TaskType.EMBEDDING: _embedder,
}
