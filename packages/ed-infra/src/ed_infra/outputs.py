"""Outputs of a forward pass: immutable pytrees for `jax.jit`, `scan` and `grad`.

Shapes: `b` batch, `s` sequence, `d` hidden, `v` vocab, `n` selected positions, `c` labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def _pytree(cls: type[T]) -> type[T]:
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@_pytree
class Metric:
    """A mean before division, so that microbatches, hosts and shards can be summed exactly.

    Attributes:
        sum: Weighted sum of the quantity, a float32 scalar.
        weight: Sum of the weights, a float32 scalar.
    """

    sum: jax.Array
    weight: jax.Array

    @classmethod
    def of(cls, total: ArrayLike, weight: ArrayLike = 1.0) -> Metric:
        """Create a metric from two numbers or arrays."""
        return cls(jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32))

    @property
    def value(self) -> jax.Array:
        """The mean, or 0 without weight."""
        return jnp.where(
            self.weight == 0, 0.0, self.sum / jnp.where(self.weight == 0, 1.0, self.weight)
        )

    def __add__(self, other: Metric) -> Metric:
        return Metric(self.sum + other.sum, self.weight + other.weight)


def add_metrics(left_metrics: dict[str, Metric], right: dict[str, Metric]) -> dict[str, Metric]:
    """Add two sets of metrics by name; a name in only one set is kept."""
    sums = {name: left + right[name] for name, left in left_metrics.items() if name in right}
    return {**left_metrics, **right, **sums}


@_pytree
class LayerReport:
    """Losses, statistics and updates of a layer. Scanned layers have reports of equal structure.

    Attributes:
        losses: Terms of the training loss, including their coefficients (balance loss and z-loss of
            a router). The step divides each term by its weight, over all microbatches.
        metrics: Statistics for the log, by name.
        updates: Updates of variables without gradients (`ed_layers.updated.Updated`): path within
            the layer, joined by `/` -> the contribution of this batch to the sum of the rule.
        experts: Number of a layer as text -> the experts that its router chose, int16 [b, s, k];
            the number is empty within the layer. Only if the call asks for the experts.
    """

    losses: dict[str, Metric] = dataclasses.field(default_factory=dict)
    metrics: dict[str, Metric] = dataclasses.field(default_factory=dict)
    updates: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    experts: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    def __add__(self, other: LayerReport) -> LayerReport:
        return LayerReport(
            add_metrics(self.losses, other.losses),
            add_metrics(self.metrics, other.metrics),
            {**self.updates, **other.updates},
            {**self.experts, **other.experts},
        )

    def under(self, *parts: object) -> LayerReport:
        """Return the report with a prefix of names in the paths of its updates."""
        lead = "/".join(map(str, parts))
        updates = {f"{lead}/{path}": value for path, value in self.updates.items()}
        return dataclasses.replace(self, updates=updates)

    def over_layers(self, layers: Sequence[int]) -> LayerReport:
        """Return the report of stacked layers: losses and metrics summed over the leading axis.

        Args:
            layers: number of each layer.
        """
        losses, metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), (self.losses, self.metrics))
        experts = {
            str(layer): expert_ids[place]
            for expert_ids in self.experts.values()
            for place, layer in enumerate(layers)
        }
        return LayerReport(losses, metrics, self.updates, experts)

    def for_layer(self, layer: int) -> LayerReport:
        """Return the report of one layer with the number of the layer."""
        experts = {str(layer): expert_ids for expert_ids in self.experts.values()}
        return dataclasses.replace(self, experts=experts)

    def routed_experts(self, layers: int) -> jax.Array | None:
        """Return the experts of all layers, int16 [b, s, layers, k]; None without experts.

        The experts of a layer without a router are -1.

        Args:
            layers: number of layers.
        """
        if not self.experts:
            return None
        none = jnp.full_like(next(iter(self.experts.values())), -1)
        layer_experts = [self.experts.get(str(layer), none) for layer in range(layers)]
        return jnp.stack(layer_experts, axis=2)


@_pytree
class ModelOutput:
    """Fields of the outputs of all models.

    Attributes:
        losses: terms that the layers add to the training loss, by name, summed over layers.
        aux: statistics of the layers by name, summed over layers (a mean, once divided).
        updates: storage path of an `Updated` variable, parts joined by `/` -> the amount that this
            batch adds to the input of the variable's rule. A train step applies each rule once.
    """

    losses: dict[str, Metric] = dataclasses.field(default_factory=dict, kw_only=True)
    aux: dict[str, Metric] = dataclasses.field(default_factory=dict, kw_only=True)
    updates: dict[str, jax.Array] = dataclasses.field(default_factory=dict, kw_only=True)

    def replace(self, **changes: object) -> Self:
        """Return a copy with some changed fields."""
        return dataclasses.replace(self, **changes)

    def keys(self) -> Iterable[str]:
        """Names of the fields that are not None."""
        fields = sorted(dataclasses.fields(self), key=lambda field: field.kw_only is True)
        return [field.name for field in fields if getattr(self, field.name) is not None]

    def __getitem__(self, key: str) -> Any:
        if not isinstance(key, str) or key not in self.__dataclass_fields__:
            raise KeyError(f"{type(self).__name__} has no field {key!r}")
        return getattr(self, key)


@_pytree
class BaseModelOutput(ModelOutput):
    """Output of a body without a head.

    Attributes:
        last_hidden_state: [b, s, d], after the last norm.
        past_key_values: the cache after this call, or None.
        hidden_states: inputs of each layer and the output of the last, each [b, s, d], or None.
        pooler_output: pooled first token of each row [b, d], of bodies with a pooler (BERT).
        routed_experts: experts of each token, int16 [b, s, layers, k], or None; see `CausalLM`.
    """

    last_hidden_state: jax.Array
    past_key_values: Any = None
    hidden_states: tuple[jax.Array, ...] | None = None
    pooler_output: jax.Array | None = None
    routed_experts: jax.Array | None = None


@_pytree
class CausalLMOutput(ModelOutput):
    """Output of a causal language model.

    Attributes:
        logits: float32 [b, s, v]; [n, v] where `logits_at` named n positions; None for `"none"`.
        last_hidden_state: [b, s, d], after the last norm: the input of the head.
        past_key_values: the cache after this call, or None.
        hidden_states: inputs of each layer and the output of the last, each [b, s, d], or None.
        loss: scalar, where the call was given labels.
        routed_experts: experts of each token, int16 [b, s, layers, k], -1 for a layer without
            experts; None unless the call asked for them.
    """

    logits: jax.Array | None = None
    last_hidden_state: jax.Array | None = None
    past_key_values: Any = None
    hidden_states: tuple[jax.Array, ...] | None = None
    loss: jax.Array | None = None
    routed_experts: jax.Array | None = None


@_pytree
class SequenceClassifierOutput(ModelOutput):
    """Output of a model that classifies or scores whole sequences.

    Attributes:
        logits: float32 [b, c], at the last token of each row; or of every token, [b, s, c].
        last_hidden_state: [b, s, d], after the last norm.
        past_key_values: the cache after this call, or None.
        hidden_states: inputs of each layer and the output of the last, each [b, s, d], or None.
        loss: scalar, where the call was given labels.
    """

    logits: jax.Array
    last_hidden_state: jax.Array | None = None
    past_key_values: Any = None
    hidden_states: tuple[jax.Array, ...] | None = None
    loss: jax.Array | None = None


@_pytree
class MaskedLMOutput(ModelOutput):
    """Output of a masked language model.

    Attributes:
        logits: float32 [b, s, v]; [n, v] where `logits_at` named n positions; None for `"none"`.
        last_hidden_state: [b, s, d], the output of the encoder.
        hidden_states: inputs of each layer and the output of the last, each [b, s, d], or None.
        loss: scalar, where the call was given labels.
    """

    logits: jax.Array | None = None
    last_hidden_state: jax.Array | None = None
    hidden_states: tuple[jax.Array, ...] | None = None
    loss: jax.Array | None = None


@_pytree
class TokenClassifierOutput(ModelOutput):
    """Output of a model that classifies every token.

    Attributes:
        logits: float32 [b, s, c].
        last_hidden_state: [b, s, d], the output of the encoder.
        hidden_states: inputs of each layer and the output of the last, each [b, s, d], or None.
        loss: scalar, where the call was given labels.
    """

    logits: jax.Array
    last_hidden_state: jax.Array | None = None
    hidden_states: tuple[jax.Array, ...] | None = None
    loss: jax.Array | None = None


@_pytree
class QuestionAnsweringOutput(ModelOutput):
    """Output of a model that finds the answer to a question in a text.

    Attributes:
        start_logits: float32 [b, s], scores of the first token of the answer.
        end_logits: float32 [b, s], scores of the last token of the answer.
        last_hidden_state: [b, s, d], the output of the encoder.
        hidden_states: inputs of each layer and the output of the last, each [b, s, d], or None.
        loss: scalar, where the call was given the positions of the answers.
    """

    start_logits: jax.Array
    end_logits: jax.Array
    last_hidden_state: jax.Array | None = None
    hidden_states: tuple[jax.Array, ...] | None = None
    loss: jax.Array | None = None


@_pytree
class EmbeddingOutput(ModelOutput):
    """Output of a model that turns sequences into vectors.

    Attributes:
        embeddings: float32 [b, d], pooled over each row.
        last_hidden_state: [b, s, d], after the last norm.
    """

    embeddings: jax.Array
    last_hidden_state: jax.Array | None = None


@_pytree
class ImageClassifierOutput(ModelOutput):
    """Output of a model that classifies images.

    Attributes:
        logits: float32 [b, c].
        last_hidden_state: [b, s, d], the output of the vision tower.
        hidden_states: inputs of each layer and the output of the last, each [b, s, d], or None.
        loss: scalar, where the call was given labels.
    """

    logits: jax.Array
    last_hidden_state: jax.Array | None = None
    hidden_states: tuple[jax.Array, ...] | None = None
    loss: jax.Array | None = None


@_pytree
class ImageTextOutput(ModelOutput):
    """Output of a model that compares images with texts; i images, t texts, e embedding size.

    Attributes:
        logits_per_image: float32 [i, t], scaled similarities of the embeddings.
        logits_per_text: the transpose, [t, i].
        text_embeds: float32 [t, e], of length one.
        image_embeds: float32 [i, e], of length one.
        loss: scalar, where the loss was computed.
    """

    logits_per_image: jax.Array
    logits_per_text: jax.Array
    text_embeds: jax.Array
    image_embeds: jax.Array
    loss: jax.Array | None = None
