"""TRL's configurations and trainers: a script of TRL runs with other imports.

    from ed_elarge.trl import SFTConfig, SFTTrainer

The classes accept the arguments of TRL. `ed_elarge.building.trl_scripts` converts them to the
sections of a run file, and the builders of run files build model, data and trainer. An argument
that changes the result and has no counterpart is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from ed_infra.errors import ConfigError, unknown_name

from ed_elarge.migration.trl_arguments import (
    PEFT_DEFAULTS,
    TRL_METHODS,
)

#: Name of a reward of TRL -> the rule here, and its settings.
_REWARDS: dict[str, tuple[str, dict[str, object]]] = {
    "accuracy_reward": ("math_answer", {"field": "solution"}),
    "think_format_reward": ("format", {"pattern": r"<think>(?!.*<think>)(.*?)</think>.*"}),
}
#: Class of transformers -> the class of `ed_models.auto` with the same task.
_MODELS = {
    "AutoModelForCausalLM": "AutoEasyDeLModelForCausalLM",
    "AutoModelForSequenceClassification": "AutoEasyDeLModelForSequenceClassification",
    "AutoModelForImageTextToText": "AutoEasyDeLModelForImageTextToText",
}


class LoraConfig:
    """The arguments of `peft.LoraConfig`, for scripts without PEFT.

    Raises:
        ConfigError: an argument is unknown.
    """

    def __init__(self, **arguments: object) -> None:
        from ed_elarge.building.trl_scripts import describe_unknown

        for name in arguments:
            if name not in PEFT_DEFAULTS:
                raise ConfigError(describe_unknown("LoraConfig", name, PEFT_DEFAULTS))
        self.__dict__ |= {**PEFT_DEFAULTS, **arguments}

    def to_dict(self) -> dict[str, object]:
        """Return all arguments with their values."""
        return dict(self.__dict__)


class _PretrainedModel:
    """Loads models with the keywords of transformers."""

    auto_class: ClassVar[str]

    @classmethod
    def from_pretrained(cls, name_or_path: object, **options: object) -> Any:
        """Load a model of a folder, a GGUF file, a package or a hub id.

        Args:
            name_or_path: the location.
            options: keywords of transformers, such as `dtype` and `quantization_config`.

        Raises:
            ConfigError: an option is unknown, or has no counterpart.
        """
        from ed_models import auto

        from ed_elarge.building.trl_scripts import convert_model_options

        labels = {}
        if cls.auto_class.endswith("SequenceClassification"):
            labels = {"num_labels": options.pop("num_labels", 1)}
        converted = convert_model_options(options)
        if "param_dtype" in converted:
            converted["dtype"] = converted["param_dtype"]
        load_model = getattr(auto, cls.auto_class).from_pretrained
        return load_model(str(name_or_path), config_kwargs=labels, **converted)


def _build_reward(name: str) -> object:
    from ed_trainers.rewards.rules import RULES

    rule, settings = _REWARDS[name]
    reward = functools.partial(RULES[rule], **settings)
    reward.__dict__["__name__"] = name
    return reward


@functools.cache
def _build_name(name: str) -> object:
    if name in _REWARDS:
        return _build_reward(name)
    if name in _MODELS:
        return type(name, (_PretrainedModel,), {"auto_class": _MODELS[name]})
    for end in ("Config", "Trainer"):
        trl_method = TRL_METHODS.get(name.removesuffix(end))
        if trl_method is None or not name.endswith(end):
            continue
        fields: Mapping[str, object] = {"trl_method": trl_method, "__module__": __name__}
        if end == "Config":
            from ed_elarge.building.trl_scripts import TrlConfig

            return type(name, (TrlConfig,), dict(fields))
        from ed_elarge.building.trl_trainer import TrlTrainer

        config = _build_name(f"{trl_method.name}Config")
        return type(name, (TrlTrainer,), {**fields, "config_class": config})
    return None


_NAMES = (
    "LoraConfig",
    *_REWARDS,
    *_MODELS,
    *(f"{name}{end}" for name in TRL_METHODS for end in ("Config", "Trainer")),
)


def __getattr__(name: str) -> Any:
    value = None if name.startswith("_") else _build_name(name)
    if value is None:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise AttributeError(str(unknown_name("name of ed_elarge.trl", name, _NAMES)))
    return value


def _list_names() -> list[str]:
    return sorted(_NAMES)


__dir__, __all__ = _list_names, _list_names()
