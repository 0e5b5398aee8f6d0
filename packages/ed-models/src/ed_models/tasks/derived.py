"""Further tasks of a family, which follow from its language model.

A family registers its language model. The registry calls these functions for the body, a
classifier and an embedder of the family, so every family has these tasks, in any package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ed_infra.enums import TaskType

if TYPE_CHECKING:
    from ed_models.tasks.classification import SequenceClassifier
    from ed_models.tasks.embedding import Embedder


def base_module(family: type[Any]) -> type[Any]:
    """Return the class of the body without a head."""
    from ed_models.tasks.embedding import body_of

    return body_of(family)


def classifier(family: type[Any]) -> type[SequenceClassifier[Any]]:
    """Return the class that classifies or scores sequences."""
    from ed_models.tasks.classification import SequenceClassifier

    return SequenceClassifier.for_family(family)


def embedder(family: type[Any]) -> type[Embedder[Any]]:
    """Return the class that computes embeddings of sequences."""
    from ed_models.tasks.embedding import Embedder

    return Embedder.for_family(family)


DERIVED: Mapping[TaskType, Callable[[type[Any]], type]] = {
    TaskType.BASE_MODULE: base_module,
    TaskType.SEQUENCE_CLASSIFICATION: classifier,
    TaskType.EMBEDDING: embedder,
}
