"""What training changed: the weights, and the adapter."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ed_infra.enums import TaskType
from ed_infra.errors import EasyDeLError
from ed_models.checkpoints.tensor_files import TensorFiles
from ed_models.checkpoints.text_halves import text_name

from ed_elarge.certify.outcome import ModelCheck, NotApplicable, Outcome, pass_check, require_claim
from ed_elarge.certify.subject import CertifiedModel, read_json

#: Initial values of adapters that also change the weights of the base model.
CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga")


def weights_differ_from_base(subject: CertifiedModel) -> Outcome:
    if subject.is_adapter:
        raise NotApplicable("the directory contains only an adapter")
    tensors, base_tensors = subject.tensors, subject.base.tensors
    shared = [
        name
        for name in tensors
        if name in base_tensors and tensors[name].shape == base_tensors[name].shape
    ]
    if not shared:
        raise NotApplicable("the two models have no tensors with equal names and shapes")
    changed = sum(
        not np.array_equal(
            np.asarray(tensors.read(name)).astype(np.float32),
            np.asarray(base_tensors.read(name)).astype(np.float32),
        )
        for name in shared
    )
    require_claim(
        changed > 0,
        f"all {len(shared)} tensors equal those of the base model: the training or the merge had "
        "no effect",
    )
    return pass_check(f"{changed} of {len(shared)} tensors changed")


def untouched_tensors_are_equal(subject: CertifiedModel) -> Outcome:
    if subject.is_adapter:
        raise NotApplicable("the directory contains only an adapter")
    copied: dict[str, bool] = {}
    for task in (TaskType.CAUSAL_LM, TaskType.AUTO_BIND):
        is_own_task = task == TaskType.AUTO_BIND
        copied |= dict.fromkeys(_list_copied(subject.base.folder, task), is_own_task)
    frozen = _list_frozen(subject)
    if not copied and not frozen:
        raise NotApplicable("training may have changed every tensor of the base model")
    lost = sorted(name for name in copied if name not in subject.tensors)
    require_claim(
        not lost, f"{len(lost)} tensors of the base model are lost: {', '.join(lost[:5])}"
    )
    different = [name for name in copied if not _has_equal_bytes(subject, name)]
    towers = [name for name in copied if not copied[name]]
    # The towers of a model that was trained whole differ in most tensors.
    if 2 * len({*different} & {*towers}) > len(towers):
        different = [name for name in different if copied[name]]
        copied = {name: True for name in copied if name not in towers}
    different += [name for name in frozen if not _has_equal_values(subject, name)]
    require_claim(
        not different,
        f"{len(different)} tensors that training does not change differ from those of the base "
        f"model: {', '.join(different[:5])}",
    )
    return pass_check(f"{len({*copied, *frozen})} tensors are bit-equal to those of the base model")


def _list_copied(folder: Path, task: TaskType) -> list[str]:
    """Return the tensors that a model of a task does not compute with."""
    from ed_models.checkpoints import hub

    try:
        carried = hub.find_carried_tensors(folder, task)
    except EasyDeLError:  # no model of the task
        return []
    is_plain = carried is not None and carried.packing is None
    return [tensor.name for tensor in carried.tensors] if carried and is_plain else []


def _list_frozen(subject: CertifiedModel) -> list[str]:
    """Return the tensors of the base model in modules without an adapter."""
    if subject.adapter_folder is None or subject.model_folder is None:
        return []
    stems = {_name_module(name.removeprefix("base_model.model.")) for name in _adapter(subject)}
    base_tensors, rename = subject.base.tensors, _find_module_names(subject.base.folder)
    return [
        name
        for name in base_tensors
        if name in subject.tensors
        and subject.tensors[name].shape == base_tensors[name].shape
        and not {_name_module(n) for n in (name, text_name(name) or name, rename(name))} & stems
    ]


def _find_module_names(folder: Path) -> Callable[[str], str]:
    """Return a function from a tensor of a checkpoint to its module in transformers, as an adapter
    names the module."""
    from ed_models.adapters.peft_layout import get_modules
    from ed_models.checkpoints import hub
    from ed_models.weights.rules import renamer

    try:
        return renamer(get_modules(hub.without_values(folder)).names)
    except EasyDeLError:  # no model of this project
        return renamer({})


def _name_module(name: str) -> str:
    """Return the module of a tensor; the experts of a layer are one module."""
    stem, _, experts = name.partition(".experts")
    if experts:
        return stem
    return (
        re.split(r"\.(?:lora_|modules_to_save|token_adapter|base_layer)", stem)[0]
        .removesuffix(".weight")
        .removesuffix(".bias")
    )


def _has_equal_bytes(subject: CertifiedModel, name: str) -> bool:
    tensors, base_tensors = subject.tensors, subject.base.tensors
    kinds = [(files[name].format, files[name].shape) for files in (tensors, base_tensors)]
    return kinds[0] == kinds[1] and np.array_equal(
        tensors.read_bytes(name), base_tensors.read_bytes(name)
    )


def _has_equal_values(subject: CertifiedModel, name: str) -> bool:
    """Compare a tensor with that of the base model in the dtype of the saved model."""
    values, base_values = subject.tensors.read(name), subject.base.tensors.read(name)
    return np.array_equal(values, np.asarray(base_values).astype(values.dtype))


def adapter_has_effect(subject: CertifiedModel) -> Outcome:
    if subject.adapter_folder is None:
        raise NotApplicable("there is no adapter")
    tensors = _adapter(subject)
    assert subject.adapter_folder is not None
    alpha = read_json(subject.adapter_folder / "adapter_config.json").get("lora_alpha", 8)
    require_claim(alpha != 0, "lora_alpha is 0: the adapter has no effect")
    seconds = [name for name in tensors if "lora_B" in name]
    if not seconds:
        raise NotApplicable("the adapter has no LoRA matrices")
    zero = [name for name in seconds if not np.any(np.asarray(tensors.read(name)))]
    require_claim(
        len(zero) < len(seconds),
        f"all {len(seconds)} matrices lora_B are 0: the adapter has no effect",
    )
    return pass_check(f"{len(seconds) - len(zero)} of {len(seconds)} matrices lora_B are not 0")


def adapter_fits_base(subject: CertifiedModel) -> Outcome:
    from ed_models.adapters.peft import read_adapter
    from ed_models.adapters.token_tables import add_token_rows
    from ed_models.checkpoints import hub

    tensors = _adapter(subject)
    assert subject.adapter_folder is not None
    settings = read_json(subject.adapter_folder / "adapter_config.json")
    initial = settings.get("init_lora_weights")
    require_claim(
        not str(initial).startswith(CHANGES_BASE),
        f"init_lora_weights is {initial}: the adapter was trained on changed weights of the base "
        "model, and fits the original weights only after a conversion to plain LoRA",
    )
    for key in ("target_modules", "modules_to_save"):
        listed = settings.get(key)
        for module in listed if isinstance(listed, list) else ():
            require_claim(
                any(f".{module}." in name for name in tensors),
                f"{key} of adapter_config.json lists {module}, and the adapter has no tensor of it",
            )
    base = add_token_rows(hub.without_values(subject.base.folder), subject.adapter_folder)
    read_adapter(base, subject.adapter_folder)
    return pass_check(f"{len(tensors)} tensors fit the modules of the base model")


def _adapter(subject: CertifiedModel) -> TensorFiles:
    if subject.adapter_folder is None:
        raise NotApplicable("there is no adapter")
    path = subject.adapter_folder / "adapter_model.safetensors"
    require_claim(path.is_file(), f"{path.name} is missing")
    return TensorFiles.open(subject.adapter_folder)


ADAPTER_CHECKS = (
    ModelCheck(
        "changed", "The weights differ from those of the base model.", weights_differ_from_base
    ),
    ModelCheck(
        "untouched",
        "Tensors that training does not change are bit-equal to those of the base model.",
        untouched_tensors_are_equal,
    ),
    ModelCheck("adapter_tensors", "The adapter fits the base model.", adapter_fits_base),
    ModelCheck("adapter_effect", "The adapter changes the model.", adapter_has_effect),
)
