"""Embeddings of texts: two texts with one meaning are near, and far from all others of the step.

InfoNCE (van den Oord et al., arXiv:1807.03748) of cosines, with the other texts of the batch as
negatives; pairs with scores; distillation of margins and of embeddings; Matryoshka representations
(Kusupati et al., 2205.13147), cut at several lengths.

Legend: b rows, s positions, c texts of a pair, p pairs of a row at most, n = b p, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import EmbeddingOutput, Metric
from ed_models.protocol import LanguageModel
from jaxtyping import Array, Float

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.pairs import as_rows, pair_batch
from ed_trainers.losses.scoring import build_noise_inputs
from ed_trainers.losses.segments import last_tokens
from ed_trainers.losses.similarity import cosent_loss, margin_losses, ranking_losses, unit_vectors
from ed_trainers.methods.held_out import HeldOutOutputs, vector_metrics
from ed_trainers.options.supervised import (
    COSENT,
    COSINE,
    MARGIN_MSE,
    MSE,
    RANKING,
    EmbeddingArguments,
)
from ed_trainers.placement import with_arrays
from ed_trainers.state import EasyDeLState
from ed_trainers.trainer import Trainer

#: Role of the model whose embeddings are targets of `mse`.
_TEACHER = "teacher"


class PairSlots:
    """The number of pairs that a row of the compiled step has room for: a power of two."""

    def __init__(self) -> None:
        self.count = 1

    def fit(self, pairs: int) -> int:
        """Return the number of slots for rows with `pairs` pairs. The number never decreases."""
        while self.count < pairs:
            self.count *= 2
        return self.count


class EmbeddingRun(MethodRun[EmbeddingArguments]):
    """A run of `embedding`."""

    slots: PairSlots
    outputs: HeldOutOutputs

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        distills = self.arguments.loss_type == MSE
        if distills != (_TEACHER in models):
            change = "add the section teacher_model" if distills else "omit the teacher"
            raise ConfigError(
                f"embedding with loss_type {self.arguments.loss_type} "
                f"{'needs' if distills else 'does not read'} a teacher: {change}"
            )
        self.slots, self.outputs = PairSlots(), HeldOutOutputs(self)


def prepare(run: EmbeddingRun, batch: HostBatch) -> Prepared:
    """Stack the texts, [b, c, s], with `present` [b, p]: 1 where a row has that pair.

    The numbers of the pairs, such as `score`, have the shape [b, p].
    """
    sides = run.arguments.sides
    pairs = pair_batch(batch, sides)
    counts = pairs["segment_ids"].max(axis=(1, 2))
    slots = run.slots.fit(counts.max(initial=0))
    numbers = {"present": (np.arange(slots) < counts[:, None]).astype(np.float32)}
    for name in run.arguments.scores:
        if name not in batch:
            raise ConfigError(
                f"a batch of embedding with loss_type {run.arguments.loss_type} has {name}, not "
                f"only {', '.join(sorted(batch))}: use rows with {', '.join(sides)} and score"
            )
        numbers[name] = gather_pair_values(batch[name], pairs["segment_ids"][:, 0], slots)
    pair_inputs = pairs.select(name for name in pairs if name not in ("targets", "weights"))
    return with_arrays(pair_inputs, **numbers)


def gather_pair_values(values: np.ndarray, segment_ids: np.ndarray, slots: int) -> np.ndarray:
    """Return the value at the last token of each segment, float32 [b, p]; 0 without a segment."""
    pair_values = np.zeros((len(values), slots), np.float32)
    rows, columns = np.nonzero(last_tokens(segment_ids))
    pair_values[rows, segment_ids[rows, columns] - 1] = np.asarray(values)[rows, columns]
    return pair_values


def loss(run: EmbeddingRun, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the loss summed over the pairs; the loss of `cosent` belongs to the whole batch."""
    arguments, present = run.arguments, batch["present"]
    numbers = ("present", *arguments.scores)
    texts = {name: array for name, array in batch.items() if name not in numbers}
    rows, count = as_rows(texts), len(arguments.sides)
    output = _embed(models.learner, rows, present.shape[-1], key, arguments)

    def split_sides(embeddings: jax.Array) -> list[jax.Array]:
        split = embeddings.reshape(-1, count, *embeddings.shape[1:]).astype(jnp.float32)
        return [split[:, i].reshape(-1, split.shape[-1]) for i in range(count)]

    sides, pair_mask = split_sides(output.embeddings), present.reshape(-1)
    scores = [batch[name].reshape(-1) for name in arguments.scores]
    total, pairs = jnp.zeros(()), jnp.sum(pair_mask)
    if arguments.loss_type == MSE:
        teacher = _embed(models[_TEACHER], rows, present.shape[-1], None, arguments)
        targets = split_sides(jax.lax.stop_gradient(teacher.embeddings))
        return Loss.of(output, jnp.sum(pair_mask * _compute_squared_errors(sides, targets)), pairs)
    metrics = {}
    weight = pairs
    for length, factor in _cuts(run, sides[0].shape[-1]):
        cut = [side[:, :length] for side in sides]
        if arguments.loss_type != MARGIN_MSE or arguments.matryoshka_dims:
            cut = [unit_vectors(side) for side in cut]
        if arguments.loss_type == RANKING:
            pair_losses, right = ranking_losses(
                cut[0], cut[1:], pair_mask, arguments.temperature, symmetric=arguments.symmetric
            )
            metrics["accuracy"] = Metric.of(jnp.sum(pair_mask * right), pairs)
        elif arguments.loss_type == MARGIN_MSE:
            pair_losses = margin_losses(cut[0], cut[1], cut[2:], scores)
        else:
            cosines = jnp.sum(cut[0] * cut[1], axis=-1)
            if arguments.loss_type == COSENT:
                weight = jnp.minimum(pairs, 1.0)
                losses = [
                    cosent_loss(cosines, scores[0], pair_mask, t) for t in arguments.temperature
                ]
                total += factor * weight * sum(losses, jnp.zeros(())) / len(losses)
                continue
            assert arguments.loss_type == COSINE
            pair_losses = (cosines - scores[0]) ** 2
        total += factor * jnp.sum(pair_mask * pair_losses)
    return Loss.of(output, total, weight, **metrics)


