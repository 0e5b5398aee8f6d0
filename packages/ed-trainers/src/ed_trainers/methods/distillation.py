"""Knowledge distillation: a student learns a teacher's distribution of each next token.

Hinton et al., arXiv:1503.02531: `alpha * T^2 * divergence + (1 - alpha) * cross-entropy`; the
divergences are those of `losses.divergence`. Hidden states as in TinyBERT (1909.10351,
eq. 8), without a projection.

Legend: b rows, s positions, d hidden.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import CausalLMOutput, Metric

from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.feed import HostBatch
from ed_trainers.losses.divergence import compared
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.distillation import DistillationArguments
from ed_trainers.trainer import Trainer


class DistillationTrainer(Trainer):
    """Learns the next-token distributions of the frozen model `"teacher"`, and the labels.

    `arguments` are `DistillationArguments`; the teacher has the student's vocabulary.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = DistillationArguments
    frozen_models: ClassVar[tuple[str, ...]] = ("teacher",)
    arguments: DistillationArguments

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Shift labels by one, within segments; see `next_token_batch`."""
        return next_token_batch(batch)

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the loss summed over the tokens that are predicted."""
        arguments, weights = self.arguments, batch["weights"]
        compares = arguments.hidden_state_loss_weight > 0
        output, wanted, divergence, logp = compared(
            models.learner,
            models["teacher"],
            batch,
            key,
            placement=self.placement,
            beta=arguments.beta,
            temperature=arguments.temperature,
            chunk=arguments.lmhead_chunksize,
            hidden_states=compares,
        )
        scaled = arguments.temperature**2 * divergence
        losses = arguments.alpha * scaled - (1 - arguments.alpha) * logp
        figures = {"distillation_loss": scaled, "ce_loss": -logp}
        if compares:
            figures["hidden_state_loss"] = self._distance(output, wanted)
            losses += arguments.hidden_state_loss_weight * figures["hidden_state_loss"]
        count = jnp.sum(weights)
        metrics = {name: Metric.of(jnp.sum(weights * x), count) for name, x in figures.items()}
        return Loss.of(output, jnp.sum(weights * losses), count, **metrics)

    def _distance(self, student: CausalLMOutput, teacher: CausalLMOutput) -> jax.Array:
        """Mean squared distance of hidden states, over layers and features, [b, s]."""
        own, other = _layers(student), _layers(teacher)
        deep, deeper = len(own) - 1, len(other) - 1
        layers = self.arguments.hidden_state_layers or tuple(range(1, deep + 1))
        if max(layers) > deep:
            raise ConfigError(f"hidden_state_layers {list(layers)}: the student has {deep} layers")
        if own[-1].shape[-1] != other[-1].shape[-1]:
            raise ConfigError(
                f"the teacher's hidden states have {other[-1].shape[-1]} features, the student's "
                f"{own[-1].shape[-1]}: hidden_state_loss_weight needs models of equal width"
            )
        distances = [
            jnp.mean(
                jnp.square(
                    own[layer].astype(jnp.float32)
                    - jax.lax.stop_gradient(other[layer * deeper // deep]).astype(jnp.float32)
                ),
                axis=-1,
            )
            for layer in layers
        ]
        return jnp.mean(jnp.stack(distances), axis=0)


def _layers(output: CausalLMOutput) -> tuple[jax.Array, ...]:
    """The input of the first layer and the outputs of all, the last after the last norm."""
    assert output.hidden_states is not None
    assert output.last_hidden_state is not None
    return (*output.hidden_states[:-1], output.last_hidden_state)
