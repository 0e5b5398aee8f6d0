"""GGUF files: their tokenizer and settings, and their logits in llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ed_elarge.certify import llama_cpp_logits as llama_cpp
from ed_elarge.certify.chats import PASSAGE
from ed_elarge.certify.comparisons import (
    LENGTH,
    LOGITS_LIMIT,
    compare_distributions,
    compare_logits,
    compute_logits,
)
from ed_elarge.certify.outcome import ModelCheck, NotApplicable, Outcome, pass_check, require_claim
from ed_elarge.certify.settings_checks import differing, read_architecture
from ed_elarge.certify.subject import CertifiedModel

#: Type of a token that programs hide, and at which they may stop (`llama_token_type`).
CONTROL = 3
#: Settings that the metadata of GGUF files contains.
STATED = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layer_norm_rms_epsilon",
        "rope_parameters",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "sliding_window",
    }
)
#: Formats whose numbers are those of the model, rounded once.
UNQUANTIZED = frozenset({"F32", "F16", "BF16"})


def tokens_are_those_of_the_model(subject: CertifiedModel) -> Outcome:
    from ed_models.checkpoints.gguf.files import read_parts
    from ed_models.checkpoints.gguf.vocabulary import TOKENIZER_KEY
    from ed_models.checkpoints.gguf.vocabulary_writer import NO_TOKENIZER, tokenizer_metadata

    count = 0
    for file in _files(subject):
        stored = read_parts(file).metadata
        tokens = _list_values(stored.get(f"{TOKENIZER_KEY}.tokens"))
        expected = tokenizer_metadata(subject.folder, len(tokens))
        if expected == dict(NO_TOKENIZER):
            raise NotApplicable("the model has no tokenizer.json")
        model_tokens = _list_values(expected[f"{TOKENIZER_KEY}.tokens"])
        moved = [i for i, (a, b) in enumerate(zip(tokens, model_tokens, strict=False)) if a != b]
        require_claim(
            not moved and len(tokens) >= len(model_tokens),
            f"{file.name}: {len(moved)} tokens differ from those of the model, from id "
            f"{moved[0] if moved else len(tokens)}",
        )
        types = _list_values(stored.get(f"{TOKENIZER_KEY}.token_type"))
        control = [
            i
            for i, t in enumerate(_list_values(expected[f"{TOKENIZER_KEY}.token_type"]))
            if t == CONTROL
        ]
        plain_tokens = [model_tokens[i] for i in control if i < len(types) and types[i] != CONTROL]
        require_claim(
            not plain_tokens,
            f"{file.name}: {plain_tokens[:4]} are no control tokens: replies contain them",
        )
        for key in ("eos_token_id", "bos_token_id", "pre"):
            model_value = expected.get(f"{TOKENIZER_KEY}.{key}")
            file_value = stored.get(f"{TOKENIZER_KEY}.{key}")
            fits = file_value == model_value or (
                key == "eos_token_id" and file_value in subject.end_token_ids
            )
            require_claim(
                model_value is None or fits,
                f"{file.name}: {key} is {file_value}, and that of the model is {model_value}",
            )
        _same_template(file, stored.get("tokenizer.chat_template"), subject)
        count += 1
    return pass_check(f"{count} files")


def settings_are_those_of_the_model(subject: CertifiedModel) -> Outcome:
    from ed_models.checkpoints.gguf.directory import as_directory

    count = 0
    for file in _files(subject):
        model_settings = read_architecture(subject.folder)
        stated_settings = {name: value for name, value in model_settings.items() if name in STATED}
        different = differing(read_architecture(as_directory(file)), stated_settings)
        require_claim(not different, f"{file.name}: {'; '.join(different[:6])}")
        count += 1
    return pass_check(f"{count} files")


def stays_near_the_model(subject: CertifiedModel) -> Outcome:
    from ed_models.checkpoints import hub

    files, ids = _files(subject), _passage(subject)
    exact = compute_logits(subject.model, ids)
    evidence = []
    for file in files:
        logits = compute_logits(hub.from_pretrained(file), ids)
        evidence.append(f"{file.name}: {compare_distributions(logits, exact, 'the model')}")
    return pass_check("; ".join(evidence))


def equals_llama_cpp(subject: CertifiedModel) -> Outcome:
    from ed_models.checkpoints import hub
    from ed_models.checkpoints.gguf.files import read_parts

    files = _files(subject)
    if llama_cpp.interpreter() is None:
        raise NotApplicable("llama-cpp-python is not installed")
    ids, evidence = _passage(subject), []
    for file in files:
        try:
            theirs = llama_cpp.llama_cpp_logits(file, ids[None].astype(np.int32))[0][0]
        except RuntimeError as error:
            require_claim(False, f"{file.name}: {error}"[:1000])
            raise
        loaded_model = hub.from_pretrained(file)
        if {place.format for place in read_parts(file).tensors.values()} <= UNQUANTIZED:
            text = compare_logits(
                compute_logits(loaded_model, ids), theirs, "llama.cpp", LOGITS_LIMIT
            )
        else:  # llama.cpp also rounds activations
            text = compare_distributions(compute_logits(loaded_model, ids), theirs, "llama.cpp")
        evidence.append(f"{file.name}: {text}")
    return pass_check("; ".join(evidence))


def _same_template(file: Path, stored: object, subject: CertifiedModel) -> None:
    try:
        model_template = str(subject.template.tokenizer.chat_template)
    except NotApplicable:
        return
    require_claim(
        stored is not None,
        f"{file.name} has no chat template: other programs use one of their own",
    )
    require_claim(stored == model_template, f"{file.name} has another chat template than the model")


def _files(subject: CertifiedModel) -> list[Path]:
    folders = {subject.directory, subject.model_folder or subject.directory}
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise NotApplicable("there is no GGUF file")
    return files


def _list_values(values: object) -> list[Any]:
    return [] if values is None else np.asarray(values).tolist()


def _passage(subject: CertifiedModel) -> np.ndarray:
    return np.array(subject.tokenizer.encode(PASSAGE, add_special_tokens=False)[:LENGTH], np.int64)


GGUF_CHECKS = (
    ModelCheck(
        "gguf_tokens",
        "GGUF files have the tokens and the chat template of the model.",
        tokens_are_those_of_the_model,
    ),
    ModelCheck(
        "gguf_settings",
        "GGUF files have the settings of the model.",
        settings_are_those_of_the_model,
    ),
    ModelCheck("gguf", "GGUF files stay near the model.", stays_near_the_model, True),
    ModelCheck(
        "llama_cpp", "llama.cpp computes the logits of the GGUF file.", equals_llama_cpp, True
    ),
)
