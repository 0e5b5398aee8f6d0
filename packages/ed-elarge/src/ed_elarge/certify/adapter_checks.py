"""What training changed: the weights, and the adapter."""

from __future__ import annotations

import numpy as np
from ed_models.checkpoints.tensor_files import TensorFiles

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
    ModelCheck("adapter_tensors", "The adapter fits the base model.", adapter_fits_base),
    ModelCheck("adapter_effect", "The adapter changes the model.", adapter_has_effect),
)
