"""Embeddings of texts: two texts with one meaning are near, and far from all others of the step.

InfoNCE (van den Oord et al., arXiv:1807.03748) of cosines, with the other positives of the batch as
negatives; Matryoshka representations (Kusupati et al., 2205.13147), cut at several lengths.

Legend: b rows, s positions, p pairs of a row at most, n = b p, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import EmbeddingOutput, Metric
from ed_models.protocol import LanguageModel
from jaxtyping import Array, Float

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.pairs import as_rows, pair_batch
from ed_trainers.losses.scoring import noise_of
from ed_trainers.options.embedding import EmbeddingArguments
from ed_trainers.placement import with_arrays
from ed_trainers.trainer import Trainer

SIDES = ("anchor", "positive")


class PairSlots:
    """The number of pairs that a row of the compiled step has room for: a power of two."""

    def __init__(self, run: MethodRun, models: dict[str, LanguageModel]):
        del run, models
        self.count = 1

    def fit(self, pairs: int) -> int:
        """Return the number of slots for rows with `pairs` pairs. The number never decreases."""
        while self.count < pairs:
            self.count *= 2
        return self.count


def prepare(run: MethodRun[EmbeddingArguments], batch: HostBatch) -> Prepared:
    """Stack the pairs, [b, 2, s], with `present` [b, p]: 1 where a row has that pair."""
    pairs = pair_batch(batch, SIDES)
    counts = pairs["segment_ids"].max(axis=(1, 2))
    slots = run.part(PairSlots).fit(counts.max(initial=0))
    present = np.arange(slots) < counts[:, None]
    kept = pairs.select(name for name in pairs if name not in ("targets", "weights"))
    return with_arrays(kept, present=present.astype(np.float32))


def loss(
    run: MethodRun[EmbeddingArguments], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return the loss summed over the pairs."""
    present = batch["present"]
    rows = as_rows({name: array for name, array in batch.items() if name != "present"})
    output = cast(Callable[..., EmbeddingOutput], models.learner)(
        **rows.select(models.learner.input_names),
        segments=present.shape[-1],
        key=key,
        **noise_of(models.learner, rows, key, run.arguments.neftune_noise_alpha),
    )
    vectors = output.embeddings
    vectors = vectors.reshape(-1, 2, *vectors.shape[1:]).astype(jnp.float32)
    anchors, positives = (vectors[:, i].reshape(-1, vectors.shape[-1]) for i in (0, 1))
    here = present.reshape(-1)
    losses = jnp.zeros_like(here)
    right = here
    for length, weight in _cuts(run, anchors.shape[-1]):
        a, p = (_unit(x[:, :length]) for x in (anchors, positives))
        found, right = _contrast(run, a @ p.T, here)
        losses += weight * found
    pairs = jnp.sum(here)
    accuracy = Metric.of(jnp.sum(here * right), pairs)
    return Loss.of(output, jnp.sum(here * losses), pairs, accuracy=accuracy)


def _cuts(run: MethodRun[EmbeddingArguments], width: int) -> list[tuple[int, float]]:
    """Return the lengths of the cut embeddings in rising order, each with its loss weight."""
    dims = run.arguments.matryoshka_dims or (width,)
    weights = run.arguments.matryoshka_weights or (1.0,) * len(dims)
    if max(dims) > width:
        raise ConfigError(f"matryoshka_dims {list(dims)}: embeddings have {width} numbers")
    return sorted(zip(dims, weights, strict=True))


def _contrast(
    run: MethodRun[EmbeddingArguments],
    cosines: Float[Array, "n n"],
    here: Float[Array, " n"],
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Return the loss of each pair, and whether its positive is the nearest one."""
    gap = jnp.where(here > 0, 0.0, -jnp.inf)
    losses = jnp.zeros_like(here)
    ways = (cosines, cosines.T) if run.arguments.symmetric else (cosines,)
    for scores in ways:
        for temperature in run.arguments.temperature:
            logits = scores / temperature
            others = jax.nn.logsumexp(logits + gap, axis=-1)
            losses += jnp.where(here > 0, others - jnp.diagonal(logits), 0.0)
    nearest = jnp.argmax(cosines + gap, axis=-1) == jnp.arange(here.size)
    return losses / (len(ways) * len(run.arguments.temperature)), nearest.astype(jnp.float32)


def _unit(vectors: Float[Array, "n d"]) -> Float[Array, "n d"]:
    # Not `norm`, whose gradient at 0 (an empty slot) is not a number.
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, axis=-1, keepdims=True), 1e-24))


EMBEDDING = Method[EmbeddingArguments](
    prepare=prepare,
    loss=loss,
    parts=(PairSlots,),
    whole_batches=True,  # the shape of `present` depends on all rows
    per_token=False,
    progress_columns=("loss", "accuracy"),
)


class EmbeddingTrainer(Trainer):
    """Trains an `Embedder` to find the positive of each anchor among the positives of the step.

    `arguments` are `EmbeddingArguments`; batches have `anchor_*` and `positive_*`, [b, s] each.
    """

    entry = METHODS["embedding"]
    record = EMBEDDING
