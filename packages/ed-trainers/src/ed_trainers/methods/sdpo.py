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
from ed_trainers.online.phase import OnlineRun, PhaseRows, compute_policy, online_method
from ed_trainers.online.reprompts import Reprompts, build_reprompts
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.groups import SDPOArguments
from ed_trainers.options.online import OnlineArguments, SelfDistillationArguments
from ed_trainers.roles.frozen import Following
from ed_trainers.rollout import Weights
from ed_trainers.trainer import Trainer

#: Name of the mean divergence of the tokens in the log.
DISTILLATION_LOSS = "self_distillation/distillation_loss"
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

    def __init__(self, run: OnlineRun[TrainingArguments], models: dict[str, LanguageModel]):
        options, learner = run.arguments, run.learner
        assert isinstance(options, SelfDistillationArguments), "the options of a self-teacher"
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

    def select(self, models: Models) -> LanguageModel:
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
    row_arrays |= build_teacher_rows(completions, reprompts, row_arrays["weights"].shape[1])
    row_arrays["distilled"] = reprompts.distilled.astype(np.float32)
    return row_arrays, {**figures, **reprompts.figures}


def build_teacher_rows(
    completions: Completions, reprompts: Reprompts, length: int
) -> dict[str, np.ndarray]:
    """Return the rows of the teacher, and the places of the tokens in them.

    Args:
        completions: the completions after the learner's prompts.
        reprompts: the teacher's prompts.
        length: s.

    Returns:
        arrays `teacher_...` int32 [n, t], and `teacher_places` int32 [n, s].
    """
    teacher_rows = reprompts.rows()
    places = np.zeros((len(completions), length), np.int32)
    pairs = zip(
        completions.prompt_ids, reprompts.prompt_ids, completions.completion_ids, strict=True
    )
    for row, (prompt, longer, answer) in enumerate(pairs):
        begin = len(prompt) - 1
        places[row, begin : begin + len(answer)] = np.arange(len(answer)) + len(longer) - 1
    return {
        **{f"{_NAME}_{name}": teacher_rows[name] for name in _ROWS},
        f"{_NAME}_places": places,
    }


def loss(run: SDPORun, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the weighted sum of the distillation and the policy loss; see `SDPOArguments`."""
    options = run.arguments
    output, policy = grpo.compute_learner_policy(run, models, batch, key)
    if not options.distills:
        return grpo.policy_loss(options, batch, output, policy)
    weight = options.distillation_weight
    mask = batch["weights"] * batch["distilled"][:, None]
    teacher = run.teacher.select(models)
    total, figure = sum_divergences(run, models, teacher, batch, output, policy, mask)
    count = jnp.sum(batch["present"])
    metrics = {DISTILLATION_LOSS: figure}
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


def sum_divergences(
    run: OnlineRun[TrainingArguments],
    models: Models,
    teacher: LanguageModel,
    batch: Batch,
    output: CausalLMOutput,
    policy: Policy,
    mask: jax.Array,
) -> tuple[jax.Array, Metric]:
    """Return the sum over the rows of the mean divergence of their tokens, and its log figure.

    Args:
        run: the run of a method with `SelfDistillationArguments`.
        models: the models.
        teacher: the model that reads the rows `teacher_...`.
        batch: the rows.
        output: the output of the learner.
        policy: the learner's figures of the tokens.
        mask: 1 for the compared tokens, [b, s].
    """
    options = run.arguments
    assert isinstance(options, SelfDistillationArguments), "the options of a self-teacher"
    losses = compute_divergences(run, models, teacher, batch, output, policy)
    if options.distillation_is_clip is not None:
        log_ratios = jax.lax.stop_gradient(policy.logps) - old_logps(batch, policy)
        ratios = jnp.exp(jnp.clip(log_ratios, -_LARGEST_LOG, _LARGEST_LOG))
        losses = losses * jnp.minimum(ratios, options.distillation_is_clip)
    losses = jnp.where(mask > 0, losses, 0.0) * mask
    row_losses = jnp.sum(losses, axis=-1) / jnp.maximum(jnp.sum(mask, axis=-1), 1)
    return jnp.sum(row_losses), Metric.of(jnp.sum(losses), jnp.sum(mask))


def compute_divergences(
    run: OnlineRun[TrainingArguments],
    models: Models,
    teacher: LanguageModel,
    batch: Batch,
    output: CausalLMOutput,
    policy: Policy,
) -> jax.Array:
    """Return the divergence of learner and teacher at each position, [b, s].

    The divergence of `sampled_token` is an estimate whose gradient alone has a meaning.
    """
    options = run.arguments
    assert isinstance(options, SelfDistillationArguments), "the options of a self-teacher"
    assert isinstance(options, OnlineArguments), "the method samples"
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


#: Arrays of the teacher's rows with one value per token.
TEACHER_ARRAYS = tuple(f"{_NAME}_{name}" for name in (*_ROWS, "places"))
SDPO = online_method(
    run=SDPORun,
    rows=rows,
    loss=loss,
    token_arrays=(*grpo.TOKEN_ARRAYS, *TEACHER_ARRAYS),
    progress_columns=("reward", DISTILLATION_LOSS, "loss"),
)


class SDPOTrainer(Trainer):
    """Trains a model on its own distributions after successful examples; see `SDPOArguments`."""

    entry = METHODS["sdpo"]
    record = SDPO
