"""The tensors of a model: names, shapes, numbers and formats."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from ed_infra.errors import EasyDeLError
from ed_models.checkpoints.tensor_files import INDEX_NAME, is_finite, read_header

from ed_elarge.certify.outcome import ModelCheck, NotApplicable, Outcome, pass_check, require_claim
from ed_elarge.certify.subject import CertifiedModel, read_json

#: Methods of quantization whose files contain codes.
WITH_CODES = ("bitsandbytes", "gptq", "awq", "compressed-tensors", "hqq", "fp8", "mxfp4", "quanto")


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
    require_claim(not missing, f"tensors of the index are not in their files: {missing[:5]}")
    require_claim(not unlisted, f"tensors of the files are not in the index: {unlisted[:5]}")
    return pass_check(f"{len(listed)} tensors")


def numbers_are_finite(subject: CertifiedModel) -> Outcome:
    tensors, count = subject.tensors, 0
    for name in tensors:
        require_claim(is_finite(tensors.read(name)), f"{name} has NaN or infinite numbers")
        count += 1
    return pass_check(f"{count} tensors")


def matrices_are_not_empty(subject: CertifiedModel) -> Outcome:
    tensors, count = subject.tensors, 0
    for name in tensors:
        entry = tensors[name]
        if len(entry.shape) == 2 and "lora_B" not in name and name.endswith(".weight"):
            values = np.asarray(tensors.read(name))
            require_claim(bool(np.any(values)), f"all numbers of {name} are 0")
            count += 1
    return pass_check(f"{count} matrices")


def dtype_is_stated(subject: CertifiedModel) -> Outcome:
    stated = subject.settings.get("dtype") or subject.settings.get("torch_dtype")
    if not isinstance(stated, str):
        raise NotApplicable("config.json has no dtype")
    if subject.settings.get("quantization_config"):
        raise NotApplicable("the weights are quantized")
    sizes: Counter[str] = Counter()
    tensors = subject.tensors
    for name in tensors:
        sizes[str(tensors[name].dtype)] += tensors[name].stop - tensors[name].start
    most = sizes.most_common(1)[0][0]
    require_claim(
        most == stated.removeprefix("torch."),
        f"config.json states {stated}, and most bytes are {most}",
    )
    return pass_check(most)


def head_is_tied_or_stored(subject: CertifiedModel) -> Outcome:
    tensors = subject.tensors
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    tables = [name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
    tied = subject.settings.get("tie_word_embeddings")
    if tied is None or len(tables) != 1:
        raise NotApplicable("config.json does not state whether the head is tied")
    if not tied:
        return pass_check("the head is not tied")
    if not heads:
        return pass_check("the head is tied and not stored")
    same = np.array_equal(tensors.read(heads[0]), tensors.read(tables[0]))
    require_claim(
        same,
        f"tie_word_embeddings is true, but {heads[0]} differs from {tables[0]}: one of the two is "
        "lost when the model is loaded",
    )
    return pass_check(f"{heads[0]} equals {tables[0]}")


def tensors_fit_the_configuration(subject: CertifiedModel) -> Outcome:
    from ed_infra import registry
    from ed_models.checkpoints import hub

    if subject.is_adapter:
        raise NotApplicable("the directory contains only an adapter")
    model_type = str(read_json(subject.folder / "config.json").get("model_type"))
    if model_type not in registry.model_types():
        raise NotApplicable(f"the model type {model_type} is not registered")
    count = len(subject.tensors)
    hub.check_weights(subject.folder)
    return pass_check(f"{count} tensors have the names and shapes of the configuration")


def quantization_is_stated(subject: CertifiedModel) -> Outcome:
    stated = subject.settings.get("quantization_config") or {}
    method = str(stated.get("quant_method", ""))
    matrices = [n for n in subject.tensors if len(subject.tensors[n].shape) >= 2]
    coded = [n for n in matrices if _has_codes(subject.tensors[n])]
    if method in WITH_CODES:
        require_claim(
            bool(coded),
            f"config.json states the quantization {method}, and all {len(matrices)} matrices are "
            "plain numbers: remove quantization_config",
        )
        return pass_check(f"{method}, {len(coded)} tensors with codes")
    require_claim(
        bool(stated) or not coded,
        f"config.json has no quantization_config, and {len(coded)} tensors have codes: {coded[:3]}",
    )
    return pass_check(f"{len(coded)} of {len(matrices)} tensors have codes")


def other_weights_are_equal(subject: CertifiedModel) -> Outcome:
    from ed_models.checkpoints.pickled_files import PICKLED, read_pickled
    from ed_models.checkpoints.tensor_files import TensorFiles

    file = subject.folder / PICKLED
    tensors = subject.tensors
    if not file.is_file():
        raise NotApplicable(f"there is no {PICKLED}")
    pickled_tensors = TensorFiles(read_pickled(file))
    different = [
        name
        for name in pickled_tensors
        if name not in tensors
        or tensors[name].shape != pickled_tensors[name].shape
        or not np.array_equal(
            _to_float32(tensors.read(name)), _to_float32(pickled_tensors.read(name))
        )
    ]
    require_claim(
        not different,
        f"{PICKLED} and the safetensors files contain different weights: {different[:3]}",
    )
    return pass_check(
        f"{len(pickled_tensors)} tensors of {PICKLED} are those of the safetensors files"
    )


def _has_codes(entry: Any) -> bool:
    return entry.dtype.kind in "iu" or "float8" in str(entry.dtype) or "float4" in str(entry.dtype)


def _to_float32(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).astype(np.float32)


def _names(file: Path) -> list[str]:
    try:
        return list(read_header(file))
    except EasyDeLError as error:
        require_claim(False, str(error))
        return []


TENSOR_CHECKS = (
    ModelCheck("index", "The index lists every tensor of the files.", index_is_complete),
    ModelCheck(
        "tensors",
        "The files contain the tensors that config.json describes.",
        tensors_fit_the_configuration,
    ),
    ModelCheck("finite", "All weights are finite.", numbers_are_finite),
    ModelCheck("not_empty", "No matrix is 0.", matrices_are_not_empty),
    ModelCheck("dtype", "config.json states the dtype of the weights.", dtype_is_stated),
    ModelCheck("tied_head", "A tied head equals the embeddings.", head_is_tied_or_stored),
    ModelCheck(
        "codes", "config.json states whether the weights are quantized.", quantization_is_stated
    ),
    ModelCheck(
        "one_model", "Files of other formats contain the same weights.", other_weights_are_equal
    ),
)
