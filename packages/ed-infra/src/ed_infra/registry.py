"""The registry of configuration classes and module classes by model type.

A family registers its classes when it is imported. The registry imports a family at the first use
of its model type, by the entry points of group `easydel.models` (name = model type, value =
module). A package therefore adds a family with an entry point.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol, TypeVar

from flax import nnx
from jax.sharding import PartitionSpec

from ed_infra.enums import TaskType, canonical_task
from ed_infra.errors import RegistryError, did_you_mean
from ed_infra.sharding import placement

C = TypeVar("C", bound=type)

_GROUP = "easydel.models"


class Registered(placement.ShardedConfig, Protocol):
    """The part of a configuration that the registry uses."""

    model_type: ClassVar[str]

    def replace(self) -> placement.ShardedConfig:
        """Return an unsealed copy."""
        ...


@dataclasses.dataclass(frozen=True)
class ModuleRegistration:
    """A module class with its configuration class.

    Attributes:
        module: The module class.
        config: The configuration class.
        embedding_layer_names: Names of embeddings, for weight conversion.
        layernorm_names: Names of norms.
    """

    module: type
    config: type
    embedding_layer_names: tuple[str, ...] = ()
    layernorm_names: tuple[str, ...] = ()

    def partition_rules(
        self, config: Registered, fully_sharded: bool = True
    ) -> tuple[tuple[str, PartitionSpec], ...]:
        """Return the sharding rules of the module from its abstract shapes."""
        config_copy = config.replace()
        module = nnx.eval_shape(lambda: self.module(config_copy, rngs=nnx.Rngs(0)))
        return placement.build_partition_rules(module, config_copy, fully_sharded=fully_sharded)


_configs: dict[str, type] = {}
_modules: dict[tuple[TaskType, str], ModuleRegistration] = {}


def register_config(config_type: str) -> Callable[[C], C]:
    """Decorate a configuration class: `@register_config("llama")`.

    Raises:
        RegistryError: another class has the model type.
    """

    def add(cls: C) -> C:
        registered_class = _configs.get(config_type)
        if registered_class is not None and not _same(registered_class, cls):
            raise RegistryError(
                f"model type {config_type!r} is configured by {registered_class.__module__}."
                f"{registered_class.__qualname__} already: choose another model type"
            )
        _configs[config_type] = cls
        return cls

    return add


def register_module(
    task_type: TaskType | str,
    config: type,
    model_type: str,
    embedding_layer_names: Sequence[str] | None = None,
    layernorm_names: Sequence[str] | None = None,
) -> Callable[[C], C]:
    """Decorate a module class: `@register_module(TaskType.CAUSAL_LM, LlamaConfig, "llama")`.

    The class gets the attributes `config_class`, `model_type` and `model_task`.

    Raises:
        RegistryError: another class has the task and model type.
    """
    task = canonical_task(task_type)

    def add(cls: C) -> C:
        registration = _modules.get((task, model_type))
        if registration is not None and not _same(registration.module, cls):
            raise RegistryError(
                f"{task} of model type {model_type!r} is {registration.module.__module__}."
                f"{registration.module.__qualname__} already: choose another model type"
            )
        _modules[task, model_type] = ModuleRegistration(
            cls, config, tuple(embedding_layer_names or ()), tuple(layernorm_names or ())
        )
        cls.config_class, cls.model_type, cls.model_task = config, model_type, task
        return cls

    return add


def _same(a: type, b: type) -> bool:
    # A repeated import (a notebook, a reload) defines the same classes again.
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}


def _load(model_type: str) -> None:
    """Import the module of a model type from an installed package."""
    point = _entry_points().get(model_type)
    if point is None:
        return
    try:
        point.load()
    except ImportError as error:
        raise RegistryError(
            f"model type {model_type!r} is provided by {point.value}, which cannot be imported: "
            f"{error}"
        ) from error


def model_types() -> list[str]:
    """Return all registered and installed model types, sorted."""
    return sorted({*_configs, *_entry_points()})


def get_config(model_type: str) -> Any:
    """Return the configuration class of a model type.

    Raises:
        RegistryError: no installed package provides it.
    """
    if model_type not in _configs:
        _load(model_type)
    if model_type not in _configs:
        raise _unknown(model_type)
    return _configs[model_type]


def get_module_registration(task_type: TaskType | str, model_type: str) -> ModuleRegistration:
    """Return the registration of a task and model type.

    The base module of a vision tower is its vision module; that of a model that compares images
    with texts is the whole model.

    Raises:
        RegistryError: no installed package provides the model type, or not for this task.
    """
    task = canonical_task(task_type)
    if (task, model_type) not in _modules:
        _load(model_type)
    if (task, model_type) not in _modules:
        _derive(task, model_type)
    if (task, model_type) in _modules:
        return _modules[task, model_type]
    if task == TaskType.BASE_MODULE:
        for fallback_task in (TaskType.BASE_VISION, TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION):
            if fallback_task in list_tasks(model_type):
                return get_module_registration(fallback_task, model_type)
    tasks = sorted(t.value for t in list_tasks(model_type))
    if tasks:
        raise RegistryError(
            f"model type {model_type!r} has no {task.value} module (it has: {', '.join(tasks)})"
        )
    raise _unknown(model_type)


def _derivable(module: type) -> Mapping[TaskType, Callable[[type], type]]:
    """Return the tasks that are derived from a module class, from its attribute `DERIVED`."""
    return getattr(module, "DERIVED", {})


def _derive(task: TaskType, model_type: str) -> None:
    """Create and register the module of a derived task."""
    for (_, name), of in list(_modules.items()):
        if name == model_type and task in _derivable(of.module):
            module_class = _derivable(of.module)[task](of.module)
            names = of.embedding_layer_names, of.layernorm_names
            register_module(task, of.config, model_type, *names)(module_class)
            return


def get_module(task_type: TaskType | str, model_type: str) -> Any:
    """Return the module class of a task and model type; errors as `get_module_registration`."""
    return get_module_registration(task_type, model_type).module


def get_modules_by_type(model_type: str, task_type: TaskType | str) -> tuple[type, type]:
    """Return configuration class and module class; errors as `get_module_registration`."""
    registration = get_module_registration(task_type, model_type)
    return registration.config, registration.module


def list_tasks(model_type: str) -> list[TaskType]:
    """Return the tasks of a model type: registered tasks, then derived tasks, in a fixed order."""
    _load(model_type)
    registered = {task: r.module for (task, name), r in _modules.items() if name == model_type}
    derived = dict.fromkeys(task for module in registered.values() for task in _derivable(module))
    return [*(task for task in registered if task not in derived), *derived]


def partition_rules(
    config: Registered, fully_sharded: bool = True
) -> tuple[tuple[str, PartitionSpec], ...] | None:
    """Return the sharding rules of a configuration.

    Args:
        config: The configuration; the result is None for unregistered model types.
        fully_sharded: Whether to include the fully-sharded axis.
    """
    tasks = list_tasks(config.model_type)
    if not tasks:
        return None
    registration = get_module_registration(tasks[0], config.model_type)
    return registration.partition_rules(config, fully_sharded)


def _unknown(model_type: str) -> RegistryError:
    known_types = model_types()
    close_types = difflib.get_close_matches(model_type.lower(), known_types, n=4, cutoff=0.5)
    also = f" (near it: {', '.join(close_types)})" if len(close_types) > 1 else ""
    return RegistryError(
        f"unknown model type {model_type!r}{did_you_mean(model_type, known_types)}{also} "
        f"(known: {', '.join(known_types) or 'none: is ed-models installed?'}). "
        f"Code from a repository is never executed: a package adds a family with an entry point of "
        f"group {_GROUP!r}, see docs/adding_models.md"
    )
