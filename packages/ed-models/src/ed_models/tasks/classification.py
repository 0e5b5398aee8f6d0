"""Classification and scoring of whole sequences, with the body of any family.

Numbers and names follow Hugging Face's `GenericForSequenceClassification` (`modeling_layers.py`)
and `ForSequenceClassificationLoss` (`loss_utils.py`). A reward model is a classifier
with one label.

Legend: b batch, s sequence, d hidden, c labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger, once
from ed_infra.outputs import SequenceClassifierOutput
from ed_layers.parts import Parts
from jaxtyping import Array, Float, Int

from ed_models.checkpoints.task_rules import SCORE, classifier_rules
from ed_models.tasks.head_model import BodyT, HeadModel, task_class
from ed_models.weights.blocks import Shapes

logger = get_logger(__name__)
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


class SequenceClassifier(HeadModel[BodyT]):
    """A decoder body under `model`, and `score`, which maps the last token of a row to labels."""

    @classmethod
    def for_family(cls, family: type[HeadModel[BodyT]]) -> type[SequenceClassifier[BodyT]]:
        """Return the classifier with the body of a family."""

        class Classifier(SequenceClassifier[Any]):
            __doc__ = f"{SequenceClassifier.__doc__}\n\nThe body is that of `{family.__name__}`."
            body_class = family.body_class
            WEIGHTS = classifier_rules(family.WEIGHTS)

        return task_class(Classifier, family, "ForSequenceClassification")

    def add_head(self, parts: Parts) -> None:
        """Create the matrix [d, c], without bias; `config.num_labels` is c."""
        labels = self.config.num_labels or 0
        if labels < 1:
            raise ConfigError(f"num_labels is {labels}; it must be at least 1")
        self.score = parts.linear(self.features, labels, axes=("embed", None))

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_embeds: Float[Array, "b s d"] | None = None,
        attention_mask: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        position_ids: Int[Array, "b s"] | None = None,
        past_key_values: object = None,
        logits_at: Literal["last", "all"] = "last",
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
        labels: Array | None = None,
    ) -> SequenceClassifierOutput:
        """Score each row at its last token, or every token.

        The last token is the last nonzero position of `attention_mask`. Without a mask, the last
        token is the last one that differs from `config.pad_token_id`. Without both, or with only
        `inputs_embeds`, the last token is the last position of the row.

        Args:
            input_ids: token ids [b, s], or `inputs_embeds` [b, s, d] instead.
            attention_mask: nonzero = a token, [b, s].
            segment_ids: packed documents 1, 2, ...; 0 = padding; then `logits_at` is "all".
            position_ids: rotary positions; default: count the tokens of a row (of a segment).
            past_key_values: a cache, or None.
            logits_at: "last" [b, c]; or "all" [b, s, c], for packed rows.
            key: dropout key; None = deterministic.
            output_hidden_states: also return the input of every layer and the last hidden state.
            labels: also return the loss of `compute_loss`.

        Raises:
            ConfigError: several rows of tokens without a mask and without a padding token; or
                packed rows with `logits_at` "last".
        """
        if segment_ids is not None and logits_at == "last":
            raise ConfigError('a packed row has several last tokens: set logits_at="all"')
        body = self.model(
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            segment_ids=segment_ids,
            position_ids=position_ids,
            past_key_values=past_key_values,
            key=key,
            output_hidden_states=output_hidden_states,
        )
        hidden = body.last_hidden_state
        if logits_at == "last":
            last = self._last_token(hidden.shape[:2], input_ids, attention_mask)
            hidden_at = hidden[jnp.arange(hidden.shape[0]), last]
        else:
            hidden_at = hidden
        scores = self.score(hidden_at)
        output = SequenceClassifierOutput(
            logits=scores.astype(jnp.float32),
            last_hidden_state=hidden,
            past_key_values=body.past_key_values,
            hidden_states=body.hidden_states,
            losses=body.losses,
            aux=body.aux,
            updates={f"model/{path}": value for path, value in body.updates.items()},
        )
        return self.add_loss(output, labels)

    def _last_token(
        self, shape: tuple[int, ...], input_ids: jax.Array | None, mask: jax.Array | None
    ) -> Int[Array, " b"]:
        b, s = shape
        pad = self.config.pad_token_id
        if mask is not None:
            real = jnp.asarray(mask) != 0
        elif input_ids is None or (pad is None and b == 1):
            return jnp.full(b, s - 1)
        elif pad is None:
            raise ConfigError(
                f"the padding of {b} rows is unknown: pass attention_mask, or use a configuration "
                'with pad_token_id (config_kwargs={"pad_token_id": ...})'
            )
        else:
            real = jnp.asarray(input_ids) != pad
        return jnp.argmax(jnp.where(real, jnp.arange(s), 0), axis=-1)

    def compute_loss(
        self, input_ids: Int[Array, "b s"], labels: Array, **inputs: Any
    ) -> tuple[SequenceClassifierOutput, Float[Array, ""]]:
        """Compute the mean loss of the rows for `config.problem_type`.

        Args:
            labels: int [b] for classes; float [b] or [b, c] for a regression; 0 or 1 [b, c] for
                several labels per row. Without a `problem_type`, a model with one label is a
                regression, integers are classes, and other labels are several per row.
            inputs: further arguments of `__call__`.

        Returns:
            The output with `loss`, and the number of rows.

        Raises:
            ConfigError: `problem_type` is unknown.
        """
        output = self(input_ids, labels=labels, **inputs)
        return output, jnp.asarray(float(jnp.asarray(labels).shape[0]))

    def add_loss(
        self, output: SequenceClassifierOutput, labels: Array | None
    ) -> SequenceClassifierOutput:
        """Return the output with the mean loss of its logits, or without labels the output."""
        if labels is None:
            return output
        return output.replace(loss=labelled_loss(self.config, output.logits, labels))

    @classmethod
    def new_tensors(cls, config: EasyDeLBaseConfig, missing: Shapes) -> Mapping[str, np.ndarray]:
        """Return a random head for a checkpoint of another task, and log a warning."""
        saved = config.architectures or []
        if SCORE.hf not in missing or any("SequenceClassification" in name for name in saved):
            return {}
        once(
            logger,
            f"the checkpoint was saved from {', '.join(saved) or 'an unknown class'}: "
            f"{SCORE.hf} of {cls.__name__} is randomly initialized and must be trained",
        )
        std = getattr(config, "initializer_range", 0.02)
        values = np.random.default_rng(0).normal(0.0, std, missing[SCORE.hf])
        return {SCORE.hf: values.astype(np.float32)}


def labelled_loss(
    config: EasyDeLBaseConfig, logits: Float[Array, "b c"], labels: Array
) -> Float[Array, ""]:
    """Return the mean loss of the rows of a classifier; see `SequenceClassifier.compute_loss`."""
    labels = jnp.asarray(labels)
    return problem_loss(logits, labels, resolve_problem_type(config, labels))


def resolve_problem_type(config: EasyDeLBaseConfig, labels: jax.Array) -> str:
    """Return `config.problem_type`, or the problem that follows from the labels.

    Raises:
        ConfigError: `problem_type` is unknown.
    """
    problem = config.problem_type
    if problem is not None and problem not in PROBLEMS:
        raise ConfigError(f"problem_type is {problem!r}; it must be one of {PROBLEMS}")
    if problem is not None:
        return problem
    if config.num_labels == 1:
        return PROBLEMS[0]
    return PROBLEMS[1] if jnp.issubdtype(labels.dtype, jnp.integer) else PROBLEMS[2]


def problem_loss(logits: Float[Array, "b c"], labels: jax.Array, problem: str) -> Float[Array, ""]:
    """Return the mean loss of the rows for a problem; see `SequenceClassifier.compute_loss`."""
    if problem == "regression":
        return jnp.mean((logits.reshape(labels.shape) - labels) ** 2)
    if problem == "single_label_classification":
        logp = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(logp, labels.reshape(-1, 1), axis=-1))
    labels = labels.astype(jnp.float32)
    return jnp.mean(jnp.logaddexp(0.0, logits) - labels * logits)
