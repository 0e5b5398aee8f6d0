"""Counts of entities, for precision, recall and F1 as in seqeval (its default mode).

An entity is a range of words with tags such as `B-PER`, `I-PER`. A predicted entity is correct if
its type, its first and its last word are those of a true entity.

Legend: b rows, s positions, c classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import Metric
from jaxtyping import Array, Bool, Int

_OUTSIDE, _BEGIN, _INSIDE, _END, _SINGLE = range(5)
_TAGS = {"O": _OUTSIDE, "B": _BEGIN, "I": _INSIDE, "E": _END, "S": _SINGLE}


class EntityTags(NamedTuple):
    """The tag and the type of each class.

    Attributes:
        tags: int [c + 1], one of O, B, I, E, S; the last entry is O.
        types: int [c + 1], the number of the type, such as `PER`; 0 = no type.
    """

    tags: np.ndarray
    types: np.ndarray

    @classmethod
    def of(cls, names: Mapping[int, str]) -> Self | None:
        """Return the tags of classes by number, or None if the names are not tags of entities."""
        tags, types = [], []
        numbers = {"": 0}
        for _, name in sorted(names.items()):
            tag, _, kind = name.partition("-")
            if tag not in _TAGS or (tag == "O") == bool(kind):
                return None
            tags.append(_TAGS[tag])
            types.append(numbers.setdefault(kind, len(numbers)))
        if len(numbers) == 1:
            return None
        return cls(np.array([*tags, _OUTSIDE]), np.array([*types, 0]))


def entity_metrics(
    tags: EntityTags,
    predicted: Int[Array, "b s"],
    targets: Int[Array, "b s"],
    word_mask: Bool[Array, "b s"],
    segment_ids: Int[Array, "b s"],
) -> dict[str, Metric]:
    """Return precision, recall and F1 of the entities; sums over batches are exact.

    Args:
        tags: the tags of the classes.
        predicted: predicted classes.
        targets: true classes.
        word_mask: the positions with a word.
        segment_ids: packed documents, each with its own entities.
    """
    # The words of a row without the other positions, then class -1, which is O.
    order = jnp.argsort(~word_mask, axis=1, stable=True)
    words, segments = (jnp.take_along_axis(x, order, axis=1) for x in (word_mask, segment_ids))
    segments = jnp.where(words, segments, 0)
    predicted_entities = _Entities.of(
        tags, jnp.take_along_axis(predicted, order, axis=1), words, segments
    )
    true = _Entities.of(tags, jnp.take_along_axis(targets, order, axis=1), words, segments)
    equal = (predicted_entities.types == true.types) & (predicted_entities.ends == true.ends)
    correct = _count(predicted_entities.begins & true.begins & equal)
    predicted_count, true_count = _count(predicted_entities.begins), _count(true.begins)
    return {
        "precision": Metric.of(correct, predicted_count),
        "recall": Metric.of(correct, true_count),
        "f1": Metric.of(2 * correct, predicted_count + true_count),
    }


class _Entities(NamedTuple):
    """The entities of rows of words.

    Attributes:
        begins: whether an entity begins at a word.
        ends: the last word of the entity that contains a word.
        types: the type of each word.
    """

    begins: Bool[Array, "b s"]
    ends: Int[Array, "b s"]
    types: Int[Array, "b s"]

    @classmethod
    def of(
        cls,
        table: EntityTags,
        classes: Int[Array, "b s"],
        words: Bool[Array, "b s"],
        segments: Int[Array, "b s"],
    ) -> Self:
        classes = jnp.where(words, classes, -1)
        tags, types = jnp.asarray(table.tags)[classes], jnp.asarray(table.types)[classes]
        same = segments[:, 1:] == segments[:, :-1]

        def shift_values(values: jax.Array, by: int) -> jax.Array:
            """Return the previous (1) or next (-1) values; 0 (O) outside the document."""
            inner = values[:, :-1] if by > 0 else values[:, 1:]
            segment_values = jnp.where(same, inner, 0)
            return jnp.pad(segment_values, ((0, 0), (1, 0) if by > 0 else (0, 1)))

        def is_tag(values: jax.Array, *tags: int) -> jax.Array:
            return jnp.isin(values, jnp.array(tags))

        previous_tags, next_tags = shift_values(tags, 1), shift_values(tags, -1)
        begins = is_tag(tags, _BEGIN, _SINGLE)
        begins |= is_tag(previous_tags, _END, _SINGLE, _OUTSIDE) & is_tag(tags, _END, _INSIDE)
        begins |= (tags != _OUTSIDE) & (shift_values(types, 1) != types)
        closes = is_tag(tags, _END, _SINGLE)
        closes |= is_tag(tags, _BEGIN, _INSIDE) & is_tag(next_tags, _BEGIN, _SINGLE, _OUTSIDE)
        closes |= (tags != _OUTSIDE) & (shift_values(types, -1) != types)
        places = jnp.where(closes, jnp.arange(tags.shape[1]), tags.shape[1])
        return cls(begins, jax.lax.cummin(places, axis=1, reverse=True), types)


def _count(flags: Bool[Array, "b s"]) -> jax.Array:
    return jnp.sum(flags, dtype=jnp.float32)
