"""Names of the umbrella in the sources of the packages: families, `Auto` classes, trainers.

The names of families and `Auto` classes are read from the sources, without an import. A new family
needs no entry here. The table is made at the first name that `easydel._table` lacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from easydel._other_names import MECHANISM_NAMES

#: Entry points of the model families.
FAMILIES = "easydel.models"
_CLASS = re.compile(r"^class ([A-Z]\w*)", re.MULTILINE)
_AUTO, _ANY_AUTO = "AutoEasyDeLModel", "AutoEasyDeL"
_TASKS = {
    "ForSequenceClassification": "sequence-classification",
    "ForEmbedding": "embedding",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}
#: End of the name of a derived class -> the class of its task, which type checkers know.
DERIVED_CLASSES = {
    "ForSequenceClassification": "ed_models.tasks.classification:SequenceClassifier",
    "ForEmbedding": "ed_models.tasks.embedding:Embedder",
    "ForTokenClassification": "ed_models.tasks.encoders:TokenClassifier",
    "ForQuestionAnswering": "ed_models.tasks.encoders:QuestionAnswerer",
    "ForMultipleChoice": "ed_models.tasks.encoders:MultipleChoice",
}
#: End of the name of a registered class -> ends of the names that the registry derives from it.
_DERIVED = {
    "ForCausalLM": ("ForSequenceClassification", "ForEmbedding"),
    "ForMaskedLM": tuple(_TASKS),
}
#: Classes that the registry does not derive, because Hugging Face has no such heads.
_WITHOUT_HEAD = ("NomicBertForMultipleChoice", "NomicBertForQuestionAnswering")


@cache
def list_names() -> dict[str, str]:
    """Return name -> the module that exports it."""
    families = _families()
    derived = dict.fromkeys(_derived_classes(families), __name__)
    return {**_trainers(), **_auto_classes(), **derived, **families}


def family_names(modules: Sequence[str]) -> dict[str, str]:
    """Return the names of the classes of some families, and of the classes derived from them."""
    families = _families()
    classes = {name: module for name, module in families.items() if module in modules}
    return {**dict.fromkeys(_derived_classes(classes), __name__), **classes}


def _derived_classes(families: Mapping[str, str]) -> dict[str, str]:
    """Return name of a derived class -> name of the registered class, from the names alone."""
    pairs = [
        (f"{name.removesuffix(end)}{other}", name)
        for end, others in _DERIVED.items()
        for name in families
        if name.endswith(end)
        for other in others
    ]
    return {name: owner for name, owner in pairs if name not in {*families, *_WITHOUT_HEAD}}


def __getattr__(name: str) -> object:
    """Return a class that the registry derives from the class of a family, or a mechanism."""
    from pkgutil import resolve_name

    from ed_infra.errors import EasyDeLError
    from ed_infra.registry import get_module

    if name in MECHANISM_NAMES:
        from ed_layers.attention import Mechanism

        field, mechanism = MECHANISM_NAMES[name]
        return replace(Mechanism(), **{field: mechanism})
    families = _families()
    owner = _derived_classes(families).get(name)
    if owner is not None:
        registered = resolve_name(f"{families[owner]}:{owner}")
        end = next(end for end in sorted(_TASKS, key=len) if name.endswith(end))
        with suppress(EasyDeLError):
            return get_module(_TASKS[end], registered.model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _families() -> dict[str, str]:
    """Return the classes of every family: `Qwen3Config`, `Qwen3Model`, `Qwen3ForCausalLM`."""
    modules = {point.value.partition(":")[0] for point in entry_points(group=FAMILIES)}
    return {
        name: module
        for module in sorted(modules, reverse=True)
        for name in _CLASS.findall(_source(module))
    }


def _auto_classes() -> dict[str, str]:
    """Return the `Auto` classes of models, and the class of states for each of them."""
    module = "ed_models.auto"
    auto = [name for name in _CLASS.findall(_source(module)) if name.startswith("Auto")]
    models = [name for name in auto if name not in (_AUTO, f"{_ANY_AUTO}Config")]
    states = [n.replace(_AUTO, "AutoState").replace(_ANY_AUTO, "AutoState") for n in models]
    classes: dict[str, str] = dict.fromkeys(auto, module)
    return classes | dict.fromkeys(("AutoState", *states), "ed_trainers.auto_state")


def _trainers() -> dict[str, str]:
    """Return trainer, options and configuration of each method: `DPOTrainer`, `DPOArguments`,
    `DPOConfig`."""
    from ed_trainers.arguments import METHODS

    owners = {}
    for entry in METHODS.values():
        arguments = entry.arguments
        owners[arguments.__name__] = arguments.__module__
        config = arguments.__name__.removesuffix("Arguments") + "Config"
        owners[config] = f"{arguments.__module__}:{arguments.__name__}"
        module, _, trainer = (
            entry.method.partition(":") if isinstance(entry.method, str) else ("",) * 3
        )
        if trainer.endswith("Trainer"):
            owners[trainer] = module
    return owners


def _source(module: str) -> str:
    """Return the source of a module, without importing the module."""
    top, *submodules = module.split(".")
    spec = find_spec(top)
    for part in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return ""
        top = f"{top}.{part}"
        spec = PathFinder.find_spec(top, list(spec.submodule_search_locations))
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    return Path(spec.origin).read_text("utf-8")
