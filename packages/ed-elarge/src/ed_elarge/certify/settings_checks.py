"""Settings: positions, generation, the base model's configuration, further files."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ed_elarge.certify.outcome import ModelCheck, NotApplicable, Outcome, pass_check, require_claim
from ed_elarge.certify.subject import CertifiedModel, read_json

#: Largest `model_max_length` that is a number of tokens; transformers writes 1e30 for "unknown".
KNOWN_LENGTH = 10**9
#: Kinds of RoPE whose factor extends the original positions to `max_position_embeddings`.
EXTENDING = ("yarn", "longrope")
#: A reply that may have fewer tokens than this ends too early.
SHORTEST_LIMIT = 64
#: Fields of config.json that training may change, or that change no number of the model.
FREE = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "quantization_config",
        "vocab_size",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "tie_word_embeddings",
        "initializer_range",
        "auto_map",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "easydel",
        "pretraining_tp",
    }
)


def positions_agree(subject: CertifiedModel) -> Outcome:
    settings = subject.settings
    most = settings.get("max_position_embeddings")
    if not isinstance(most, int):
        raise NotApplicable("config.json has no max_position_embeddings")
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if factor and original and scaling.get("rope_type", scaling.get("type")) in EXTENDING:
        require_claim(
            most <= factor * original * 1.01,
            f"max_position_embeddings is {most}, and {factor} times {original} positions are "
            f"{factor * original:.0f}: the model was not extended to more",
        )
    evidence = f"{most} positions"
    try:
        length = subject.tokenizer.model_max_length
    except NotApplicable:
        return pass_check(evidence)
    if length < KNOWN_LENGTH:
        require_claim(
            length <= most,
            f"model_max_length of the tokenizer is {length}, and the model has {most} positions",
        )
        evidence += f", model_max_length {length}"
    return pass_check(evidence)


def generation_settings_are_valid(subject: CertifiedModel) -> Outcome:
    from transformers import GenerationConfig

    generation_settings = dict(subject.generation_settings)
    if not generation_settings:
        raise NotApplicable("there is no generation_config.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            GenerationConfig(**generation_settings).validate(strict=True)
        except ValueError as error:
            require_claim(False, f"generation_config.json: {error}".partition("\n")[0][:400])
    temperature = generation_settings.get("temperature")
    require_claim(
        not generation_settings.get("do_sample") or temperature is None or temperature > 0,
        f"generation_config.json samples with the temperature {temperature}: transformers divides "
        "by this number",
    )
    longest = generation_settings.get("max_new_tokens", generation_settings.get("max_length"))
    positions = subject.settings.get("max_target_positions")  # of a decoder beside an encoder
    shortest = SHORTEST_LIMIT if positions is None else min(positions, SHORTEST_LIMIT)
    require_claim(
        not isinstance(longest, int) or longest >= shortest,
        f"generation_config.json ends replies after {longest} tokens",
    )
    return pass_check(
        json.dumps({k: v for k, v in generation_settings.items() if k != "transformers_version"})
    )


def cache_is_used(subject: CertifiedModel) -> Outcome:
    sources = {
        "config.json": subject.settings,
        "generation_config.json": subject.generation_settings,
    }
    if not subject.is_adapter and _default_without_cache(subject):
        raise NotApplicable("the family generates without a cache by default")
    off = [name for name, values in sources.items() if values.get("use_cache") is False]
    require_claim(
        not off,
        f"use_cache is false in {off}: other programs compute every earlier token again for each "
        "new token",
    )
    return pass_check("use_cache is not false")


def _default_without_cache(subject: CertifiedModel) -> bool:
    from ed_infra import registry

    model_type = str(subject.settings.get("model_type"))
    if model_type not in registry.model_types():
        return False
    # A family can have no default sizes, so only the class is read.
    return getattr(registry.get_config(model_type), "use_cache", True) is False


def settings_of_base(subject: CertifiedModel) -> Outcome:
    if subject.is_adapter:
        raise NotApplicable("the directory contains only an adapter")
    settings, base_settings = (
        read_architecture(subject.folder),
        read_architecture(subject.base.folder),
    )
    different = differing(settings, base_settings)
    require_claim(
        not different,
        "config.json describes another computation than that of the base model: "
        + "; ".join(different[:6]),
    )
    return pass_check(f"{len(settings)} settings are those of the base model")


def files_of_base(subject: CertifiedModel) -> Outcome:
    if subject.is_adapter:
        raise NotApplicable("the directory contains only an adapter")
    files, base_files = _parts(subject.folder), _parts(subject.base.folder)
    require_claim(
        base_files <= files,
        f"the base model has {', '.join(sorted(base_files - files))}, and this directory has not",
    )
    return pass_check(", ".join(sorted(files)) or "neither model has such files")


def code_is_present(subject: CertifiedModel) -> Outcome:
    named: set[str] = set()
    for file in ("config.json", "tokenizer_config.json"):
        if (subject.folder / file).is_file():
            classes = read_json(subject.folder / file).get("auto_map") or {}
            listed = [
                c
                for entry in classes.values()
                for c in ([entry] if isinstance(entry, str) else entry or [])
            ]
            named |= {c.rpartition(".")[0] for c in listed if c and "--" not in c}
    if not named:
        raise NotApplicable("no file names classes of the directory")
    missing = sorted(
        f"{name}.py" for name in named if not (subject.folder / f"{name}.py").is_file()
    )
    require_claim(not missing, f"auto_map names classes in files that are missing: {missing}")
    return pass_check(", ".join(sorted(named)))


def read_architecture(folder: Path) -> dict[str, Any]:
    """Return the settings that determine the numbers of a model, with the family's defaults."""
    from ed_infra.config.fields import FIELDS
    from ed_models.checkpoints import hub

    values = hub.read_config(folder, None).to_dict()
    values["architectures"] = read_json(folder / "config.json").get("architectures")
    settings = {n: value for n, value in values.items() if n not in FREE and n not in FIELDS}
    return {n: _without_defaults(x) if n == "rope_parameters" else x for n, x in settings.items()}


