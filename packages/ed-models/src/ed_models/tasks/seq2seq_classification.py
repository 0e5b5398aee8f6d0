"""Classification of texts with an encoder-decoder (BART): encoder and decoder read the text.

Numbers and names follow `BartForSequenceClassification` of Hugging Face. Legend: b batch,
s sequence, d hidden, c labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import SequenceClassifierOutput
from ed_layers.parts import Parts
from jaxtyping import Array, Int

from ed_models.base.new_heads import new_heads
from ed_models.tasks.classification import SequenceClassifier
from ed_models.tasks.encoders import common
from ed_models.tasks.head_model import task_class
from ed_models.weights.blocks import Shapes
from ed_models.weights.rules import Rule, equal, ignore, transpose

_HEAD = "classification_head"
_RULES = (
    Rule("dense.kernel", f"{_HEAD}.dense.weight", transpose),
    Rule("dense.bias", f"{_HEAD}.dense.bias", equal),
    Rule("score.kernel", f"{_HEAD}.out_proj.weight", transpose),
    Rule("score.bias", f"{_HEAD}.out_proj.bias", equal),
)


class Seq2SeqClassifier(SequenceClassifier[Any]):
    """An encoder-decoder under `model`, and a head for the decoder's last end token.

    The decoder reads the text of the encoder, shifted right.
    """

    input_names = ("input_ids", "attention_mask")

    @classmethod
    def for_family(cls, family: type[Any]) -> type[Any]:
        """Return the classifier with the body of a family."""
        content = {
            "__doc__": f"{cls.__doc__}\n\nThe body is that of `{family.__name__}`.",
            "body_class": family.body_class,
            "first_tokens": family.first_tokens,
            "WEIGHTS": (
                *_RULES,
                *family.WEIGHTS,
                ignore("lm_head.weight"),
                ignore("final_logits_bias"),
            ),
        }
        metaclass = type(cls)
        model_class = metaclass(cls.__name__, (cls,), content)
        return task_class(model_class, family, "ForSequenceClassification")

    def first_tokens(self, tokens: Int[Array, "b s"]) -> Int[Array, "b 1"]:
        """Return the first token that the decoder reads; see `Seq2SeqLM.first_tokens`."""
        raise ConfigError("the family has no first token of the decoder")

    def add_head(self, parts: Parts) -> None:
        """Create the two layers of the head; `config.num_labels` is c."""
        labels = self.config.num_labels or 0
        if labels < 1:
            raise ConfigError(f"num_labels is {labels}; it must be at least 1")
        d = self.features
        self.dense = parts.linear(d, d, axes=("embed", None), bias=True)
        self.score = parts.linear(d, labels, axes=("embed", None), bias=True)

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        attention_mask: Int[Array, "b s"] | None = None,
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
        labels: Array | None = None,
        **inputs: object,
    ) -> SequenceClassifierOutput:
        """Score each row at its last end-of-text token, or at its last token without one.

        Args:
            input_ids: token ids [b, s].
            attention_mask: nonzero = a token of the encoder, [b, s].
            key: dropout key; None = deterministic.
            output_hidden_states: also return the input of every layer and the last hidden state.
            labels: also return the loss of `compute_loss`.
            inputs: none; the decoder reads the shifted tokens.

        Raises:
            TypeError: there are no tokens, or further arguments.
        """
        if input_ids is None or inputs:
            raise TypeError(f"pass input_ids and attention_mask only, got {sorted(inputs)}")
        tokens = jnp.asarray(input_ids)
        encoder_arrays = {"input_ids": tokens, "attention_mask": attention_mask}
        arrays = Inputs(
            {name: array for name, array in encoder_arrays.items() if array is not None}
        )
        encoded = self.model.encode(arrays, key=key)
        shifted = jnp.concatenate([self.first_tokens(tokens), tokens[:, :-1]], axis=1)
        body = self.model(
            shifted, encoded=encoded, key=key, output_hidden_states=output_hidden_states
        )
        hidden = body.last_hidden_state
        b, s = tokens.shape
        is_end = tokens == self.config.eos_token_id
        last_end = jnp.argmax(jnp.where(is_end, jnp.arange(s), -1), axis=-1)
        last_token = self._last_token((b, s), tokens, attention_mask)
        at = jnp.where(is_end.any(axis=-1), last_end, last_token)
        scores = self.score(jnp.tanh(self.dense(hidden[jnp.arange(b), at])))
        output = SequenceClassifierOutput(logits=scores.astype(jnp.float32), **common(body))
        return self.add_loss(output, labels)

    @classmethod
    def new_tensors(cls, config: EasyDeLBaseConfig, missing: Shapes) -> Mapping[str, np.ndarray]:
        """Return a random head for a checkpoint of another task, and log a warning."""
        owners = [f"{_HEAD}.dense", f"{_HEAD}.out_proj"]
        return new_heads(TaskType.SEQUENCE_CLASSIFICATION, config, missing, owners)


#: Further tasks of encoder-decoders with this head.
CLASSIFIER_TASKS: Mapping[TaskType, Callable[[type[Any]], type]] = {
    TaskType.SEQUENCE_CLASSIFICATION: Seq2SeqClassifier.for_family,
}
