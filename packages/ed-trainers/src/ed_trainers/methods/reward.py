"""A reward model: a score for each answer, higher for the chosen answer of a pair.

Ouyang et al., arXiv:2203.02155, eq. 1; margins of Llama 2 (2307.09288, eq. 2); the term that
centers the scores is from Eisenstein et al. (2312.09244). The score of an answer is the score of
its last token.

Legend: b rows, s positions and slots of pairs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.pairs import SIDES, as_rows, get_pair_axes, pair_batch
from ed_trainers.losses.scoring import token_scores
from ed_trainers.losses.segments import last_tokens, segment_sums
from ed_trainers.options.preference import RewardArguments
from ed_trainers.placement import with_arrays
from ed_trainers.trainer import Trainer


def prepare(run: MethodRun[RewardArguments], batch: HostBatch) -> Prepared:
    """Stack the pairs, [b, 2, s], with `last`, 1 at the token whose score counts.

    Args:
        run: the run of the method.
        batch: `chosen_*` and `rejected_*`, and optionally `margin` [b, s] at the tokens of the
            chosen answers.
    """
    del run
    pairs = pair_batch(batch, SIDES)
    last = last_tokens(pairs["segment_ids"])
    margin = np.zeros_like(last)
    if "margin" in batch:
        margin[:, 0] = np.where(last[:, 0] > 0, np.asarray(batch["margin"], np.float32), 0)
    pair_inputs = pairs.select(name for name in pairs if name not in ("targets", "weights"))
    return with_arrays(pair_inputs, get_pair_axes(), last=last, margin=margin)


def loss(
    run: MethodRun[RewardArguments], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return `-log sigmoid(chosen - rejected - margin)`, summed over the pairs."""
    rows, noise = as_rows(batch), run.arguments.neftune_noise_alpha
    output, scores = token_scores(models.learner, rows, key, labels=1, noise=noise)

    def by_side(values: jax.Array) -> jax.Array:
        sums = segment_sums(values * rows["last"], rows["segment_ids"])
        return sums.reshape(-1, 2, sums.shape[-1])

    rewards, ends = by_side(scores[..., 0]), by_side(jnp.ones_like(rows["last"]))
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    present = ends[:, 0] * ends[:, 1]
    losses = -jax.nn.log_sigmoid(chosen - rejected - by_side(rows["margin"])[:, 0])
    if run.arguments.center_rewards_coefficient is not None:
        losses += run.arguments.center_rewards_coefficient * (chosen + rejected) ** 2
    pairs = jnp.sum(present)
    figures = {
        "mean_reward": (chosen + rejected) / 2,
        "accuracy": (chosen > rejected).astype(jnp.float32),
        "margin": chosen - rejected,
    }
    metrics = {name: Metric.of(jnp.sum(present * x), pairs) for name, x in figures.items()}
    return Loss.of(output, jnp.sum(present * losses), pairs, **metrics)


REWARD = Method[MethodRun[RewardArguments]](
    prepare=prepare,
    loss=loss,
    per_token=False,
    progress_columns=("loss", "accuracy", "margin"),
)


class RewardTrainer(Trainer):
    """Trains a `SequenceClassifier` with one label to score chosen answers above rejected ones.

    `arguments` are `RewardArguments`.
    """

    entry = METHODS["reward"]
    record = REWARD
