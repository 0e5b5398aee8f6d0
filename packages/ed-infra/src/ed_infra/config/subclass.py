"""Combination of execution fields with a Hugging Face class: fields, keywords, values, errors."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PretrainedConfig

from ed_infra.config.fields import FIELD_ALIASES, ExecutionFields
from ed_infra.dtypes import canonical_dtype
from ed_infra.errors import ConfigError, did_you_mean

#: Field -> largest size. Each bound is at least ten times the largest published value. A larger
#: size means a damaged or hostile file, and building such a model would exhaust time or memory.
LARGEST = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "n_routed_experts": 2**16,
    "head_dim": 2**16,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "vocab_size": 2**26,
    "max_position_embeddings": 2**31 - 1,
}
_SMALLEST_BOUND = min(LARGEST.values())
#: Fields whose upper limit may be infinite: Mamba-2 does not limit its time steps by default.
_MAY_BE_INFINITE = frozenset({"time_step_limit"})

#: Architecture fields of a class without a Hugging Face class, and their defaults.
BARE_FIELDS: dict[str, Any] = {
    "hidden_size": None,
    "num_attention_heads": None,
    "head_dim": None,
    "max_position_embeddings": None,
    "rope_parameters": None,
}

_DROPOUT = re.compile(r"(?:dropout(?:_rate|_prob)?|pdrop)$")

# Keywords that transformers reads from **kwargs.
_COMMON = frozenset(
    {
        "name_or_path",
        "_name_or_path",
        "_commit_hash",
        "num_labels",
        "torch_dtype",
        "output_attentions",
        "attn_implementation",
        "experts_implementation",
        "per_layer_config",
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "tie_word_embeddings",
        "use_cache",
    }
)


def architecture_classes(cls: type) -> list[type]:
    """Return the Hugging Face base classes of a class, without their common base."""
    return [
        base
        for base in cls.__mro__
        if issubclass(base, PretrainedConfig)
        and base is not PretrainedConfig
        and not issubclass(base, ExecutionFields)
    ]


def is_complete(cls: type) -> bool:
    """Return whether the fields of a new object are set when `__post_init__` runs.

    transformers wraps the constructor of a dataclass. An `__init__` that a class defines is not
    wrapped, and may set fields after the call of the base class.
    """
    return bool(architecture_classes(cls)) or hasattr(cls.__init__, "__wrapped__")


def inherit_architecture(cls: type) -> None:
    """Give the fields of the Hugging Face class precedence over those of the common base class.

    In `class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig)`, a dataclass collects the
    fields of the first base last. A field of the common `PretrainedConfig` would therefore override
    the default of the Hugging Face class (`is_encoder_decoder = True`). This function declares such
    fields again on `cls`.

    Args:
        cls: The class, before it becomes a dataclass.
    """
    annotations: dict[str, Any] = dict(inspect.get_annotations(cls))
    common = PretrainedConfig.__dataclass_fields__
    settled = set(annotations)
    for parent in cls.__mro__[1:]:
        if issubclass(parent, ExecutionFields):
            settled |= set(inspect.get_annotations(parent))
        elif issubclass(parent, PretrainedConfig) and parent is not PretrainedConfig:
            for name, field in parent.__dataclass_fields__.items():
                shadowed = name in common and field is not common[name]
                # rope_theta: the property of the base class would intercept the field.
                shadowed |= isinstance(getattr(cls, name, None), property)
                if shadowed and name not in settled:
                    settled.add(name)
                    annotations[name] = field.type
                    setattr(cls, name, copy.copy(field))
    if annotations:
        cls.__annotations__ = annotations


@functools.cache
def known_names(cls: type) -> frozenset[str]:
    """Return every keyword that a configuration class accepts.

    These are its fields and their aliases, the parameters of inherited `__init__` and
    `__post_init__` methods, and the keywords that transformers reads for any configuration.
    """
    names = {f.name for f in dataclasses.fields(cls)} | _COMMON | set(FIELD_ALIASES)
    names |= set(getattr(cls, "known_keywords", ())) | set(getattr(cls, "attribute_map", ()))
    if not architecture_classes(cls):
        names |= set(BARE_FIELDS)
    for base in cls.__mro__:
        if not issubclass(base, PretrainedConfig):
            continue
        for method in ("__init__", "__post_init__"):
            function = base.__dict__.get(method)
            if function is not None:
                names |= {
                    p.name
                    for p in inspect.signature(inspect.unwrap(function)).parameters.values()
                    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
                }
    return frozenset(names - {"self"})


def check_keywords(cls: type, names: Iterable[str]) -> None:
    """Raise ConfigError for an unknown keyword of a configuration class."""
    field_names = known_names(cls)
    for name in names:
        if name in field_names:
            continue
        if name in GenerationConfig._get_default_generation_params():
            raise ConfigError(
                f"{cls.__name__} got {name!r}, an option of generation and not of the model: "
                "put it into a GenerationConfig, or pass it to generate()"
            )
        raise ConfigError(
            f"{cls.__name__} got an unknown field {name!r}{did_you_mean(name, field_names)} "
            "(for values of your own: config.attach_custom_arguments(...))"
        )


def set_bare_fields(cls: type, values: dict[str, Any], keywords: dict[str, Any]) -> None:
    """Move architecture fields from the keywords to the attributes of a new object.

    Args:
        cls: The class; the function does nothing if it has a Hugging Face class.
        values: Attributes of the new object.
        keywords: Keywords that are no fields of the dataclass.
    """
    if architecture_classes(cls):
        return
    for name, default in BARE_FIELDS.items():
        if name in getattr(cls, "attribute_map", ()):
            continue  # transformers assigns the keyword to the mapped field
        if name in keywords:
            values[name] = keywords.pop(name)
        elif name not in values and not hasattr(cls, name):
            values[name] = default
    rope = keywords.get("rope_scaling") or values.get("rope_parameters") or {}
    trained = rope.get("original_max_position_embeddings")
    if trained and values.get("max_position_embeddings", 0) is None:
        values["max_position_embeddings"] = int(trained * (rope.get("factor") or 1))


def architecture_value(cls: type, name: str, value: object, *, from_file: bool) -> Any:
    """Return the value of an architecture field, checked beyond its type.

    A dtype becomes its name: transformers sets a torch dtype where torch is installed, and the
    configuration must be the same with and without torch.

    Args:
        cls: The class of the configuration.
        name: The name of the field.
        value: The value, of any type; transformers checks the type.
        from_file: Whether to keep a dtype whose name is unknown.

    Raises:
        ConfigError: A number is not finite, a size is larger than that of any model, a dropout is
            not a probability, or a dtype is unknown.
    """
    if _DROPOUT.search(name) and isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value < 1:
            raise ConfigError(
                f"{name} = {value!r} is not a probability of at least 0 and below 1", field=name
            )
    elif name == "dtype" and value is not None:
        try:
            return canonical_dtype(value)
        except ConfigError as error:
            if not from_file:
                raise ConfigError(f"dtype: {error}", field=name) from None
    check_plausible(name, value, getattr(cls, "attribute_map", {}))
    return value


def outside() -> int:
    """Return the stack level of the code that creates the configuration, for a warning."""
    level, frame = 1, sys._getframe(2)
    while frame is not None and (
        frame.f_globals.get("__name__", "").split(".")[0]
        in ("ed_infra", "transformers", "huggingface_hub")
        or frame.f_code.co_filename == "<string>"
    ):
        level, frame = level + 1, frame.f_back
    return level + 1


@contextlib.contextmanager
def as_config_error(cls: type) -> Iterator[None]:
    """Convert validation errors of transformers to `ConfigError`."""
    try:
        yield
    except StrictDataclassError as error:
        raise ConfigError(f"{cls.__name__}: {_cause(error)}") from None
    except KeyError as error:  # a missing parameter of the rope type
        raise ConfigError(f"{cls.__name__}: {error.args[0]}") from None


def _cause(error: BaseException) -> str:
    inner = error.__cause__ or error
    field = getattr(error, "field", None)
    return f"{field}: {inner}" if field else str(inner)


def share_table_of_names() -> None:
    """Let `transformers.models` use the table of names that `transformers` has made.

    Both read about 2,000 files for this table, which takes a quarter of a second. The function
    does nothing if a release of transformers has other internals.
    """
    utils: Any = getattr(transformers.utils, "import_utils", None)
    define_original = getattr(utils, "define_import_structure", None)
    # A function with `cache_info` keeps its results.
    if define_original is None or not hasattr(define_original, "cache_info"):
        return
    folder, start = Path(str(transformers.__file__)).parent / "models", "models."

    def define_structure(path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return define_original(path, prefix)
        return {
            backends: {
                module.removeprefix(start): set(names)
                for module, names in modules.items()
                if module.startswith(start)
            }
            for backends, modules in define_original(folder, prefix="models").items()
        }

    utils.define_import_structure = define_structure


def check_plausible(name: str, value: object, aliases: Mapping[str, str]) -> None:
    """Raise an error for an implausible number.

    Args:
        name: The name of the field.
        value: The value, of any type; numbers inside of mappings and sequences count.
        aliases: Hugging Face's name of a field -> the name that the configuration's class uses.

    Raises:
        ConfigError: A number is NaN or infinite, or a size is larger than the bound of `LARGEST`.
    """
    for path, number in _numbers(name, value):
        allowed = math.isinf(number) and name in _MAY_BE_INFINITE
        if not (math.isfinite(number) or allowed):
            raise ConfigError(f"{path} = {number} must be a finite number", field=name)
    if isinstance(value, int) and value > _SMALLEST_BOUND:
        common = next((n for n, target_name in aliases.items() if target_name == name), name)
        if value > LARGEST.get(common, value):
            raise ConfigError(
                f"{name} = {value} is invalid: no model is that large, and at most "
                f"{LARGEST[common]} is allowed; check the value, or replace the damaged file",
                field=name,
            )


def _numbers(path: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{path}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            if not isinstance(inner, int | str):
                yield from _numbers(f"{path}[{index}]", inner)