def _embed(
    model: LanguageModel,
    rows: Batch,
    slots: int,
    key: jax.Array | None,
    arguments: EmbeddingArguments,
) -> EmbeddingOutput:
    """Return the embeddings of rows [r, s], [r, p, d].

    With `mini_batch_size`, a gradient computes the activations of each part of the rows again, so
    that only the embeddings of all rows exist at the same time.
    """

    def embed_part(part: Batch, key: jax.Array | None) -> EmbeddingOutput:
        output = cast(Callable[..., EmbeddingOutput], model)(
            **part.select(model.input_names),
            segments=slots,
            key=key,
            **build_noise_inputs(model, part, key, arguments.neftune_noise_alpha),
        )
        return output.replace(last_hidden_state=None)

    size, count = arguments.mini_batch_size, rows["input_ids"].shape[0]
    if size is None or size >= count:
        return embed_part(rows, key)
    if count % size:
        raise ConfigError(
            f"mini_batch_size {size} does not divide the {count} texts of a step "
            f"({len(arguments.sides)} for each row of a batch): choose a divisor"
        )
    parts = {name: x.reshape(count // size, size, *x.shape[1:]) for name, x in rows.items()}
    numbers = jnp.arange(count // size)

    @jax.checkpoint
    def one(number: jax.Array, part: dict[str, jax.Array]) -> Any:
        part_key = None if key is None else jax.random.fold_in(key, number)
        return embed_part(Inputs(part), part_key)

    stacked_output = jax.lax.map(lambda at: one(*at), (numbers, parts))
    summed = jax.tree.map(lambda x: jnp.sum(x, axis=0), stacked_output.replace(embeddings=None))
    vectors = stacked_output.embeddings
    return summed.replace(embeddings=vectors.reshape(count, *vectors.shape[2:]))


def _compute_squared_errors(
    sides: list[Float[Array, "n d"]], targets: list[Float[Array, "n d"]]
) -> Float[Array, " n"]:
    """Return the mean squared difference of the vectors of each pair."""
    if sides[0].shape != targets[0].shape:
        raise ConfigError(
            f"the embeddings have {sides[0].shape[-1]} numbers, those of the teacher "
            f"{targets[0].shape[-1]}: both models need the same number"
        )
    errors = [jnp.mean((a - b) ** 2, axis=-1) for a, b in zip(sides, targets, strict=True)]
    return sum(errors[1:], errors[0]) / len(errors)


def _cuts(run: EmbeddingRun, width: int) -> list[tuple[int, float]]:
    """Return the lengths of the cut embeddings in rising order, each with its loss weight."""
    dims = run.arguments.matryoshka_dims or (width,)
    weights = run.arguments.matryoshka_weights or (1.0,) * len(dims)
    if max(dims) > width:
        raise ConfigError(f"matryoshka_dims {list(dims)}: embeddings have {width} numbers")
    return sorted(zip(dims, weights, strict=True))


def measure(
    run: EmbeddingRun, batches: Iterable[HostBatch], state: EasyDeLState
) -> dict[str, float]:
    """Return the metrics of retrieval, or the correlations with the scores, of held-out rows."""
    numbers = ("present", *run.arguments.scores)
    sides = len(run.arguments.sides)

    def vectors(model: LanguageModel, batch: Batch) -> jax.Array:
        rows = as_rows({name: array for name, array in batch.items() if name not in numbers})
        slots = batch["present"].shape[-1]
        embeddings = _embed(model, rows, slots, None, run.arguments).embeddings
        return embeddings.reshape(-1, sides, *embeddings.shape[1:]).astype(jnp.float32)

    return vector_metrics(run, run.outputs.each(batches, state, vectors))


EMBEDDING = Method[EmbeddingRun](
    run=EmbeddingRun,
    prepare=prepare,
    loss=loss,
    measure=measure,
    whole_batches=True,  # the shape of `present` depends on all rows
    per_token=False,
    progress_columns=("loss", "accuracy"),
)


class EmbeddingTrainer(Trainer):
    """Trains an `Embedder`; `arguments` are `EmbeddingArguments`.

    Batches have `anchor_*` and `positive_*`, [b, s] each, and `negative_1_*`, …; or `sentence1_*`
    and `sentence2_*` with `score` [b, s].
    """

    entry = METHODS["embedding"]
    record = EMBEDDING
