"""Labels of recordings: the mean of the time steps of a speech encoder, and a linear layer.

Numbers and names follow `Wav2Vec2ForSequenceClassification` of Hugging Face. Legend: b batch,
n samples, t time steps, c labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import SequenceClassifierOutput
from ed_layers.convolution import real_steps
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.base.new_heads import new_heads, new_training_tensors
from ed_models.tasks.classification import labelled_loss
from ed_models.tasks.encoders import common
from ed_models.tasks.head_model import HeadModel
from ed_models.weights.blocks import Shapes

#: End of the names of classes of transformers with this head.
CLASSIFIER = "ForSequenceClassification"


class AudioClassifier(HeadModel):
    """An encoder of speech under `model`, a projector, and a classifier of the mean time step.

    With `use_weighted_layer_sum`, the head reads a trained mean of the states of all layers.
    """

    input_names = ("input_values", "attention_mask")

    def add_head(self, parts: Parts) -> None:
        """Create the head; `config.num_labels` is c."""
        config, labels = self.config, self.config.num_labels or 0
        if labels < 1:
            raise ConfigError(f"num_labels is {labels}; it must be at least 1")
        size = config.classifier_proj_size
        self.projector = parts.linear(self.features, size, axes=("embed", None), bias=True)
        self.classifier = parts.linear(size, labels, axes=(None, None), bias=True)
        if config.use_weighted_layer_sum:
            count = config.num_hidden_layers + 1
            weights = jnp.full((count,), 1 / count, parts.param_dtype)
            self.layer_weights = nnx.Param(weights, axes=(None,))

    def __call__(
        self,
        input_values: Float[Array, "b n"],
        *,
        attention_mask: Int[Array, "b n"] | None = None,
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
        labels: Array | None = None,
    ) -> SequenceClassifierOutput:
        """Score the labels of each recording.

        Args:
            input_values: samples of sound.
            attention_mask: nonzero = a sample, zero = padding at the end of a row.
            key: dropout key; None = deterministic.
            output_hidden_states: also return the input of every layer and the last hidden state.
            labels: also return the loss of `compute_loss`.
        """
        is_weighted = hasattr(self, "layer_weights")
        body = self.model(
            input_values,
            attention_mask=attention_mask,
            key=key,
            output_hidden_states=output_hidden_states or is_weighted,
        )
        x = body.last_hidden_state
        if is_weighted:
            weights = jax.nn.softmax(self.layer_weights.get_value().astype(jnp.float32))
            x = jnp.einsum("l,lbtd->btd", weights, jnp.stack(body.hidden_states))
        x = self.projector(x)
        b, n = input_values.shape
        lengths = jnp.full((b,), n)
        if attention_mask is not None:
            lengths = jnp.sum(jnp.asarray(attention_mask) != 0, axis=1)
        steps = self.model.output_lengths(lengths)
        real = real_steps(steps, x.shape[1])[..., None]
        mean = jnp.where(real, x, 0).sum(axis=1) / jnp.maximum(real.sum(axis=1), 1)
        logits = self.classifier(mean).astype(jnp.float32)
        loss = None if labels is None else labelled_loss(self.config, logits, labels)
        return SequenceClassifierOutput(logits=logits, loss=loss, **common(body))

    def compute_loss(
        self, input_values: Float[Array, "b n"], labels: Array, **inputs: Any
    ) -> tuple[SequenceClassifierOutput, Float[Array, ""]]:
        """Compute the mean loss of the rows; see `SequenceClassifier.compute_loss`."""
        output = self(input_values, labels=labels, **inputs)
        return output, jnp.asarray(float(jnp.asarray(labels).shape[0]))

    @classmethod
    def new_tensors(cls, config: EasyDeLBaseConfig, missing: Shapes) -> Mapping[str, np.ndarray]:
        """Return a random head for a checkpoint of another task, and log a warning."""
        training = new_training_tensors(config, missing)
        if any(str(name).endswith(CLASSIFIER) for name in config.architectures or ()):
            return training
        owners = ("projector", "classifier", "layer_weights")
        return {**new_heads(TaskType.AUDIO_CLASSIFICATION, config, missing, owners), **training}
