"""The files of a model: tensors, index, positions, generation settings, adapters."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from typing import Any

import numpy as np
from ed_infra.errors import EasyDeLError
from ed_models.checkpoints.finite import is_finite
from ed_models.checkpoints.tensor_files import INDEX_NAME, TensorFiles, read_header

from ed_elarge.certify.outcome import ModelCheck, NotApplicable, Outcome, passed, require
from ed_elarge.certify.subject import CertifiedModel, read_json

#: Largest `model_max_length` that is a number of tokens; transformers writes 1e30 for "unknown".
KNOWN_LENGTH = 10**9
#: Kinds of RoPE whose factor extends the original positions to `max_position_embeddings`.
EXTENDING = ("yarn", "longrope")


def index_is_complete(subject: CertifiedModel) -> Outcome:
    path = subject.folder / INDEX_NAME
    if not path.is_file():
        raise NotApplicable(f"there is no {INDEX_NAME}")
    listed = read_json(path).get("weight_map", {})
    stored: dict[str, str] = {}
    for file in sorted(subject.folder.glob("*.safetensors")):
        stored |= dict.fromkeys(_names(file), file.name)
    missing = sorted(name for name, file in listed.items() if stored.get(name) != file)
    unlisted = sorted({*stored} - {*listed})
    require(not missing, f"tensors of the index are not in their files: {missing[:5]}")
    require(not unlisted, f"tensors of the files are not in the index: {unlisted[:5]}")
    return passed(f"{len(listed)} tensors")


def numbers_are_finite(subject: CertifiedModel) -> Outcome:
    tensors, count = _tensors(subject), 0
    for name in tensors:
        require(is_finite(tensors.read(name)), f"{name} has NaN or infinite numbers")
        count += 1
    return passed(f"{count} tensors")


def matrices_are_not_empty(subject: CertifiedModel) -> Outcome:
    tensors, count = _tensors(subject), 0
    for name in tensors:
        entry = tensors[name]
        if len(entry.shape) == 2 and "lora_B" not in name and name.endswith(".weight"):
            values = np.asarray(tensors.read(name))
            require(bool(np.any(values)), f"all numbers of {name} are 0")
            count += 1
    return passed(f"{count} matrices")


def dtype_is_stated(subject: CertifiedModel) -> Outcome:
    stated = subject.settings.get("dtype") or subject.settings.get("torch_dtype")
    if not isinstance(stated, str):
        raise NotApplicable("config.json has no dtype")
    if subject.settings.get("quantization_config"):
        raise NotApplicable("the weights are quantized")
    sizes: Counter[str] = Counter()
    tensors = _tensors(subject)
    for name in tensors:
        sizes[str(tensors[name].dtype)] += tensors[name].stop - tensors[name].start
    most = sizes.most_common(1)[0][0]
    require(
        most == stated.removeprefix("torch."),
        f"config.json states {stated}, and most bytes are {most}",
    )
    return passed(most)


def head_is_tied_or_stored(subject: CertifiedModel) -> Outcome:
    tensors = _tensors(subject)
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    tables = [name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
    tied = subject.settings.get("tie_word_embeddings")
    if tied is None or len(tables) != 1:
        raise NotApplicable("config.json does not state whether the head is tied")
    if not tied:
        return passed("the head is not tied")
    if not heads:
        return passed("the head is tied and not stored")
    same = np.array_equal(tensors.read(heads[0]), tensors.read(tables[0]))
    require(
        same,
        f"tie_word_embeddings is true, but {heads[0]} differs from {tables[0]}: one of the two is "
        "lost when the model is loaded",
    )
    return passed(f"{heads[0]} equals {tables[0]}")


def positions_agree(subject: CertifiedModel) -> Outcome:
    settings = subject.settings
    most = settings.get("max_position_embeddings")
    if not isinstance(most, int):
        raise NotApplicable("config.json has no max_position_embeddings")
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if factor and original and scaling.get("rope_type", scaling.get("type")) in EXTENDING:
        require(
            most <= factor * original * 1.01,
            f"max_position_embeddings is {most}, and {factor} times {original} positions are "
            f"{factor * original:.0f}: the model was not extended to more",
        )
    evidence = f"{most} positions"
    try:
        length = subject.tokenizer.model_max_length
    except NotApplicable:
        return passed(evidence)
    if length < KNOWN_LENGTH:
        require(
            length <= most,
            f"model_max_length of the tokenizer is {length}, and the model has {most} positions",
        )
        evidence += f", model_max_length {length}"
    return passed(evidence)


def generation_settings_are_valid(subject: CertifiedModel) -> Outcome:
    from transformers import GenerationConfig

    given = dict(subject.generation_settings)
    if not given:
        raise NotApplicable("there is no generation_config.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            GenerationConfig(**given).validate(strict=True)
        except ValueError as error:
            require(False, f"generation_config.json: {error}".partition("\n")[0][:400])
    return passed(json.dumps({k: v for k, v in given.items() if k != "transformers_version"}))


def weights_differ_from_base(subject: CertifiedModel) -> Outcome:
    if subject.is_adapter:
        raise NotApplicable("the directory contains only an adapter")
    own, other = _tensors(subject), _tensors(subject.base)
    shared = [name for name in own if name in other and own[name].shape == other[name].shape]
    if not shared:
        raise NotApplicable("the two models have no tensors with equal names and shapes")
    changed = sum(
        not np.array_equal(
            np.asarray(own.read(name)).astype(np.float32),
            np.asarray(other.read(name)).astype(np.float32),
        )
        for name in shared
    )
    require(
        changed > 0,
        f"all {len(shared)} tensors equal those of the base model: the training or the merge had "
        "no effect",
    )
    return passed(f"{changed} of {len(shared)} tensors changed")


def adapter_has_effect(subject: CertifiedModel) -> Outcome:
    if subject.adapter_folder is None:
        raise NotApplicable("there is no adapter")
    path = subject.adapter_folder / "adapter_model.safetensors"
    require(path.is_file(), f"{path.name} is missing")
    tensors = TensorFiles.open(subject.adapter_folder)
    seconds = [name for name in tensors if "lora_B" in name]
    if not seconds:
        raise NotApplicable("the adapter has no LoRA matrices")
    zero = [name for name in seconds if not np.any(np.asarray(tensors.read(name)))]
    require(
        len(zero) < len(seconds),
        f"all {len(seconds)} matrices lora_B are 0: the adapter has no effect",
    )
    return passed(f"{len(seconds) - len(zero)} of {len(seconds)} matrices lora_B are not 0")


def _tensors(subject: CertifiedModel) -> TensorFiles:
    if not list(subject.folder.glob("*.safetensors")):
        raise NotApplicable("there are no safetensors files")
    return TensorFiles.open(subject.folder)


def _names(file: Any) -> list[str]:
    try:
        return list(read_header(file))
    except EasyDeLError as error:
        require(False, str(error))
        return []


CHECKS = (
    ModelCheck("index", "The index lists every tensor of the files.", index_is_complete),
    ModelCheck("finite", "All weights are finite.", numbers_are_finite),
    ModelCheck("not_empty", "No matrix is 0.", matrices_are_not_empty),
    ModelCheck("dtype", "config.json states the dtype of the weights.", dtype_is_stated),
    ModelCheck("tied_head", "A tied head equals the embeddings.", head_is_tied_or_stored),
    ModelCheck("positions", "The limits of positions agree.", positions_agree),
    ModelCheck(
        "generation_settings",
        "transformers accepts generation_config.json.",
        generation_settings_are_valid,
    ),
    ModelCheck(
        "changed", "The weights differ from those of the base model.", weights_differ_from_base
    ),
    ModelCheck("adapter_effect", "The adapter changes the model.", adapter_has_effect),
)
