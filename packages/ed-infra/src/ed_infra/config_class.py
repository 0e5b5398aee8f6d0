"""How a configuration class joins the execution fields with a Hugging Face class."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from transformers import PretrainedConfig


def inherit_architecture(cls: type, base: type) -> None:
    """Let `cls` take its fields from the Hugging Face class where both bases declare them.

    `class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig)`: dataclasses collect fields
    from base to base, the first one last. So what the common `PretrainedConfig` declares would
    arrive through `EasyDeLBaseConfig` and undo what the Hugging Face class changed
    (`is_encoder_decoder = True`). This declares such fields again on `cls`.

    Args:
        cls: the class that is being made, before it becomes a dataclass.
        base: `EasyDeLBaseConfig`.
    """
    annotations: dict[str, Any] = dict(inspect.get_annotations(cls))
    own = PretrainedConfig.__dataclass_fields__
    settled = set(annotations)
    for parent in cls.__mro__[1:]:
        if parent is PretrainedConfig or not issubclass(parent, PretrainedConfig):
            continue
        if issubclass(parent, base):
            settled |= set(inspect.get_annotations(parent))
            continue
        for name, field in parent.__dataclass_fields__.items():
            shadowed = name in own and field is not own[name]
            # A property of the base would otherwise catch the assignment of a plain field.
            shadowed |= isinstance(getattr(base, name, None), property)
            if shadowed and name not in settled:
                settled.add(name)
                annotations[name] = field.type
                setattr(cls, name, copy.copy(field))
    if annotations:
        cls.__annotations__ = annotations
