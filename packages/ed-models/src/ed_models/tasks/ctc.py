"""Models that score the labels of every time step of speech, and a blank (Graves et al. 2006).

Legend: b batch, n samples, t time steps, v labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError
from ed_infra.outputs import TokenClassifierOutput
from ed_layers.parts import Parts
from jaxtyping import Array, Float, Int

from ed_models.base.new_heads import new_heads, new_training_tensors
from ed_models.tasks.encoders import common
from ed_models.tasks.head_model import HeadModel
from ed_models.weights.blocks import Shapes

#: Ends of the names of classes of transformers with other heads.
OTHER_HEADS = ("ForSequenceClassification", "ForAudioFrameClassification", "ForXVector")


class CTCModel(HeadModel):
    """An encoder of speech under `model`, and a head `lm_head` for the labels.

    The encoder has `output_lengths(lengths)`: the time steps of rows with these numbers of samples.
    """

    input_names = ("input_values", "attention_mask")

    def add_head(self, parts: Parts) -> None:
        """Create the head."""
        self.lm_head = parts.linear(
            self.features, parts.config.vocab_size, axes=("embed", "vocab"), bias=True
        )

    def output_lengths(self, lengths: Int[Array, " b"]) -> Int[Array, " b"]:
        """Return the number of time steps of rows with these numbers of samples."""
        return self.model.output_lengths(lengths)

    def __call__(
        self, input_values: Float[Array, "b n"], *, key: jax.Array | None = None, **inputs: Any
    ) -> TokenClassifierOutput:
        """Score the labels of every time step.

        Args:
            input_values: samples of sound.
            key: dropout key; None = deterministic.
            inputs: `attention_mask` [b, n] and `output_hidden_states` of the encoder.
        """
        body = self.model(input_values, key=key, **inputs)
        logits = self.lm_head(body.last_hidden_state).astype(jnp.float32)
        return TokenClassifierOutput(logits=logits, **common(body))

    @classmethod
    def new_tensors(cls, config: EasyDeLBaseConfig, missing: Shapes) -> Mapping[str, np.ndarray]:
        """Return a random head for a checkpoint of pretraining, and log a warning.

        Raises:
            CheckpointError: the checkpoint has the head of another task.
        """
        head_names = [
            name for name in config.architectures or () if str(name).endswith(OTHER_HEADS)
        ]
        if head_names and any(name.startswith("lm_head.") for name in missing):
            raise CheckpointError(
                f"the checkpoint was saved from {', '.join(head_names)}, whose head scores no "
                "labels "
                "of CTC: load recordings' classes with the task audio-classification, or train a "
                "CTC head from the checkpoint of pretraining"
            )
        head = new_heads(TaskType.CTC, config, missing, ["lm_head"])
        return {**head, **new_training_tensors(config, missing)}


def best_labels(logits: Float[np.ndarray, "t v"], blank: int) -> list[int]:
    """Return the labels of the best path: the best label of each step, merged, without blanks."""
    path = np.argmax(logits, axis=-1)
    changes = np.flatnonzero(np.diff(path, prepend=-1))
    return [int(label) for label in path[changes] if label != blank]
