"""Self-distillation policy optimization: the learner's own distributions after an example.

Huebotter et al., arXiv:2601.20802, with the formulas of TRL's trainer. The teacher is the learner,
a running mean of the learner, or the learner before training. The teacher reads a longer prompt
(`online.reprompts`), with a successful completion, and the same completion as the learner. The loss
is the divergence of the two distributions of each token. The policy loss is that of `grpo`.

Legend: n completions, b rows, s positions of the learner's rows, t positions of the teacher's rows.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import CausalLMOutput, Metric
from ed_models.adapters.lora import has_lora, remove_lora
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.arguments import METHODS
from ed_trainers.contract import MAIN, Batch, Loss, Models
from ed_trainers.losses.divergence import token_divergences
from ed_trainers.losses.policy import Policy, old_logps, row_metrics
from ed_trainers.losses.scoring import forward
from ed_trainers.methods import grpo
from ed_trainers.online.completions import Completions
from ed_trainers.online.phase import PhaseRows, compute_policy, online_method
from ed_trainers.online.reprompts import build_reprompts
from ed_trainers.options.groups import SDPOArguments
from ed_trainers.roles.frozen import Following
from ed_trainers.rollout import Weights
from ed_trainers.trainer import Trainer

_NAME = "teacher"
_ROWS = ("input_ids", "segment_ids", "position_ids", "targets")
# As in TRL: bounds of the logarithm of a ratio.
_LARGEST_LOG = 20.0


class SelfTeacher:
    """The teacher of a run, the frozen model `"teacher"`.

    Args:
        run: the run of the method.
        models: the frozen models by role; gets the teacher, unless the teacher is the learner or
            the base under its adapters.
    """

    def __init__(self, run: SDPORun, models: dict[str, LanguageModel]):
        options, learner = run.arguments, run.learner
        kind = options.teacher_model_kind
        self._under = kind == "base" and has_lora(learner)
        self._live = kind == "live"
        if not options.distills or self._live or self._under:
            return
        models[_NAME] = learner
        if kind == "ema":
            run.following = Following(
                _NAME,
                run.placement.frozen(_NAME, learner),
                run.learned(),
                alpha=options.teacher_update_rate,
                every=options.teacher_sync_steps,
                present=run.present_reference,
            )

    def of(self, models: Models) -> LanguageModel:
        """Return the teacher; called while tracing."""
        if self._live:
            return models.learner
        if self._under:
            return cast(LanguageModel, remove_lora(cast(nnx.Module, models.learner)))
        return models[_NAME]


class SDPORun(grpo.GroupRun[SDPOArguments]):
    """A run of `sdpo`: the objects of `grpo`, and the teacher."""

    teacher: SelfTeacher

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        super().create_parts(models)
        self.teacher = SelfTeacher(self, models)


def rows(run: SDPORun, completions: Completions, weights: Weights, number: int) -> PhaseRows:
    """Return the rows of `grpo` and the rows of the teacher, named `teacher_...` [n, t].

    `teacher_places` [n, s] are the positions of the teacher's rows that predict the tokens, and
    `distilled` [n] is 1 for the completions with a longer prompt.
    """
    row_arrays, figures = grpo.rows(run, completions, weights, number)
    options = run.arguments
    if not options.distills:
        return row_arrays, figures
    rewards = np.where(row_arrays["scored"] > 0, row_arrays["rewards"], -np.inf)
    positions = getattr(run.learner.config, "max_position_embeddings", None)
    reprompts = build_reprompts(options, completions, rewards, run.tokenizer, positions)
    teacher_rows = reprompts.rows()
    row_arrays |= {f"{_NAME}_{name}": teacher_rows[name] for name in _ROWS}
    places = np.zeros(row_arrays["weights"].shape, np.int32)
    pairs = zip(
        completions.prompt_ids, reprompts.prompt_ids, completions.completion_ids, strict=True
    )
    for row, (prompt, longer, answer) in enumerate(pairs):
        begin = len(prompt) - 1
        places[row, begin : begin + len(answer)] = np.arange(len(answer)) + len(longer) - 1
    row_arrays |= {f"{_NAME}_places": places, "distilled": reprompts.distilled.astype(np.float32)}
    return row_arrays, {**figures, **reprompts.figures}


def loss(run: SDPORun, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the weighted sum of the distillation and the policy loss; see `SDPOArguments`."""
    options = run.arguments
    output, policy = grpo.compute_learner_policy(run, models, batch, key)
    if not options.distills:
        return grpo.policy_loss(options, batch, output, policy)
    weight = options.distillation_weight
    mask = batch["weights"] * batch["distilled"][:, None]
    losses = divergences(run, models, batch, output, policy)
    if options.distillation_is_clip is not None:
        log_ratios = jax.lax.stop_gradient(policy.logps) - old_logps(batch, policy)
        ratios = jnp.exp(jnp.clip(log_ratios, -_LARGEST_LOG, _LARGEST_LOG))
        losses = losses * jnp.minimum(ratios, options.distillation_is_clip)
    losses = jnp.where(mask > 0, losses, 0.0) * mask
    row_losses = jnp.sum(losses, axis=-1) / jnp.maximum(jnp.sum(mask, axis=-1), 1)
    total, count = jnp.sum(row_losses), jnp.sum(batch["present"])
    figure = Metric.of(jnp.sum(losses), jnp.sum(mask))
    metrics = {"self_distillation/distillation_loss": figure}
    if not options.has_policy_loss:
        return Loss.of(output, total, count, **row_metrics(batch, policy), **metrics)
    grpo_loss = grpo.policy_loss(options, batch, output, policy)
    main = grpo_loss.sums[MAIN]
    sums = {
        **grpo_loss.sums,
        **{
            name: Metric.of((1 - weight) * term.sum, term.weight)
            for name, term in grpo_loss.sums.items()
            if name in (MAIN, grpo.ENTROPY)
        },
        "distillation": Metric.of(weight * total, count),
    }
    metrics["self_distillation/policy_loss"] = main
    return Loss(sums, {**grpo_loss.metrics, **metrics}, grpo_loss.updates)