def differing(settings: Mapping[str, Any], base_settings: Mapping[str, Any]) -> list[str]:
    """Return a text for each setting of two models with unequal values."""
    return [
        f"{name} is {settings[name]!r}, not {base_settings[name]!r}"
        for name in sorted(settings.keys() & base_settings.keys())
        if not _equal(settings[name], base_settings[name])
    ]


def _equal(value: object, base_value: object) -> bool:
    """Compare values; numbers may be rounded to float32."""
    if isinstance(value, Mapping) and isinstance(base_value, Mapping):
        return value.keys() == base_value.keys() and all(
            _equal(value[n], base_value[n]) for n in value
        )
    if isinstance(value, list | tuple) and isinstance(base_value, list | tuple):
        return len(value) == len(base_value) and all(map(_equal, value, base_value))
    if isinstance(value, float) and isinstance(base_value, int | float):
        return math.isclose(value, base_value, rel_tol=1e-6)
    return bool(value == base_value)


def _without_defaults(rope: object) -> Any:
    """Return parameters of RoPE without values that change nothing."""
    if not isinstance(rope, Mapping):
        return rope
    parameters = {
        name: _without_defaults(value) for name, value in rope.items() if value is not None
    }
    if parameters.get("partial_rotary_factor") == 1:
        del parameters["partial_rotary_factor"]
    return parameters


def _parts(folder: Path) -> set[str]:
    parts = set()
    if list(folder.glob("token*")):
        parts.add("a tokenizer")
    if (folder / "generation_config.json").is_file():
        parts.add("generation_config.json")
    stored = folder / "tokenizer_config.json"
    with_template = stored.is_file() and read_json(stored).get("chat_template")
    if with_template or (folder / "chat_template.jinja").is_file():
        parts.add("a chat template")
    return parts


SETTINGS_CHECKS = (
    ModelCheck("positions", "The limits of positions agree.", positions_agree),
    ModelCheck(
        "generation_settings",
        "transformers accepts generation_config.json.",
        generation_settings_are_valid,
    ),
    ModelCheck("cache", "Generation uses a cache.", cache_is_used),
    ModelCheck(
        "settings_of_base", "config.json describes the base model's computation.", settings_of_base
    ),
    ModelCheck("files_of_base", "The parts of the base model are present.", files_of_base),
    ModelCheck("code", "The files of custom classes are present.", code_is_present),
)
