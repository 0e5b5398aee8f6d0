"""Rules for keys of EasyDeL whose values no path alone can describe.

A rule receives a value with the keys around it, and returns values with their paths here.
`ed_infra.easydel_translation` applies the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple

#: Keys from the sections inwards.
SectionPath = tuple[str, ...]
Values = Mapping[str, object]


class Given(NamedTuple):
    """A key to translate_keys by a rule.

    Attributes:
        value: Its value.
        siblings: The section with the key.
        sections: All sections.
    """

    value: object
    siblings: Values
    sections: Values


class Replacement(NamedTuple):
    """A value that replaces the value of another key, which the user may have set."""

    value: object


#: The values to set, by path.
PlacedValues = dict[SectionPath, object]


# Rules raise ValueError for wrong values.


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def _whole(value: object, name: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


def _use_wandb(given: Given) -> PlacedValues:
    on = _flag(given.value, "use_wandb")
    if on and "report_to" in given.siblings:
        raise ValueError("use_wandb and report_to name trackers: keep report_to")
    return {("trainer", "report_to"): ["wandb"]} if on else {}


def _text_field(given: Given) -> PlacedValues:
    """Return the informs, whose fields are the named one if they name none."""
    if not isinstance(given.value, str) or not given.value:
        raise ValueError(f"must be the name of a field, got {given.value!r}")
    mixture = given.sections.get("mixture")
    informs = mixture.get("informs") if isinstance(mixture, Mapping) else None
    if not isinstance(informs, list | tuple):
        return {}
    named = [
        {**inform, "content_field": given.value} if _lacks_field(inform) else inform
        for inform in informs
    ]
    return {("mixture", "informs"): Replacement(named)}


def _lacks_field(inform: object) -> bool:
    names = ("content_field", "text_field")
    return isinstance(inform, Mapping) and not any(name in inform for name in names)


def _shuffle(given: Given) -> PlacedValues:
    mixture = given.sections.get("mixture")
    size = mixture.get("shuffle_buffer_size") if isinstance(mixture, Mapping) else None
    packed = isinstance(mixture, Mapping) and mixture.get("pack_tokens")
    if _flag(given.value, "shuffle_train_dataset"):
        if size in (0, 1):
            raise ValueError(
                f"shuffle_train_dataset is true, and mixture.shuffle_buffer_size {size} shuffles "
                "nothing: keep one of them"
            )
        return {}
    placed: PlacedValues = {("mixture", "shuffle_buffer_size"): 1}
    return {**placed, ("mixture", "pack_shuffle"): False} if packed else placed


def _model_name(given: Given) -> PlacedValues:
    name = given.value
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("..")
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"must be the name of a folder in save_directory, got {name!r}")
    folder = given.siblings.get("save_directory") or "EasyDeL-Checkpoints"
    return {("trainer", "save_directory"): Replacement(str(PurePosixPath(str(folder)) / path))}


def _sampling_temperature(given: Given) -> PlacedValues:
    temperature = given.siblings.get("temperature", 1.0)
    if given.value != temperature:
        raise ValueError(
            f"temperature_sampling {given.value!r} differs from temperature {temperature!r}: this "
            "method samples and compares at one temperature"
        )
    return {}


def _distillation_type(given: Given) -> PlacedValues:
    if given.value == "kl":
        return {}
    if given.value != "jsd":
        raise ValueError(f"unknown distillation_type {given.value!r} (known: jsd, kl)")
    return {
        ("trainer", "distillation_mode"): "full_logits",
        ("trainer", "distillation_alpha"): 0.5,
    }


def _feedback(given: Given) -> PlacedValues:
    length = _whole(given.value, "max_feedback_length", 1)
    prompt = _whole(given.siblings.get("max_prompt_length", 512), "max_prompt_length", 1)
    return {("trainer", "max_reprompt_len"): prompt + length}


def _verified_rewards(given: Given) -> PlacedValues:
    """Return the rewards of `rlvr`: the answer, and the format and the length with weights."""
    trainer = given.siblings
    if trainer.get("reward_functions") is not None or trainer.get("reward_funcs") is not None:
        raise ValueError(
            "answer_key, format_pattern, length_penalty_target and reward_functions name the "
            "rewards: keep reward_functions, which also has the rules math_answer, regex and length"
        )
    name = trainer.get("answer_key") or "answer"
    rewards = [{"math_answer": {"field": name}}]
    weights = [1.0]
    pattern, weight = trainer.get("format_pattern"), _weight(trainer, "format_reward_weight")
    if pattern is not None and weight:
        rewards.append({"regex": {"pattern": pattern}})
        weights.append(weight)
    target, weight = trainer.get("length_penalty_target"), _weight(trainer, "length_penalty_weight")
    if target is not None and _whole(target, "length_penalty_target", 0) and weight:
        rewards.append({"length": {"target": target, "shortest": 10, "longest": 5000}})
        weights.append(weight)
    placed: PlacedValues = {("trainer", "reward_functions"): rewards, **_read_field(given, name)}
    return placed if len(rewards) == 1 else {**placed, ("trainer", "reward_weights"): weights}


def _read_field(given: Given, name: object) -> PlacedValues:
    """Return the informs, which read a further field of the rows for the rewards."""
    mixture = given.sections.get("mixture")
    informs = mixture.get("informs") if isinstance(mixture, Mapping) else None
    if not isinstance(informs, list | tuple):
        return {}
    reading = []
    for inform in informs:
        more = inform.get("additional_fields", ()) if isinstance(inform, Mapping) else None
        if isinstance(more, list | tuple) and name not in more:
            inform = {**inform, "additional_fields": [*more, name]}
        reading.append(inform)
    return {("mixture", "informs"): Replacement(reading)}


def _weight(trainer: Values, name: str) -> float:
    weight = trainer.get(name) or 0
    if not isinstance(weight, int | float) or isinstance(weight, bool) or weight < 0:
        raise ValueError(f"{name} must be a number of at least 0, got {weight!r}")
    return weight


def _device(given: Given) -> PlacedValues:
    if not isinstance(given.value, str):
        raise ValueError(f"must be cpu, gpu or tpu, got {given.value!r}")
    return {("platform", "backend"): given.value.partition(":")[0]}


def _workers(given: Given) -> PlacedValues:
    number = _whole(given.value, "the number of workers", 0)
    return {("mixture", "prefetch_workers"): number} if number else {}


def _bits(given: Given) -> PlacedValues:
    """Check the bits of a format."""
    model = given.siblings
    names = ("quantization_method", "method", "dtype")
    name = next((str(model[key]) for key in names if key in model), "nf4")
    numbers = (4, 8) if name == "affine" else (8,) if "8" in name else (4,)
    if given.value not in numbers:
        text = " or ".join(map(str, numbers))
        raise ValueError(f"{name} has {text} bits, got {given.value!r}")
    target = ("quantization", "model", "quantization_method")
    return {target: Replacement("int8")} if (name, given.value) == ("affine", 8) else {}


def _role_task(task: str, given: Given) -> PlacedValues:
    name = str(getattr(given.value, "value", given.value)).lower().replace("_", "-")
    others = {"auto-bind", task, *({"causal-lm", "lm"} if task.startswith("causal") else ())}
    if name not in others:
        raise ValueError(f"the task of this model is {task}, got {given.value!r}: omit the key")
    return {}


def _role_tokenizer(given: Given) -> PlacedValues:
    if given.value != given.siblings.get("name_or_path"):
        raise ValueError(
            f"the model reads the tokens of model.tokenizer, got {given.value!r}: omit the key"
        )
    return {}


def _verbose(given: Given) -> PlacedValues:
    if not _flag(given.value, "verbose"):
        return {}
    if given.siblings.get("silent_mode"):
        raise ValueError("verbose and silent_mode are both true: keep one of them")
    return {}


def _hard_limit(given: Given) -> PlacedValues:
    if not _flag(given.value, "hard_max_new_tokens"):
        return {}
    return {("eval", "gen_kwargs", "max_gen_toks"): given.siblings.get("max_new_tokens", 256)}


def _labels(given: Given) -> PlacedValues:
    trainer = given.sections.get("trainer")
    method = trainer.get("trainer_type") if isinstance(trainer, Mapping) else None
    number = _whole(given.value, "num_labels", 1)
    if method not in ("reward", "prm"):
        return {("base_config", "values", "num_labels"): number}
    if number != 1:
        raise ValueError(f"{method} trains a model with one label, got num_labels {number}")
    return {}


KEY_RULES: dict[tuple[str, str], Callable[[Given], PlacedValues]] = {
    ("trainer", "use_wandb"): _use_wandb,
    ("trainer", "dataset_text_field"): _text_field,
    ("trainer", "shuffle_train_dataset"): _shuffle,
    ("trainer", "model_name"): _model_name,
    ("trainer", "temperature_sampling"): _sampling_temperature,
    ("trainer", "distillation_type"): _distillation_type,
    ("trainer", "max_feedback_length"): _feedback,
    ("trainer", "answer_key"): _verified_rewards,
    ("trainer", "format_pattern"): _verified_rewards,
    ("trainer", "format_reward_weight"): _verified_rewards,
    ("trainer", "length_penalty_target"): _verified_rewards,
    ("trainer", "length_penalty_weight"): _verified_rewards,
    ("trainer", "dataloader_num_workers"): _workers,
    ("mixture", "num_workers"): _workers,
    ("mixture", "tokenization.text_field"): _text_field,
    ("model", "num_labels"): _labels,
    ("model", "extra_kwargs.num_labels"): _labels,
    ("loader", "device"): _device,
    ("quantization", "model.bits"): _bits,
    ("esurge", "verbose"): _verbose,
    ("eval", "hard_max_new_tokens"): _hard_limit,
    ("reward_model", "task"): partial(_role_task, "sequence-classification"),
    **{
        (role, "task"): partial(_role_task, "causal-language-model")
        for role in ("reference_model", "teacher_model")
    },
    **{
        (role, "tokenizer"): _role_tokenizer
        for role in ("reference_model", "reward_model", "teacher_model")
    },
}
