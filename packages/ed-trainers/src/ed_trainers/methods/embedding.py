"""Embeddings of texts: near for two texts of one meaning, far from all others of the step.

InfoNCE (van den Oord et al., arXiv:1807.03748) of cosines, with the other positives of the batch as
negatives; Matryoshka representations (Kusupati et al., 2205.13147), cut at several lengths.

Legend: b rows, s positions, p pairs of a row at most, n = b p, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import EmbeddingOutput, Metric
from jaxtyping import Array, Float

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.pairs import as_rows, pair_batch
from ed_trainers.losses.scoring import noise_of
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.embedding import EmbeddingArguments
from ed_trainers.trainer import Trainer

SIDES = ("anchor", "positive")


class EmbeddingTrainer(Trainer):
    """Learns to find the positive of each anchor among those of the step.

    The model is an `Embedder`; batches have `anchor_*` and `positive_*`, [b, s] each.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = EmbeddingArguments
    arguments: EmbeddingArguments
    per_token: ClassVar[bool] = False
    progress_columns: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    _pairs_of_a_row = 1

    @property
    def whole_batches(self) -> bool:
        """The shape of `present` follows from all rows."""
        return True

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Stack the pairs, [b, 2, s], with `present` [b, p]: 1 where a row has that pair.

        p is a power of two, and never falls, so that few shapes are compiled.
        """
        pairs = pair_batch(batch, SIDES)
        counts = pairs["segment_ids"].max(axis=(1, 2))
        while self._pairs_of_a_row < counts.max(initial=0):
            self._pairs_of_a_row *= 2
        present = np.arange(self._pairs_of_a_row) < counts[:, None]
        names = ("input_ids", "segment_ids", "position_ids")
        return {name: pairs[name] for name in names} | {"present": present.astype(np.float32)}

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the loss summed over the pairs."""
        present = batch["present"]
        rows = as_rows({name: array for name, array in batch.items() if name != "present"})
        output = cast(Callable[..., EmbeddingOutput], models.learner)(
            rows["input_ids"],
            segment_ids=rows["segment_ids"],
            position_ids=rows["position_ids"],
            segments=present.shape[-1],
            key=key,
            **noise_of(models.learner, rows, key, self.arguments.neftune_noise_alpha),
        )
        vectors = output.embeddings
        vectors = vectors.reshape(-1, 2, *vectors.shape[1:]).astype(jnp.float32)
        anchors, positives = (vectors[:, i].reshape(-1, vectors.shape[-1]) for i in (0, 1))
        here = present.reshape(-1)
        losses = jnp.zeros_like(here)
        right = here
        for length, weight in self._cuts(anchors.shape[-1]):
            a, p = (_unit(x[:, :length]) for x in (anchors, positives))
            found, right = self._contrast(a @ p.T, here)
            losses += weight * found
        pairs = jnp.sum(here)
        accuracy = Metric.of(jnp.sum(here * right), pairs)
        return Loss.of(output, jnp.sum(here * losses), pairs, accuracy=accuracy)

    def _cuts(self, width: int) -> list[tuple[int, float]]:
        """Lengths of embeddings, the whole last, each with the weight of its loss."""
        dims = self.arguments.matryoshka_dims or (width,)
        weights = self.arguments.matryoshka_weights or (1.0,) * len(dims)
        if max(dims) > width:
            raise ConfigError(f"matryoshka_dims {list(dims)}: embeddings have {width} numbers")
        return sorted(zip(dims, weights, strict=True))

    def _contrast(
        self, cosines: Float[Array, "n n"], here: Float[Array, " n"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """The loss of each pair, and whether its positive is the nearest."""
        gap = jnp.where(here > 0, 0.0, -jnp.inf)
        losses = jnp.zeros_like(here)
        ways = (cosines, cosines.T) if self.arguments.symmetric else (cosines,)
        for scores in ways:
            for temperature in self.arguments.temperature:
                logits = scores / temperature
                others = jax.nn.logsumexp(logits + gap, axis=-1)
                losses += jnp.where(here > 0, others - jnp.diagonal(logits), 0.0)
        nearest = jnp.argmax(cosines + gap, axis=-1) == jnp.arange(here.size)
        return losses / (len(ways) * len(self.arguments.temperature)), nearest.astype(jnp.float32)


def _unit(vectors: Float[Array, "n d"]) -> Float[Array, "n d"]:
    # Not `norm`, whose gradient at 0 (an empty slot) is not a number.
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, axis=-1, keepdims=True), 1e-24))