def divergences(
    run: SDPORun,
    models: Models,
    batch: Batch,
    output: CausalLMOutput,
    policy: Policy,
) -> jax.Array:
    """Return the divergence of learner and teacher at each position, [b, s].

    The divergence of `sampled_token` is an estimate whose gradient alone has a meaning.
    """
    options, teacher = run.arguments, run.teacher.of(models)
    longer = batch.replace(**{name: batch[f"{_NAME}_{name}"] for name in _ROWS})
    places = batch[f"{_NAME}_places"]
    if options.distillation_mode == "sampled_token":
        _, teacher_output = compute_policy(run, teacher, longer)
        logps = jnp.take_along_axis(jax.lax.stop_gradient(teacher_output.logps), places, axis=1)
        return jax.lax.stop_gradient(policy.logps - logps) * policy.logps
    teacher_output = forward(teacher, longer, None)
    assert output.last_hidden_state is not None
    assert teacher_output.last_hidden_state is not None
    hidden = jnp.take_along_axis(teacher_output.last_hidden_state, places[..., None], axis=1)
    targets = batch["targets"]
    position_divergences, _ = token_divergences(
        (output.last_hidden_state, models.learner.head()),
        (hidden, teacher.head()),
        targets,
        sharding=run.placement.sharding(targets.shape),
        beta=options.distillation_alpha,
        temperature=options.temperature,
        chunk=options.lmhead_chunksize,
        support=options.support,
    )
    return position_divergences


SDPO = online_method(
    run=SDPORun,
    rows=rows,
    loss=loss,
    token_arrays=(
        *grpo.TOKEN_ARRAYS,
        *(f"{_NAME}_{name}" for name in (*_ROWS, "places")),
    ),
    progress_columns=("reward", "self_distillation/distillation_loss", "loss"),
)


class SDPOTrainer(Trainer):
    """Trains a model on its own distributions after successful examples; see `SDPOArguments`."""

    entry = METHODS["sdpo"]
    record = SDPO
