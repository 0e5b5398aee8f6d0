"""The task of a checkpoint, and the tasks of a model type, without jax.

The decorators `register_module` in the source of a family list its tasks.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ed_infra.enums import TaskType, canonical_task
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.package_files import RUN_FOLDERS
from ed_models.checkpoints.orbax_arrays import find_orbax_config, find_orbax_item
from ed_models.checkpoints.text_halves import (
    CONDITIONAL,
    TASK_ENDINGS,
    find_config,
    specialize_task,
)

from ed_elarge.config.local_paths import expand_path, is_file, is_folder

#: Tasks that no family derives from another task: their models read other inputs.
SEPARATE_TASKS = (
    TaskType.SEQUENCE_TO_SEQUENCE,
    TaskType.IMAGE_TEXT_TO_TEXT,
    TaskType.ANY_TO_ANY,
    TaskType.SPEECH_SEQUENCE_TO_SEQUENCE,
    TaskType.CTC,
    TaskType.IMAGE_CLASSIFICATION,
    TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION,
)
_MODULES = "modules.json"  # of sentence-transformers


def read_task_config(name_or_path: str, revision: str | None = None) -> Mapping[str, Any] | None:
    """Return the content of config.json; None if the file is not on this machine.

    A GGUF file and a folder of CTranslate2 have these settings in another form, and a checkpoint of
    MaxText or tunix has the file beside it.
    """
    source = expand_path(name_or_path)
    try:
        settings = _read_other_layout(source)
    except (CheckpointError, OSError, ValueError):
        return None  # the error of the loader tells more
    if settings is not None:
        return settings
    is_foreign = is_folder(source) and not is_file(source / "config.json")
    item = find_orbax_item(source) if is_foreign else None
    if item is not None and (beside := find_orbax_config(item)) is not None:
        name_or_path = str(beside.parent)
    if is_file(source / RUN_FOLDERS[0] / "config.json") and not is_file(source / "config.json"):
        name_or_path = str(source / RUN_FOLDERS[0])
    path = find_config(name_or_path, revision)
    try:
        config = None if path is None else json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def find_model_gguf(source: Path) -> Path | None:
    """Return the GGUF file of a model on this machine; None for other models.

    Raises:
        CheckpointError: a folder contains several models.
    """
    if source.suffix == ".gguf" and is_file(source):
        return source
    if not is_folder(source) or is_file(source / "config.json") or not any(source.glob("*.gguf")):
        return None
    from ed_models.checkpoints.gguf.directory import file_in

    return file_in(source)


def _read_other_layout(source: Path) -> Mapping[str, Any] | None:
    """Return config.json of a GGUF file or a folder of CTranslate2; None for other models."""
    file = find_model_gguf(source)
    if file is not None:
        from ed_models.checkpoints.gguf.directory import read_gguf_config

        # The loader reads the weights of each format as float32.
        return {**read_gguf_config(file), "dtype": "float32"}
    if is_folder(source) and any(source.glob("vocabulary.*")):
        from ed_models.checkpoints.ctranslate2_folder import (
            is_ctranslate2_folder,
            read_ctranslate2_config,
        )

        return read_ctranslate2_config(source) if is_ctranslate2_folder(source) else None
    return None


def find_task(name_or_path: str, config: Mapping[str, Any]) -> TaskType | None:
    """Return the task that a checkpoint names, from its config.json.

    `ed_models.checkpoints.checks.detect_task` reads the same with the registry.
    """
    if is_file(expand_path(name_or_path) / _MODULES):
        return None
    names = config.get("architectures")
    model_type = str(config.get("model_type"))
    for name in map(str, names if isinstance(names, list) else ()):
        tasks = registered_tasks(model_type)
        if name.endswith(CONDITIONAL) and tasks:
            return tasks[0]
        for ending, task in TASK_ENDINGS.items():
            if name.endswith(ending):
                return specialize_task(task, tasks)
    return None


def explain_task(name_or_path: str, config: Mapping[str, Any], task: TaskType) -> str | None:
    """Return why a checkpoint has no model for a task; None if it has one, or is not known."""
    if task not in SEPARATE_TASKS:
        return None
    parts = [config, config.get("text_config"), config.get("vision_config")]
    types = [str(part.get("model_type")) for part in parts if isinstance(part, Mapping)]
    tasks = dict.fromkeys(task for name in types for task in registered_tasks(name))
    if not tasks or task in tasks:
        return None
    task_names = ", ".join(repr(task.value) for task in tasks)
    return (
        f"{name_or_path} holds a model of type {types[0]!r}, which has no model for "
        f"{task.value!r} (it has: {task_names} and derived tasks)"
    )


@functools.cache
def registered_tasks(model_type: str) -> tuple[TaskType, ...]:
    """Return the tasks in the source of a family, without derived tasks."""
    modules = {e.value for e in metadata.entry_points(group="easydel.models", name=model_type)}
    tasks: dict[TaskType, None] = {}
    for module in modules:
        spec = find_spec(module.partition(":")[0])
        if spec is None or spec.origin is None:
            continue
        tree = ast.parse(Path(spec.origin).read_text("utf-8"))
        tasks |= dict.fromkeys(_read_decorators(tree, model_type))
    return tuple(tasks)


def _read_decorators(tree: ast.Module, model_type: str) -> Iterator[TaskType]:
    calls = (
        node
        for definition in tree.body
        if isinstance(definition, ast.ClassDef)
        for node in definition.decorator_list
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_module")
    )
    for call in calls:
        names = {word.arg: word.value for word in call.keywords}
        first, registered_type = (*call.args, names.get("task_type"))[0], names.get("model_type")
        if (
            not isinstance(registered_type, ast.Constant)
            or registered_type.value != model_type
            or first is None
        ):
            continue
        name = ast.unparse(first).rpartition(".")[2].strip("'\"")
        try:
            yield TaskType[name] if name in TaskType.__members__ else canonical_task(name)
        except ConfigError:
            continue
