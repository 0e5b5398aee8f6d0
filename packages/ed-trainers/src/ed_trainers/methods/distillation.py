"""Knowledge distillation: a student learns a teacher's distribution of each next token.

Hinton et al., arXiv:1503.02531: `alpha * T^2 * divergence + (1 - alpha) * cross-entropy`; the
divergences are those of `losses.divergence`. Hidden states as in TinyBERT (1909.10351, eq. 8),
without a projection; attention as in MiniLM (2002.10957, eq. 5).

Legend: b rows, s positions, d hidden.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import CausalLMOutput, Metric
from ed_models.body.attention_maps import watched_attention

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.attention import attention_divergences
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
    progress_columns: ClassVar[tuple[str, ...]] = ("loss", "distillation_loss", "ce_loss")

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Shift labels by one, within segments; see `next_token_batch`."""
        return next_token_batch(batch)

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the loss summed over the tokens that are predicted."""
        arguments, weights = self.arguments, batch["weights"]
        shares = {
            "hidden_state_loss": (arguments.hidden_state_loss_weight, self._distance),
            "attention_loss": (arguments.attention_loss_weight, partial(self._attention, models)),
        }
        shares = {name: share for name, share in shares.items() if share[0]}
        output, wanted, divergence, logp = compared(
            models.learner,
            models["teacher"],
            batch,
            key,
            placement=self.placement,
            beta=arguments.beta,
            temperature=arguments.temperature,
            chunk=arguments.lmhead_chunksize,
            noise=arguments.neftune_noise_alpha,
            hidden_states=bool(shares),
        )
        scaled = arguments.temperature**2 * divergence
        losses = arguments.alpha * scaled - (1 - arguments.alpha) * logp
        figures = {"distillation_loss": scaled, "ce_loss": -logp}
        for name, (weight, compare) in shares.items():
            figures[name] = compare(output, wanted, batch)
            losses += weight * figures[name]
        count = jnp.sum(weights)
        metrics = {name: Metric.of(jnp.sum(weights * x), count) for name, x in figures.items()}
        return Loss.of(output, jnp.sum(weights * losses), count, **metrics)

    def _distance(
        self, student: CausalLMOutput, teacher: CausalLMOutput, batch: Batch
    ) -> jax.Array:
        """Mean squared distance of hidden states, over layers and features, [b, s]."""
        del batch
        own, other = _layers(student), _layers(teacher)
        pairs = _paired("hidden_state_layers", self.arguments.hidden_state_layers, own, other)
        if own[-1].shape[-1] != other[-1].shape[-1]:
            raise ConfigError(
                f"the teacher's hidden states have {other[-1].shape[-1]} features, the student's "
                f"{own[-1].shape[-1]}: hidden_state_loss_weight needs models of equal width"
            )
        distances = [
            jnp.mean(
                jnp.square(
                    own[layer].astype(jnp.float32)
                    - jax.lax.stop_gradient(other[of_teacher]).astype(jnp.float32)
                ),
                axis=-1,
            )
            for layer, of_teacher in pairs
        ]
        return jnp.mean(jnp.stack(distances), axis=0)

    def _attention(
        self, models: Models, student: CausalLMOutput, teacher: CausalLMOutput, batch: Batch
    ) -> jax.Array:
        """Mean divergence of the attention weights of each query, over layers and heads, [b, s]."""
        own, other = _layers(student), _layers(teacher)
        layers = self.arguments.attention_layers or (len(own) - 1,)
        pairs = _paired("attention_layers", layers, own, other)
        places = {name: batch[name] for name in ("segment_ids", "position_ids")}
        # Layer 1 reads the first hidden states.
        sides = (models.learner, own, 0), (models["teacher"], other, 1)
        watched = (
            watched_attention(model, hidden, [pair[side] - 1 for pair in pairs], **places)
            for model, hidden, side in sides
        )
        divergences = [attention_divergences(*pair) for pair in zip(*watched, strict=True)]
        return jnp.mean(jnp.stack(divergences), axis=0)


def _paired(
    option: str,
    layers: tuple[int, ...] | None,
    student: tuple[jax.Array, ...],
    teacher: tuple[jax.Array, ...],
) -> list[tuple[int, int]]:
    """Layers of the student, from 1, each with the teacher's at the same share of its depth."""
    deep, deeper = len(student) - 1, len(teacher) - 1
    layers = layers or tuple(range(1, deep + 1))
    if max(layers) > deep:
        raise ConfigError(f"{option} {list(layers)}: the student has {deep} layers")
    return [(layer, layer * deeper // deep) for layer in layers]


def _layers(output: CausalLMOutput) -> tuple[jax.Array, ...]:
    """The input of the first layer and the outputs of all, the last after the last norm."""
    assert output.hidden_states is not None
    assert output.last_hidden_state is not None
    return (*output.hidden_states[:-1], output.last_hidden_state)
