"""Causal language models, and the head that vision-language and encoder-decoder models share.

Legend: b batch, s sequence, d hidden, v vocabulary, n selected positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.enums import TaskType
from ed_infra.masks import MaskInfo
from ed_infra.outputs import BaseModelOutput, CausalLMOutput, MaskedLMOutput
from ed_layers.context import name_activation
from ed_layers.parts import Parts
from ed_layers.projections.dot import Transposed, Weight
from ed_layers.projections.head import Head
from jaxtyping import Array, Float, Int

from ed_models.tasks.head_model import Body, HeadModel

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig
    from ed_infra.inputs import Encoded, Features, Inputs
    from ed_layers.cache.protocol import Cache
    from ed_layers.cache.ragged import RaggedBatch
    from ed_layers.losses import TokenLoss

    from ed_models.tasks.classification import SequenceClassifier
    from ed_models.tasks.embedding import Embedder
    from ed_models.weights.blocks import Shapes

_ArrayT = TypeVar("_ArrayT", jax.Array, np.ndarray)
VocabularyOutputT = TypeVar("VocabularyOutputT", CausalLMOutput, MaskedLMOutput)
LogitsAt = Literal["all", "none"] | Int[Array, " n"]


class VocabularyHead(HeadModel[Body]):
    """A body under `model`, and a head for tokens, which a tied model shares with the embedding."""

    @property
    def head_bias(self) -> bool:
        """Whether an untied head has a bias."""
        return False

    def add_head(self, parts: Parts) -> None:
        """Create the head of an untied model."""
        if not self.is_tied:
            self.lm_head = parts.linear(
                self.features,
                self.model.embed_tokens.embedding.shape[0],
                axes=("embed", "vocab"),
                bias=self.head_bias,
            )

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding; False if the config has no `tie_word_embeddings`."""
        return bool(getattr(self.config, "tie_word_embeddings", False))

    def logits(self, hidden: Float[Array, "*rows d"]) -> Float[Array, "*rows v"]:
        """Return the logits of the next token, float32."""
        return name_activation(self.head()(hidden), "lm_head_output")

    def head(self) -> Head:
        """Return the head as one value, the argument of losses and scoring."""
        if self.is_tied:
            table = self.model.embed_tokens.table
            weight = Transposed(table) if isinstance(table, jax.Array) else table.T
            return Head(weight, precision=self.precision, config=self.config)
        bias = self.lm_head.bias.get_value() if self.head_bias else None
        weight = self.lm_head.weight
        return Head(weight, bias, precision=self.precision, config=self.config)

    def lm_head_weight(self) -> Weight:
        """Return the matrix of the head, [d, v]."""
        return self.head().weight

    def add_loss(
        self,
        output: VocabularyOutputT,
        targets: Int[Array, "b s"],
        weights: Float[Array, "b s"],
        loss_config: TokenLoss | None = None,
    ) -> tuple[VocabularyOutputT, Float[Array, ""]]:
        """Return the output with the mean cross-entropy in nats, and the sum of the weights.

        Args:
            output: an output with the last hidden states.
            targets: token ids.
            weights: 1, or 0 for a position without a target.
            loss_config: additional terms of the loss.
        """
        from ed_layers.losses import TokenLoss, cross_entropy_sum

        assert output.last_hidden_state is not None
        features = self.head_features(output.last_hidden_state)
        total = cross_entropy_sum(
            features.reshape(-1, features.shape[-1]),
            self.head(),
            targets.reshape(-1),
            weights.reshape(-1),
            loss=loss_config or TokenLoss(),
        )
        count = jnp.sum(weights)
        return output.replace(loss=total / jnp.maximum(count, 1)), count

    def head_features(self, hidden: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        """Return what the head reads, from the last hidden states."""
        return hidden

    def output(self, body: BaseModelOutput, logits_at: LogitsAt) -> CausalLMOutput:
        """Return the output of the body with the logits at some positions."""
        hidden = body.last_hidden_state
        assert hidden is not None
        logits = None
        if not isinstance(logits_at, str):
            logits = self.logits(hidden.reshape(-1, hidden.shape[-1])[logits_at])
        elif logits_at == "all":
            logits = self.logits(hidden)
        return CausalLMOutput(
            logits=logits,
            last_hidden_state=hidden,
            past_key_values=body.past_key_values,
            hidden_states=body.hidden_states,
            losses=body.losses,
            aux=body.aux,
            updates={f"model/{path}": value for path, value in body.updates.items()},
            routed_experts=body.routed_experts,
        )


def _body(family: type[Any]) -> type[Any]:
    from ed_models.tasks.embedding import derive_body_class

    return derive_body_class(family)


def _classifier(family: type[Any]) -> type[SequenceClassifier[Any]]:
    from ed_models.tasks.classification import SequenceClassifier

    return SequenceClassifier.for_family(family)


def _embedder(family: type[Any]) -> type[Embedder[Any]]:
    from ed_models.tasks.embedding import Embedder

    return Embedder.for_family(family)


# Further tasks of every family that registers a language model, also in other packages.
_DERIVED: Mapping[TaskType, Callable[[type[Any]], type]] = {
    TaskType.BASE_MODULE: _body,
    TaskType.SEQUENCE_CLASSIFICATION: _classifier,
    TaskType.EMBEDDING: _embedder,
}


class CausalLM(VocabularyHead):
    """A decoder body under `model`, and a head. Subclasses set `body_class`."""

    DERIVED = _DERIVED
    can_be_batch_invariant = True
    can_have_mtp_head = True

    def add_head(self, parts: Parts) -> None:
        """Create the head, and the MTP layer if the configuration has `mtp_head`."""
        super().add_head(parts)
        if parts.config.mtp_head is not None:
            from ed_models.body.mtp import build_layer

            self.mtp = build_layer(cast(Any, self.body_class), parts)

    @classmethod
    def new_tensors(cls, config: EasyDeLBaseConfig, missing: Shapes) -> Mapping[str, np.ndarray]:
        """Return random values of the MTP layer for a checkpoint without one, with
        `mtp_head: new`, and counts for a layer without them."""
        from ed_models.body.mtp import MTP, TOKEN_COUNTS, create_counts, create_tensors

        names = [name for name in missing if name.startswith(f"{MTP}.")]
        if names == [TOKEN_COUNTS]:
            return create_counts(config)
        if not names or config.mtp_head != "new":
            return {}
        return create_tensors(cls, config, names)

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_embeds: Float[Array, "b s d"] | None = None,
        attention_mask: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        position_ids: Int[Array, "b s"] | None = None,
        mask_info: MaskInfo | None = None,
        ahead: Int[Array, "b s"] | None = None,
        past_key_values: Cache | None = None,
        features: Features | None = None,
        ragged: RaggedBatch | None = None,
        logits_at: LogitsAt = "all",
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
        routed_experts: Int[Array, "b s l k"] | None = None,
        output_routed_experts: bool = False,
        labels: Int[Array, "b s"] | None = None,
    ) -> CausalLMOutput:
        """Run the forward pass of training, generation or serving.

        Args:
            input_ids: token ids [b, s], or `inputs_embeds` [b, s, d] instead.
            attention_mask: nonzero = a token, [b, s].
            segment_ids: packed documents 1, 2, ...; 0 = padding. Segments do not attend to each
                other.
            position_ids: rotary positions; default: count the tokens of a segment.
            mask_info: a complete mask, instead of `attention_mask` and `segment_ids`.
            ahead: number of later tokens that each token attends to; None = 0.
            past_key_values: a cache; None in training.
            features: embeddings that replace the embeddings of placeholder tokens.
            ragged: the flat batch of a serving step (then b = 1).
            logits_at: "all" [b, s, v]; "none"; or indices into the flattened [b * s] -> [n, v].
            key: dropout key; None = deterministic.
            output_hidden_states: also return the input of every layer and the last hidden state.
            routed_experts: experts of each token in each layer, which replace the choice of the
                routers; -1 = the router chooses. The routers still compute the weights.
            output_routed_experts: also return the experts of each token.
            labels: also return the loss of `compute_loss`.
        """
        more: dict[str, Any] = {} if ahead is None else {"ahead": ahead}
        if routed_experts is not None:
            more["routed_experts"] = routed_experts
        if output_routed_experts:
            more["output_routed_experts"] = True
        body = self.model(
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            segment_ids=segment_ids,
            position_ids=position_ids,
            mask_info=mask_info,
            past_key_values=past_key_values,
            features=features,
            ragged=ragged,
            key=key,
            output_hidden_states=output_hidden_states,
            **more,
        )
        output = self.output(body, logits_at)
        if labels is None:
            return output
        return self.add_loss(output, *next_token_targets(labels, segment_ids, attention_mask))[0]

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Return `inputs_embeds` [b, s, d], which `features` put in the place of tokens."""
        from ed_infra.inputs import Encoded

        embeds = inputs["inputs_embeds"]
        return Encoded(embeds, jnp.ones(embeds.shape[:2], jnp.int32))

    def compute_loss(
        self,
        input_ids: Int[Array, "b s"],
        labels: Int[Array, "b s"] | None = None,
        *,
        loss_config: TokenLoss | None = None,
        **inputs: Any,
    ) -> tuple[CausalLMOutput, Float[Array, ""]]:
        """Compute the mean next-token cross-entropy in nats, without materializing the logits.

        Args:
            labels: unshifted labels, as in Hugging Face; -100 is ignored. Default: `input_ids`.
            loss_config: additional terms of the loss.
            inputs: further arguments of `__call__`.

        Returns:
            The output with `loss`, and the number of tokens in the mean.
        """
        output = self(input_ids, logits_at="none", **inputs)
        targets, weights = next_token_targets(
            input_ids if labels is None else labels,
            inputs.get("segment_ids"),
            inputs.get("attention_mask"),
        )
        return self.add_loss(output, targets, weights, loss_config)


def next_token_targets(
    labels: _ArrayT, segment_ids: _ArrayT | None = None, attention_mask: _ArrayT | None = None
) -> tuple[_ArrayT, _ArrayT]:
    """Shift labels by one: the target of position i is the label of i + 1.

    All arrays are int [b, s]. Numpy inputs produce numpy results, without a device transfer.

    Returns:
        The targets (0 if ignored) and the weights (1 or 0). The last position of a row, ends of
        segments, padding and labels of -100 have weight 0.
    """
    xp = np if isinstance(labels, np.ndarray) else jnp
    targets = xp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    keep = targets != -100
    segments = attention_mask if segment_ids is None else segment_ids
    if segments is not None:
        following = xp.pad(segments[:, 1:], ((0, 0), (0, 1)))
        keep &= (segments == following) & (segments != 0)
    return xp.where(keep, targets, 0), keep.astype(xp.float32)  # type: ignore[return-value]


def same_targets(labels: Int[Array, "b s"]) -> tuple[Int[Array, "b s"], Float[Array, "b s"]]:
    """Return the targets of labels that belong to their own positions, and the weights."""
    keep = labels != -100
    return jnp.where(keep, labels, 0), keep.astype(jnp.float32)
