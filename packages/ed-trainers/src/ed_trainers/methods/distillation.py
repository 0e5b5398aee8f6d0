"""Knowledge distillation: the student is trained on a teacher's distribution of each next token.

Hinton et al., arXiv:1503.02531: `alpha * T^2 * divergence + (1 - alpha) * cross-entropy`; the
divergences are those of `losses.divergence`. Hidden states as in TinyBERT (1909.10351, eq. 8),
without a projection; attention as in MiniLM (2002.10957, eq. 5).

Legend: b rows, s positions, d hidden.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.outputs import CausalLMOutput, Metric
from ed_models.body.attention_maps import watched_attention

from ed_trainers.arguments import METHODS
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models
from ed_trainers.losses.attention import attention_divergences
from ed_trainers.losses.divergence import compare_models
from ed_trainers.methods.sft import prepare
from ed_trainers.options.distillation import DistillationArguments
from ed_trainers.trainer import Trainer


def loss(
    run: MethodRun[DistillationArguments], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return the loss summed over the predicted tokens."""
    arguments, weights = run.arguments, batch["weights"]
    shares = {
        "hidden_state_loss": (arguments.hidden_state_loss_weight, partial(_distance, run)),
        "attention_loss": (arguments.attention_loss_weight, partial(_attention, run, models)),
    }
    shares = {name: share for name, share in shares.items() if share[0]}
    output, teacher_output, divergence, logp = compare_models(
        models.learner,
        models["teacher"],
        batch,
        key,
        placement=run.placement,
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
        figures[name] = compare(output, teacher_output, batch)
        losses += weight * figures[name]
    count = jnp.sum(weights)
    metrics = {name: Metric.of(jnp.sum(weights * x), count) for name, x in figures.items()}
    return Loss.of(output, jnp.sum(weights * losses), count, **metrics)


def _distance(
    run: MethodRun[DistillationArguments],
    student: CausalLMOutput,
    teacher: CausalLMOutput,
    batch: Batch,
) -> jax.Array:
    """Return the mean squared distance of hidden states, over layers and features, [b, s]."""
    del batch
    student_layers, teacher_layers = _layers(student), _layers(teacher)
    pairs = _pair_layers(
        "hidden_state_layers", run.arguments.hidden_state_layers, student_layers, teacher_layers
    )
    if student_layers[-1].shape[-1] != teacher_layers[-1].shape[-1]:
        raise ConfigError(
            f"the teacher's hidden states have {teacher_layers[-1].shape[-1]} features, the "
            "student's "
            f"{student_layers[-1].shape[-1]}: hidden_state_loss_weight needs models of equal width"
        )
    distances = [
        jnp.mean(
            jnp.square(
                student_layers[layer].astype(jnp.float32)
                - jax.lax.stop_gradient(teacher_layers[teacher_layer]).astype(jnp.float32)
            ),
            axis=-1,
        )
        for layer, teacher_layer in pairs
    ]
    return jnp.mean(jnp.stack(distances), axis=0)


def _attention(
    run: MethodRun[DistillationArguments],
    models: Models,
    student: CausalLMOutput,
    teacher: CausalLMOutput,
    batch: Batch,
) -> jax.Array:
    """Return the mean divergence of the attention weights of each query, [b, s]."""
    student_layers, teacher_layers = _layers(student), _layers(teacher)
    layers = run.arguments.attention_layers or (len(student_layers) - 1,)
    pairs = _pair_layers("attention_layers", layers, student_layers, teacher_layers)
    places = {name: batch[name] for name in ("segment_ids", "position_ids")}
    # Layer 1 reads the first hidden states.
    sides = (models.learner, student_layers, 0), (models["teacher"], teacher_layers, 1)
    watched = (
        watched_attention(model, hidden, [pair[side] - 1 for pair in pairs], **places)
        for model, hidden, side in sides
    )
    divergences = [attention_divergences(*pair) for pair in zip(*watched, strict=True)]
    return jnp.mean(jnp.stack(divergences), axis=0)


def _pair_layers(
    option: str,
    layers: tuple[int, ...] | None,
    student: tuple[jax.Array, ...],
    teacher: tuple[jax.Array, ...],
) -> list[tuple[int, int]]:
    """Return pairs of layers, from 1, at the same share of the depth of student and teacher."""
    deep, deeper = len(student) - 1, len(teacher) - 1
    layers = layers or tuple(range(1, deep + 1))
    if max(layers) > deep:
        raise ConfigError(f"{option} {list(layers)}: the student has {deep} layers")
    return [(layer, layer * deeper // deep) for layer in layers]


def _layers(output: CausalLMOutput) -> tuple[jax.Array, ...]:
    """Return the input of the first layer and the outputs of all layers, after the last norm."""
    assert output.hidden_states is not None
    assert output.last_hidden_state is not None
    return (*output.hidden_states[:-1], output.last_hidden_state)


DISTILLATION = Method[MethodRun[DistillationArguments]](
    prepare=prepare,
    loss=loss,
    progress_columns=("loss", "distillation_loss", "ce_loss"),
)


class DistillationTrainer(Trainer):
    """Trains a model on the distributions of the frozen model `"teacher"` and on the labels.

    `arguments` are `DistillationArguments`; the teacher has the student's vocabulary.
    """

    entry = METHODS["distillation"]
    record = DISTILLATION
