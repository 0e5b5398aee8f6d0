"""Training of the MTP layer that drafts the tokens of a frozen model (`ed_models.body.mtp`).

The model answers prompts, and the layer learns its distributions (DeepSeek-AI, arXiv:2412.19437,
equations 21 to 25; Zhang et al., arXiv:2408.15766, for the depths). A draft starts at each position
i of an answer. At depth 1, the layer reads the hidden state of the model at i and the token i + 1.
At depth j, it reads its own state of depth j - 1 and the token i + j. The pairs that attention
reads are those of an engine that drafts after the token i + 1 (`predict_chains`). Depth j predicts
the token i + j + 1. The loss of a depth is the divergence KL(model || layer), the cross-entropy of
the model's token, or a mean of both. The weights of the model, its embedding and its head do not
change.

An evaluation also measures the acceptance length: tokens of the greedy answers to held-out prompts
per step of the model, with `num_speculative_tokens` drafts. It follows the steps of each answer and
equals the counters of an engine with `adaptive_length: false`.

Legend: n completions, b rows, s positions, d hidden, k depths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric
from ed_layers.losses import split_chunks
from ed_layers.projections.head import Head
from ed_models.body.mtp import MTP, select_tokens, shorten_head
from ed_models.protocol import LanguageModel
from jaxtyping import Array, Float, Int

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Models, Prepared
from ed_trainers.losses.divergence import token_divergences
from ed_trainers.losses.mtp import (
    embed_next_tokens,
    predict_chains,
    shift_left,
    take_positions,
)
from ed_trainers.losses.scoring import forward
from ed_trainers.methods.gkd import separate_conversations
from ed_trainers.online.completions import Completions
from ed_trainers.online.phase import HELD_OUT, OnlineRun, PhaseRows, online_method
from ed_trainers.options.distillation import DraftArguments
from ed_trainers.placement import TOKENS
from ed_trainers.rollout import Rollout, Sampled, Weights
from ed_trainers.state import EasyDeLState
from ed_trainers.trainer import Trainer

#: Temperature below which the engine takes the most probable token.
_GREEDY = 1e-5
#: Tokens whose logits exist at the same time in an evaluation.
_CHUNK = 256
#: The number of positions of a row with a loss is a multiple, so that devices can share them.
_BLOCK = 64


class GreedyRollout:
    """A rollout that takes the most probable tokens.

    Args:
        rollout: the rollout that completes the prompts.
    """

    def __init__(self, rollout: Rollout):
        self._rollout = rollout

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Mapping[str, Any],
        weights: Weights,
        *,
        seeds: Sequence[int] | None = None,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> list[Sampled]:
        """Complete each prompt; see `Rollout`."""
        greedy_params = {**params, "temperature": _GREEDY}
        more = {} if images is None else {"images": images}
        return self._rollout.generate(prompts, greedy_params, weights, seeds=seeds, **more)


class DraftRun(OnlineRun[DraftArguments]):
    """A run of `draft`.

    Attributes:
        answers: the rows of held-out prompts by their tokens. The model is frozen, so its greedy
            answers stay the same.
    """

    answers: dict[tuple[tuple[int, ...], ...], list[Prepared]]

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        self.answers = {}
        super().create_parts(models)


class DraftHead(NamedTuple):
    """The head of the drafted tokens, without gradient.

    Attributes:
        head: of v' tokens.
        tokens: the token of each row of the head, int32 [v'].
        numbers: the row of each token of the vocabulary [v], or v'.
    """

    head: Head
    tokens: jax.Array
    numbers: jax.Array

    @classmethod
    def create(cls, run: DraftRun, learner: LanguageModel) -> DraftHead:
        """Return the head of the most frequent tokens of the answers."""
        head, size = learner.head(), run.arguments.draft_vocab_size
        tokens = jnp.arange(head.vocab_size, dtype=jnp.int32)
        if size is not None:
            tokens = select_tokens(cast(Any, learner).mtp.token_counts[...], size)
            head = shorten_head(head, tokens)
        index = jnp.full((learner.head().vocab_size,), len(tokens), jnp.int32)
        index = index.at[tokens].set(jnp.arange(len(tokens), dtype=jnp.int32))
        return jax.lax.stop_gradient(cls(head, tokens, index))


def rows(run: DraftRun, completions: Completions, weights: Weights, number: int) -> PhaseRows:
    """Return the rows of the completions, with `states` [n, s, d], the last hidden states of the
    model. They are computed once, also if the rows are used several times."""
    del number
    row_arrays = dict(completions.rows(run.arguments.row_length))
    return row_arrays | run.phase.ask(compute_states, row_arrays, weights), {}


def compute_states(run: DraftRun, models: Models, batch: Batch) -> dict[str, jax.Array]:
    """Return `states` [n, s, d]."""
    states = forward(models.learner, batch, None).last_hidden_state
    assert states is not None
    return {"states": states}


def answer_prompts(run: DraftRun, batch: HostBatch, weights: Weights, number: int) -> Completions:
    """Return sampled answers, and greedy answers to held-out prompts. The last answer of a
    conversation is omitted."""
    rollout = run.rollout
    if number == HELD_OUT and rollout is not None:
        rollout = GreedyRollout(rollout)
    batch = separate_conversations(batch)
    return run.phase.sample(batch, weights, number=number, rollout=rollout)


def loss(run: DraftRun, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the weighted sum of the losses of all depths.

    `divergence_<j>` is the mean KL(model || layer) of depth j in nats, and `coverage` the share of
    tokens in the drafted vocabulary.
    """
    options, learner = run.arguments, models.learner
    states, (head, _, index) = batch["states"], DraftHead.create(run, learner)
    places = find_answers(batch["weights"], options.max_completion_length)
    total, count = jnp.zeros(()), jnp.zeros(())
    metrics: dict[str, Metric] = {}
    embeds = jax.lax.stop_gradient(embed_next_tokens(learner, batch))
    predictions = predict_chains(
        *(learner, batch, embeds, states, places, options.num_speculative_tokens)
    )
    # The model's distribution of token i + 2 follows from its state at i + 1.
    following = jnp.pad(states[:, 1:], ((0, 0), (0, 1), (0, 0)))
    labels = shift_left(batch["targets"])
    for depth, prediction in enumerate(predictions):
        weights, targets = prediction.weights, index[take_positions(labels, prediction.at)]
        is_drafted = targets < head.vocab_size
        divergence, logps = token_divergences(
            (prediction.hidden, head),
            (take_positions(following, prediction.at), head),
            jnp.minimum(targets, head.vocab_size - 1),
            sharding=run.placement.sharding(targets.shape),
            beta=0.0,
            temperature=1.0,
            chunk=options.lmhead_chunksize,
        )
        # A token outside of the drafted vocabulary has no cross-entropy.
        nll = jnp.where(is_drafted, -logps, 0.0)
        factor = options.depth_decay**depth
        mixed = options.alpha * divergence + (1 - options.alpha) * nll
        total += factor * jnp.sum(weights * mixed)
        count += factor * jnp.sum(weights)
        metrics[f"divergence_{depth + 1}"] = Metric.of(
            jnp.sum(weights * divergence), jnp.sum(weights)
        )
        if not depth:
            metrics["coverage"] = Metric.of(jnp.sum(weights * is_drafted), jnp.sum(weights))
    output = predictions[0].output
    updates = {f"{MTP}/{path}": value for path, value in output.updates.items()}
    counts = jnp.zeros(index.shape, jnp.float32)
    updates[f"{MTP}/token_counts"] = counts.at[batch["targets"]].add(batch["weights"])
    return Loss.of(output, total, count, **metrics)._replace(updates=updates)


def find_answers(weights: Float[Array, "b s"], length: int) -> Int[Array, "b n"]:
    """Return the positions at which the layer predicts tokens of the answers, and further ones up
    to a multiple of `_BLOCK`: the head is most of the work, and prompts have no loss.

    Args:
        weights: 1 at each position whose next token belongs to the answer.
        length: maximum number of tokens of an answer.
    """
    count = min(-(-length // _BLOCK) * _BLOCK, weights.shape[1])
    return jnp.argsort(shift_left(weights) == 0, axis=1, stable=True)[:, :count]


def count_accepted(run: DraftRun, models: Models, batch: Batch) -> dict[str, jax.Array]:
    """Return `accepted` int32 [n, s]: how many drafts after token i + 1 equal the answer, one after
    the other, if the model has computed token i."""
    learner, options = models.learner, run.arguments
    (head, tokens, _), labels = DraftHead.create(run, learner), shift_left(batch["targets"])
    places = find_answers(batch["weights"], options.max_completion_length)
    embeds = embed_next_tokens(learner, batch)
    predictions = predict_chains(
        *(learner, batch, embeds, batch["states"], places, options.num_speculative_tokens)
    )
    leading = jnp.ones(places.shape, bool)
    counts = jnp.zeros(places.shape, jnp.int32)
    for prediction in predictions:
        targets = take_positions(labels, prediction.at)
        drafts = tokens[find_best(prediction.hidden, head)]
        leading &= (drafts == targets) & (prediction.weights > 0)
        counts += leading
    rows = jnp.arange(len(places))[:, None]
    return {"accepted": jnp.zeros(labels.shape, jnp.int32).at[rows, places].set(counts)}


def find_best(hidden: Float[Array, "b s d"], head: Head) -> Int[Array, "b s"]:
    """Return the row of the most probable token of each position."""

    def find(carry: None, chunk: jax.Array) -> tuple[None, jax.Array]:
        return carry, jnp.argmax(head(chunk), axis=-1)

    flat = hidden.reshape(-1, hidden.shape[-1])
    _, tokens = jax.lax.scan(find, None, split_chunks(flat, _CHUNK))
    return tokens.reshape(-1)[: len(flat)].reshape(hidden.shape[:2])


def read_held_out(
    run: DraftRun, batches: Iterable[HostBatch], state: EasyDeLState
) -> Iterator[Prepared]:
    """Yield the rows of held-out prompts, which are answered once."""
    for batch in batches:
        prompts = tuple(tuple(ids) for ids in getattr(batch, "input_ids", ()))
        if prompts not in run.answers:
            run.answers[prompts] = list(run.phase.held_out([batch], state))
        yield from run.answers[prompts]


def count_steps(
    accepted: Int[np.ndarray, " s"], weights: Float[np.ndarray, " s"]
) -> tuple[int, int]:
    """Return the number of tokens of an answer after its first one, and of the model's steps.

    Args:
        accepted: see `count_accepted`.
        weights: 1 at each position whose next token belongs to the answer.
    """
    places = np.flatnonzero(weights)
    if len(places) < 2:
        return 0, 0
    place, last, steps = int(places[0]), int(places[-1]), 0
    while place < last:
        place += 1 + int(accepted[place])
        steps += 1
    return last - int(places[0]), steps


def measure(run: DraftRun, batches: Iterable[HostBatch], state: EasyDeLState) -> dict[str, float]:
    """Return the acceptance length: tokens per step of the answers to held-out prompts, and its
    standard error over the prompts."""
    pairs: list[tuple[int, int]] = []
    for prepared in read_held_out(run, batches, state):
        weights = Weights(
            state.graphdef, state.graphstate, state.graphother, version=int(state.step)
        )
        try:
            accepted = run.phase.ask(count_accepted, prepared, weights)["accepted"]
        finally:
            weights.end()
        pairs += map(count_steps, accepted, np.asarray(prepared["weights"]))
    pairs = [pair for pair in pairs if pair[1]]
    if not pairs:
        return {}
    length, error = compute_length(pairs)
    return {"acceptance_length": length, "acceptance_length_error": error}


def compute_length(pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the tokens per step of answers, and the standard error of this ratio of means.

    Args:
        pairs: tokens and steps of each answer, at least one.
    """
    tokens, steps = np.asarray(pairs, np.float64).T
    length = tokens.sum() / steps.sum()
    error = np.sqrt(((tokens - length * steps) ** 2).sum()) / steps.sum()
    return float(length), float(error)


_METHOD = online_method(
    run=DraftRun,
    rows=rows,
    loss=loss,
    complete=answer_prompts,
    token_arrays=(),
    progress_columns=("divergence_1", "completions/mean_length", "loss"),
)
DRAFT = replace(
    _METHOD,
    axes={**_METHOD.axes, "states": (*TOKENS, None)},
    held_out=read_held_out,
    measure=measure,
)


class DraftTrainer(Trainer):
    """Trains the MTP layer of a model on the model's answers to prompts; `arguments` are
    `DraftArguments`.

    Loaders yield prompts.
    """

    entry = METHODS["draft"]
    record = DRAFT
