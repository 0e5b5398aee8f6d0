"""The tasks of bidirectional encoders: masked tokens, labels of texts and tokens, answers, choices.

A family registers its `MaskedLM` class; the classes of the other tasks follow from its `names`.
Numbers follow the classes of Hugging Face with the same endings, such as `BertForMaskedLM`.

Legend: b batch, s sequence, d hidden, e embedding size, v vocabulary, c labels, n choices or
selected positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from ed_layers.parts import Parts
from ed_layers.projections.head import Head
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.encoder import TextEncoder, first_tokens
from ed_models.checkpoints.task_rules import body_rules
from ed_models.tasks.causal_lm import LogitsAt, VocabularyHead, same_targets
from ed_models.tasks.classification import SequenceClassifier
from ed_models.tasks.embedding import Embedder
from ed_models.tasks.encoder_names import EncoderNames, HeadNames, HeadTransform
from ed_models.tasks.head_model import HeadModel, task_class
from ed_models.tasks.pooling import Pooling
from ed_models.weights.blocks import Shapes

if TYPE_CHECKING:
    from ed_layers.losses import TokenLoss

#: Label of positions without a loss.
_IGNORED = -100


class EncoderTask(HeadModel[TextEncoder]):
    """The shared part of the tasks: the head `transform` and `score` on the hidden states.

    Attributes:
        names: names of the parameters in checkpoints, of the family.
        task: the task of the class.
        labels: number of labels; None = `config.num_labels`.
    """

    names: ClassVar[EncoderNames]
    task: ClassVar[TaskType]
    labels: ClassVar[int | None] = None

    @classmethod
    def for_family(cls, family: type[Any]) -> type[Any]:
        """Return the class of this task with the body of a family."""
        content = {
            "__doc__": f"{cls.__doc__}\n\nThe body is that of `{family.__name__}`.",
            "body_class": family.body_class,
            "names": family.names,
            "input_names": family.input_names,
            "WEIGHTS": family.names.weights(cls.task),
        }
        metaclass = type(cls)
        model_class = metaclass(cls.__name__, (cls,), content)
        ending = "".join(word.capitalize() for word in cls.task.split("-"))
        return task_class(model_class, family, f"For{ending}")

    @property
    def form(self) -> HeadNames:
        """The form of the head."""
        return self.names.heads[self.task]

    def add_head(self, parts: Parts) -> None:
        """Create the layers of the head."""
        count = (self.config.num_labels if self.labels is None else self.labels) or 0
        if count < 1:
            raise ConfigError(f"num_labels is {count}; it must be at least 1")
        self.transform = HeadTransform(parts, self.form)
        self.score = parts.linear(self.features, count, axes=("embed", None), bias=True)

    def scores(self, hidden: Float[Array, "*rows d"], key: jax.Array | None) -> Array:
        """Return the scores of the labels, [..., c] float32; `key` is the dropout key."""
        return self.score(self.transform(hidden, key)).astype(jnp.float32)

    @property
    def reads_mean(self) -> bool:
        """Whether a head for texts reads the mean of the tokens instead of the first token."""
        return getattr(self.config, "classifier_pooling", "cls") == "mean"

    def pool_features(
        self, hidden: Float[Array, "b s d"], mask: Int[Array, "b s"] | None
    ) -> Float[Array, "b d"]:
        """Return the features of each text; `mask` is nonzero for tokens."""
        if self.reads_mean:
            return Pooling()(hidden, mask).astype(hidden.dtype)
        return first_tokens(hidden, mask)

    @classmethod
    def new_tensors(cls, config: EasyDeLBaseConfig, missing: Shapes) -> Mapping[str, np.ndarray]:
        """Return a random head for a checkpoint of another task, and log a warning."""
        return cls.names.new_tensors(cls.task, config, missing)


class EncoderClassifier(EncoderTask, SequenceClassifier[TextEncoder]):
    """An encoder under `model`, and a head that maps the first token of a row to labels.

    With `classifier_pooling: mean` in the configuration, the head reads the mean of the tokens.
    """

    task = TaskType.SEQUENCE_CLASSIFICATION

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        attention_mask: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        logits_at: Literal["last", "all"] = "last",
        key: jax.Array | None = None,
        labels: Array | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutput:
        """Score each row, or every token.

        Args:
            input_ids: token ids [b, s].
            attention_mask: nonzero = a token, [b, s].
            segment_ids: packed documents 1, 2, ...; 0 = padding; then `logits_at` is "all".
            logits_at: "last": one score per row [b, c]; "all" [b, s, c], of which a packed document
                uses its first token.
            key: dropout key; None = deterministic.
            labels: also return the loss of `compute_loss`.
            inputs: further arguments of `TextEncoder`.

        Raises:
            ConfigError: packed rows with `logits_at` "last", or "all" with the mean of the tokens.
        """
        if segment_ids is not None and logits_at == "last":
            raise ConfigError('a packed row has several first tokens: set logits_at="all"')
        if self.reads_mean and logits_at == "all":
            raise ConfigError(
                "the classifier reads the mean of a text (classifier_pooling: mean), and a packed "
                "row has several texts: pass each text in a row"
            )
        body = self.model(
            input_ids, attention_mask=attention_mask, segment_ids=segment_ids, key=key, **inputs
        )
        hidden = body.last_hidden_state
        features = self.pool_features(hidden, attention_mask) if logits_at == "last" else hidden
        output = SequenceClassifierOutput(logits=self.scores(features, key), **common(body))
        return self.add_loss(output, labels)


class TokenClassifier(EncoderTask):
    """An encoder under `model`, and a head that maps every token to labels."""

    task = TaskType.TOKEN_CLASSIFICATION

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        key: jax.Array | None = None,
        labels: Int[Array, "b s"] | None = None,
        **inputs: Any,
    ) -> TokenClassifierOutput:
        """Score every token.

        Args:
            input_ids: token ids [b, s].
            key: dropout key; None = deterministic.
            labels: also return the loss of `compute_loss`.
            inputs: further arguments of `TextEncoder`.
        """
        body = self.model(input_ids, key=key, **inputs)
        scores = self.scores(body.last_hidden_state, key)
        loss = None if labels is None else mean_cross_entropy(scores, labels)[0]
        return TokenClassifierOutput(logits=scores, loss=loss, **common(body))

    def compute_loss(
        self, input_ids: Int[Array, "b s"], labels: Int[Array, "b s"], **inputs: Any
    ) -> tuple[TokenClassifierOutput, Float[Array, ""]]:
        """Compute the mean cross-entropy of the labels in nats; a label of -100 is ignored.

        Returns:
            The output with `loss`, and the number of tokens in the mean.
        """
        output = self(input_ids, **inputs)
        loss, count = mean_cross_entropy(output.logits, labels)
        return output.replace(loss=loss), count


class QuestionAnswerer(EncoderTask):
    """An encoder under `model`, and a head that scores each token as start and end of an answer."""

    task = TaskType.QUESTION_ANSWERING
    labels = 2

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        key: jax.Array | None = None,
        **inputs: Any,
    ) -> QuestionAnsweringOutput:
        """Score every token; arguments as of `TokenClassifier`."""
        body = self.model(input_ids, key=key, **inputs)
        scores = self.scores(body.last_hidden_state, key)
        return QuestionAnsweringOutput(scores[..., 0], scores[..., 1], **common(body))

    def compute_loss(
        self,
        input_ids: Int[Array, "b s"],
        start_positions: Int[Array, " b"],
        end_positions: Int[Array, " b"],
        **inputs: Any,
    ) -> tuple[QuestionAnsweringOutput, Float[Array, ""]]:
        """Compute the mean of the cross-entropies of start and end in nats.

        Args:
            input_ids: token ids [b, s].
            start_positions, end_positions: index of the first and the last token of the answer; a
                row whose index is s or more is ignored.
            inputs: further arguments of `__call__`.

        Returns:
            The output with `loss`, and the number of rows in the mean of the starts.
        """
        output = self(input_ids, **inputs)
        length = output.start_logits.shape[1]
        span_positions = [jnp.asarray(x) for x in (start_positions, end_positions)]
        start, end = (jnp.where(x >= length, _IGNORED, jnp.maximum(x, 0)) for x in span_positions)
        first, count = mean_cross_entropy(output.start_logits, start)
        last, _ = mean_cross_entropy(output.end_logits, end)
        return output.replace(loss=(first + last) / 2), count


class MultipleChoice(EncoderTask):
    """An encoder under `model`, and a head that scores each of several texts of a row."""

    task = TaskType.MULTIPLE_CHOICE
    labels = 1

    def __call__(
        self,
        input_ids: Int[Array, "b n s"],
        *,
        attention_mask: Int[Array, "b n s"] | None = None,
        key: jax.Array | None = None,
        labels: Int[Array, " b"] | None = None,
        **inputs: Array | None,
    ) -> SequenceClassifierOutput:
        """Score the choices of each row, [b, n].

        Args:
            input_ids: token ids [b, n, s].
            attention_mask: nonzero = a token.
            key: dropout key; None = deterministic.
            labels: also return the loss of `compute_loss`.
            inputs: further arrays of `TextEncoder`, each [b, n, s].
        """
        b, n, s = input_ids.shape
        flat = {"input_ids": input_ids, "attention_mask": attention_mask, **inputs}
        arrays = {name: x.reshape(b * n, s) for name, x in flat.items() if x is not None}
        body = self.model(**arrays, key=key)
        features = self.pool_features(body.last_hidden_state, arrays.get("attention_mask"))
        scores = self.scores(features, key).reshape(b, n)
        loss = None if labels is None else mean_cross_entropy(scores, labels)[0]
        return SequenceClassifierOutput(logits=scores, loss=loss, **common(body))

    def compute_loss(
        self, input_ids: Int[Array, "b n s"], labels: Int[Array, " b"], **inputs: Any
    ) -> tuple[SequenceClassifierOutput, Float[Array, ""]]:
        """Compute the mean cross-entropy of the right choices in nats, and the number of rows."""
        output = self(input_ids, **inputs)
        loss, count = mean_cross_entropy(output.logits, labels)
        return output.replace(loss=loss), count


class MaskedLM(VocabularyHead):
    """An encoder under `model`, and a head that predicts tokens.

    A family registers a subclass with `body_class`, `names` and `WEIGHTS`.
    """

    names: ClassVar[EncoderNames]

    @classmethod
    def derive_task_classes(cls) -> Mapping[TaskType, Callable[[type[Any]], type[Any]]]:
        """Return task -> function that returns the class of the task for a family."""
        heads = (EncoderClassifier, TokenClassifier, QuestionAnswerer, MultipleChoice)
        return {
            TaskType.BASE_MODULE: pooled_body,
            TaskType.EMBEDDING: Embedder.for_family,
            **{head.task: head.for_family for head in heads if head.task in cls.names.heads},
        }

    def __init_subclass__(cls, **options: bool):
        super().__init_subclass__(**options)
        cls.input_names = cls.body_class.input_names
        cls.WEIGHTS = cls.names.weights(TaskType.MASKED_LM)
        cls.DERIVED = cls.derive_task_classes()

    @property
    def head_bias(self):
        return getattr(self.config, "decoder_bias", True)

    def add_head(self, parts: Parts) -> None:
        """Create the layers of the head, and the matrix of an untied model."""
        v, e = self.model.embed_tokens.embedding.shape
        self.transform = HeadTransform(parts, self.form, e)
        if self.is_tied and self.head_bias:
            self.output_bias = nnx.Param(jnp.zeros(v, parts.param_dtype), axes=("vocab",))
        elif not self.is_tied:
            self.lm_head = parts.linear(e, v, axes=("embed", "vocab"), bias=self.head_bias)

    @property
    def form(self) -> HeadNames:
        """The form of the head."""
        return self.names.heads[TaskType.MASKED_LM]

    def head(self) -> Head:
        """Return the last layer of the head; its input is the output of `transform`."""
        head = super().head()
        if hasattr(self, "output_bias"):
            return replace(head, bias=self.output_bias.get_value())
        return head

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        logits_at: LogitsAt = "all",
        labels: Int[Array, "b s"] | None = None,
        **inputs: Any,
    ) -> MaskedLMOutput:
        """Predict tokens.

        Args:
            input_ids: token ids [b, s].
            logits_at: positions of the logits; see `CausalLM.__call__`.
            labels: also return the loss of `compute_loss`.
            inputs: further arguments of `TextEncoder`.
        """
        body = self.model(input_ids, **inputs)
        logits, hidden = None, body.last_hidden_state
        if not isinstance(logits_at, str):
            hidden = hidden.reshape(-1, hidden.shape[-1])[logits_at]
        if not isinstance(logits_at, str) or logits_at == "all":
            logits = self.logits(self.transform(hidden))
        output = MaskedLMOutput(logits=logits, **common(body))
        return output if labels is None else self.add_loss(output, *same_targets(labels))[0]

    def compute_loss(
        self,
        input_ids: Int[Array, "b s"],
        labels: Int[Array, "b s"],
        *,
        loss_config: TokenLoss | None = None,
        **inputs: Any,
    ) -> tuple[MaskedLMOutput, Float[Array, ""]]:
        """Compute the mean cross-entropy of the labels in nats, without materializing the logits.

        Args:
            input_ids: token ids [b, s], in which some tokens are masked.
            labels: the original tokens of masked positions; -100 elsewhere.
            loss_config: additional terms of the loss.
            inputs: further arguments of `__call__`.

        Returns:
            The output with `loss`, and the number of tokens in the mean.
        """
        output = self(input_ids, logits_at="none", **inputs)
        return self.add_loss(output, *same_targets(labels), loss_config)

    def head_features(self, hidden: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        """Return the transformed hidden states."""
        return self.transform(hidden)

    @classmethod
    def new_tensors(cls, config: EasyDeLBaseConfig, missing: Shapes) -> Mapping[str, np.ndarray]:
        """Return a random head for a checkpoint of another task, and log a warning."""
        return cls.names.new_tensors(TaskType.MASKED_LM, config, missing)


def pooled_body(family: type[MaskedLM]) -> type[Any]:
    """Return the body of a family, with the pooler of the family if it has one."""
    names, body = family.names, cast(Any, family.body_class)
    pooler = names.heads.get(TaskType.BASE_MODULE)

    def new_tensors(cls: type, config: EasyDeLBaseConfig, missing: Shapes) -> Any:
        full_names = {f"{first}.{name}": shape for name, shape in missing.items()}
        new = names.new_tensors(TaskType.BASE_MODULE, config, full_names)
        return {name.partition(".")[2]: value for name, value in new.items()}

    first = "" if pooler is None else pooler.out.partition(".")[0]
    content = {
        "__doc__": body.__doc__,
        "WEIGHTS": body_rules(names.weights(TaskType.BASE_MODULE)),
        "pooler_activation": None if pooler is None else pooler.activation,
        "new_tensors": classmethod(new_tensors),
    }
    body_class = task_class(type(body)(body.__name__, (body,), content), family, "")
    body_class.__name__ = body_class.__qualname__ = body.__name__
    return body_class


def common(body: BaseModelOutput) -> dict[str, Any]:
    """Return the fields of the output of a body that the output of a task repeats."""
    return {
        "last_hidden_state": body.last_hidden_state,
        "hidden_states": body.hidden_states,
        "losses": body.losses,
        "aux": body.aux,
        "updates": {f"model/{path}": value for path, value in body.updates.items()},
    }


def mean_cross_entropy(
    logits: Float[Array, "*rows c"], labels: Int[Array, "*rows"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the mean cross-entropy of the labels that are not -100, and their number."""
    labels = jnp.asarray(labels)
    weights = (labels != _IGNORED).astype(jnp.float32)
    label_index = jnp.where(labels == _IGNORED, 0, labels)[..., None]
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), label_index, axis=-1)[..., 0]
    count = jnp.sum(weights)
    return -jnp.sum(logp * weights) / jnp.maximum(count, 1), count
