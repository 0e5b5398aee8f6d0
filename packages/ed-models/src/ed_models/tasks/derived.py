"""Other tasks of a family: module classes that follow from its causal language model.

A family registers one class. Its body alone, a classifier and an embedder are made of that class
when the registry is asked for them, so they are there for every family, anyone's.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from ed_infra.enums import TaskType

from ed_models.base.module import EasyDeLBaseModule
from ed_models.checkpoints.task_rules import under_a_classifier, without_first_part
from ed_models.tasks.classification import SequenceClassifier
from ed_models.tasks.embedding import Embedder
from ed_models.tasks.head_model import HeadModel


def base_module(headed: type[HeadModel]) -> type[EasyDeLBaseModule]:
    """The body alone."""
    body = headed.body_class
    if getattr(body, "head_class", headed) is headed:
        return body
    # Another family's body: its names follow from the other family's table.
    return _subclass(headed, body.__name__, (body,), without_first_part(headed.WEIGHTS))


def classifier(headed: type[HeadModel]) -> type[EasyDeLBaseModule]:
    """The body with a head that classifies or scores sequences."""
    name = f"{_stem(headed)}ForSequenceClassification"
    made = _subclass(headed, name, (SequenceClassifier,), under_a_classifier(headed.WEIGHTS))
    made.body_class = headed.body_class
    return made


def embedder(headed: type[HeadModel]) -> type[EasyDeLBaseModule]:
    """The body, and pooling."""
    body = base_module(headed)
    made = _subclass(headed, f"{_stem(headed)}ForEmbedding", (Embedder, body), body.WEIGHTS)
    made.architecture = body.__name__  # what its files hold
    return made


DERIVED: Mapping[TaskType, Callable[[type[Any]], type]] = {
    TaskType.BASE_MODULE: base_module,
    TaskType.SEQUENCE_CLASSIFICATION: classifier,
    TaskType.EMBEDDING: embedder,
}


# What else a class says of its files (see `ed_models.checkpoints.loading.load`).
_OF_FILES = ("OTHER_NAMES", "TIED_WEIGHTS", "MODULES")


def _stem(headed: type[HeadModel]) -> str:
    """`Gemma3TextModel` -> `Gemma3Text`: Hugging Face names the other classes after the body."""
    name = headed.body_class.__name__
    return name.removesuffix("Model") if name.endswith("Model") else headed.__name__


def _subclass(headed: type[HeadModel], name: str, bases: tuple[type, ...], weights: Any) -> Any:
    doc = f"{bases[0].__doc__}\n\nMade of `{headed.__name__}`."
    content = {"__module__": headed.__module__, "__doc__": doc, "WEIGHTS": weights}
    content |= {name: getattr(headed, name) for name in _OF_FILES if hasattr(headed, name)}
    return types.new_class(name, bases, {}, lambda namespace: namespace.update(content))
