"""Generalized knowledge distillation: a teacher's distributions on the student's own completions.

Agarwal et al., arXiv:2306.13649, algorithm 1: the student completes a share `lmbda` of the
generations, the teacher or the data complete the others. The data are a field of the rows, or
conversations that end with an answer. The loss is the divergence of the two
distributions of each token of the completions. `losses.divergence` has the divergences.

`on_policy_distillation` is the same method with completions of the student only, and
`sparse_distillation` also compares the teacher's most probable tokens only. Both equal TRL's
`DistillationTrainer`, with a teacher that is a model or a server of log-probabilities.

Legend: n completions, b rows, s positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import Metric

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.divergence import compare_models
from ed_trainers.online.completions import (
    Completions,
    PromptContent,
    PromptRows,
    WrittenPrompts,
)
from ed_trainers.online.phase import HELD_OUT, OnlineRun, PhaseRows, online_method
from ed_trainers.options.distillation import GKDArguments
from ed_trainers.rollout import Weights
from ed_trainers.trainer import Trainer

#: The field of the data with completions.
_FIELD = "completion"
# Separates the draw of the student's share from the seeds of samples.
_SHARE = 1


def is_on_policy(run: OnlineRun[GKDArguments], number: int) -> bool:
    """Whether the student completes the prompts of a generation; depends on the seed only.

    The student completes held-out prompts if `lmbda` is above 0.
    """
    if number == HELD_OUT:
        return run.arguments.lmbda > 0
    draw = np.random.default_rng((run.arguments.seed, number, _SHARE)).random()
    return bool(draw < run.arguments.lmbda)


def _complete(
    run: OnlineRun[GKDArguments], batch: HostBatch, weights: Weights, number: int
) -> Completions:
    """Return completions by the student, the teacher or the data."""
    phase, batch = run.phase, separate_conversations(batch)
    if is_on_policy(run, number):
        return phase.sample(batch, weights, number=number)
    if run.arguments.seq_kd:
        teacher = phase.build_rollout(lambda models: models["teacher"])
        return phase.sample(batch, weights, number=number, rollout=teacher)
    return _read_completions(run, batch)


def separate_conversations(batch: HostBatch) -> HostBatch:
    """Return prompts without the last answers of conversations, which become their completions.

    A batch with completions in the data, and a batch without such conversations, are unchanged.
    """
    written: Sequence[PromptContent] = getattr(batch, "prompts", ())
    fields: Mapping[str, Sequence[object]] = getattr(batch, "fields", {})
    encode = getattr(batch, "with_prompt", None)
    places = [place for place, prompt in enumerate(written) if _ends_with_answer(prompt)]
    if not isinstance(batch, PromptRows) or _FIELD in fields or not places or encode is None:
        return batch
    prompts, ids = list(written), [list(row) for row in batch.input_ids]
    answers: list[object] = [None] * len(prompts)
    for place in places:
        *context, message = cast(list[dict[str, Any]], written[place])
        prompts[place], answers[place] = context, message["content"]
        ids[place] = encode(place, context)
    images = getattr(batch, "images", {})
    rows = WrittenPrompts(prompts, ids, {**fields, _FIELD: answers}, images, encode)
    return cast(HostBatch, rows)  # rows of prompts are no mapping; see `PromptRows`


def _ends_with_answer(prompt: object) -> bool:
    """Return whether a prompt is a conversation of several messages that ends with an answer."""
    if not isinstance(prompt, list) or len(prompt) < 2 or not isinstance(prompt[-1], dict):
        return False
    return prompt[-1].get("role") == "assistant" and isinstance(prompt[-1].get("content"), str)


def _read_completions(run: OnlineRun[GKDArguments], batch: HostBatch) -> Completions:
    """Return the completions in the field `completion` of the data."""
    arguments = run.arguments
    fields = getattr(batch, "fields", {})
    if not isinstance(batch, PromptRows) or _FIELD not in fields:
        raise ConfigError(
            f"with lmbda {arguments.lmbda} some generations need the field {_FIELD!r} of the data, "
            f"and the rows do not have it: write additional_fields: [{_FIELD}] in the inform, use "
            "conversations that end with an answer, set seq_kd for completions of the teacher, or "
            "lmbda 1 for the student's only"
        )
    prompts = [list(ids)[-arguments.max_prompt_length :] for ids in batch.input_ids]
    completion_ids = [_tokens(run, answer, row) for row, answer in enumerate(fields[_FIELD])]
    return Completions(
        prompts=list(getattr(batch, "prompts", prompts)),
        prompt_ids=prompts,
        completion_ids=[ids[: arguments.max_completion_length] for ids in completion_ids],
        logprobs=[[] for _ in completion_ids],
        completions=list(fields[_FIELD]),
        ended=[len(ids) <= arguments.max_completion_length for ids in completion_ids],
        fields=fields,
    )


def _tokens(run: OnlineRun[GKDArguments], answer: PromptContent | None, row: int) -> list[int]:
    """Return the token ids of a completion of the data, the end token included."""
    if isinstance(answer, str) and callable(run.tokenizer):
        tokenizer: Any = run.tokenizer
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        end = getattr(tokenizer, "eos_token_id", None)
        return [*ids, *([] if end is None else [end])]
    if isinstance(answer, list) and answer and all(isinstance(x, int) for x in answer):
        return [int(x) for x in answer if isinstance(x, int)]
    raise ConfigError(
        f"row {row} has the {_FIELD} {answer!r:.60}: use a text and pass the trainer a tokenizer, "
        "or use token ids"
    )


def rows(
    run: OnlineRun[GKDArguments], completions: Completions, weights: Weights, number: int
) -> PhaseRows:
    """Return rows of the completions; the figure `on_policy` is 1 for the student's own."""
    del weights
    row_arrays = dict(completions.rows(run.arguments.row_length))
    return row_arrays, {"on_policy": float(is_on_policy(run, number))}


def loss(run: OnlineRun[GKDArguments], models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the divergence summed over the tokens of completions."""
    output, _, divergence, logp = compare_models(
        models.learner,
        models["teacher"],
        batch,
        key,
        placement=run.placement,
        beta=run.arguments.beta,
        temperature=run.arguments.loss_temperature,
        support=run.arguments.support,
        chunk=run.arguments.lmhead_chunksize,
        noise=run.arguments.neftune_noise_alpha,
    )
    weights = batch["weights"]
    count = jnp.sum(weights)
    nll = Metric.of(-jnp.sum(weights * logp), count)
    total = run.arguments.divergence_weight * jnp.sum(weights * divergence)
    return Loss.of(output, total, count, nll_loss=nll)


GKD = online_method(
    run=OnlineRun[GKDArguments],
    rows=rows,
    loss=loss,
    complete=_complete,
    token_arrays=(),
    progress_columns=("loss", "nll_loss", "completions/mean_length"),
)


class GKDTrainer(Trainer):
    """Trains a model on the distributions of the model `"teacher"`; `arguments`: `GKDArguments`.

    The teacher has the student's vocabulary and, for `seq_kd`, `generate`.
    """

    entry = METHODS["gkd"]
    record = GKD


class OnPolicyDistillationTrainer(Trainer):
    """Trains a model on a teacher's distributions of the model's own completions.

    `arguments` are `OnPolicyDistillationArguments`.
    """

    entry = METHODS["on_policy_distillation"]
    record = GKD


class SparseDistillationTrainer(Trainer):
    """Trains a model on the most probable tokens of a teacher, on the model's own completions.

    `arguments` are `SparseDistillationArguments`.
    """

    entry = METHODS["sparse_distillation"]
    record = GKD
