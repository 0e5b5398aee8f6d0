"""The options of `generate`, and where each one comes from.

For every option the first that says something counts: the call's arguments, the
`generation_config` of the call, the checkpoint's generation_config.json and config.json (special
tokens only), the default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import CheckpointError, ConfigError, did_you_mean

from ed_models.sampling import TokenChoice

if TYPE_CHECKING:
    from transformers import GenerationConfig

FILE_NAME = "generation_config.json"
DEFAULT_NEW_TOKENS = 128
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_DRAWING = ("temperature", "top_k", "top_p", "min_p")  # only where tokens are drawn
_CHOICE = (*_DRAWING, "repetition_penalty")
_KNOWN = ("max_new_tokens", "max_length", "do_sample", *_CHOICE, *_SPECIAL)
# Entries of a GenerationConfig that say nothing about which tokens come out here.
_NEUTRAL = {"transformers_version", "_from_model_config", "use_cache", "return_dict_in_generate"}


@dataclass(frozen=True)
class GenerationOptions:
    """Resolved options of one call.

    Attributes:
        max_new_tokens: at least 1.
        eos_token_id: tokens that end a row; may be empty.
        pad_token_id: fills rows that ended.
        pad_is_known: somebody named the padding token; otherwise it is a stand-in.
        choice: how tokens are chosen.
    """

    max_new_tokens: int
    eos_token_id: tuple[int, ...]
    pad_token_id: int
    pad_is_known: bool
    choice: TokenChoice

    @classmethod
    def resolve(
        cls,
        *,
        arguments: Mapping[str, object],
        generation_config: GenerationConfig | Mapping[str, object] | None,
        checkpoint: str | None,
        model_config: EasyDeLBaseConfig,
        prompt_length: int,
    ) -> GenerationOptions:
        """Merge the sources.

        Args:
            arguments: of the call; None means that the caller left it out.
            generation_config: with the names of `transformers.GenerationConfig`.
            checkpoint: text of generation_config.json, or None.
            model_config: gives special tokens where nothing else does.
            prompt_length: turns a `max_length` into new tokens.

        Raises:
            ConfigError: an option is unknown, unsupported, out of range or without effect.
        """
        arguments = {name: value for name, value in arguments.items() if value is not None}
        options = _entries(generation_config) | arguments
        do_sample = options.get("do_sample", False)
        if not isinstance(do_sample, bool):
            raise ConfigError(f"do_sample is {do_sample!r}; it must be True or False")
        idle = [name for name in _DRAWING if name in arguments and not do_sample]
        if idle:
            raise ConfigError(
                f"{', '.join(idle)} has no effect while the likeliest token is taken; "
                "pass do_sample=True, or leave it out"
            )
        stored = json.loads(checkpoint) if checkpoint else {}

        def special(name: str) -> tuple[int, ...]:
            for source in (options, stored):
                if source.get(name) is not None:
                    return token_ids(name, source[name])
            return token_ids(name, getattr(model_config, name, None))

        eos = special("eos_token_id")
        pad = [token for token in special("pad_token_id") if token >= 0]
        values = {name: options[name] for name in _CHOICE if name in options}
        values["top_k"] = values.get("top_k") or None  # Hugging Face writes 0 for "no limit"
        return cls(
            max_new_tokens=_new_tokens(options, prompt_length),
            eos_token_id=eos,
            pad_token_id=[*pad, *eos, 0][0],
            pad_is_known=bool(pad),
            choice=TokenChoice(do_sample=do_sample, **values),  # type: ignore[arg-type]
        )


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Read a special token of a configuration: a token id, several, or None.

    Raises:
        ConfigError: it is something else.
    """
    several = value if isinstance(value, list | tuple) else [] if value is None else [value]
    ids = tuple(int(token) for token in several if _is_whole(token))
    if len(ids) < len(several):
        raise ConfigError(f"{name} is {value!r}; it must be a token id, or several in a list")
    return ids


def read_settings(directory: Path) -> str | None:
    """Return the text of a checkpoint's generation_config.json, or None where there is none.

    Raises:
        CheckpointError: it is no JSON object, or its special tokens are no token ids.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    text = path.read_text(errors="replace")
    try:
        settings = json.loads(text)
        if not isinstance(settings, dict):
            raise ConfigError("it is no JSON object")
        for name in _SPECIAL:
            token_ids(name, settings.get(name))
    except ValueError as error:
        raise CheckpointError(
            f"{path} cannot be used: {error}; mend it, or delete it, and the special tokens of "
            "config.json count"
        ) from error
    return text


def special_tokens(model_config: EasyDeLBaseConfig) -> dict[str, object]:
    """The generation_config.json of a model that came without one."""
    tokens = {name: getattr(model_config, name, None) for name in _SPECIAL}
    return {name: value for name, value in tokens.items() if value is not None}


def _entries(
    generation_config: GenerationConfig | Mapping[str, object] | None,
) -> dict[str, object]:
    if generation_config is None:
        return {}
    if isinstance(generation_config, Mapping):
        entries = dict(generation_config)
    elif hasattr(generation_config, "to_diff_dict"):
        entries = generation_config.to_diff_dict()
    else:
        raise ConfigError(
            "generation_config must be a transformers.GenerationConfig or a mapping, not "
            f"{type(generation_config).__name__}"
        )
    entries = {k: v for k, v in entries.items() if v is not None and k not in _NEUTRAL}
    if entries.get("num_beams") == 1:
        del entries["num_beams"]
    for name, value in entries.items():
        if name not in _KNOWN:
            raise ConfigError(
                f"generation_config has {name}={value!r}, which generate does not support"
                f"{did_you_mean(name, _KNOWN)} (supported: {', '.join(_KNOWN)})"
            )
    return entries


def _new_tokens(options: Mapping[str, object], prompt_length: int) -> int:
    name = "max_new_tokens" if "max_new_tokens" in options else "max_length"
    count = options.get(name, prompt_length + DEFAULT_NEW_TOKENS)
    if not _is_whole(count) or count < 1:
        raise ConfigError(f"{name} is {count!r}; it must be a whole number of at least 1")
    if name == "max_new_tokens":
        return int(count)
    if count <= prompt_length:
        raise ConfigError(
            f"max_length={count} counts the prompt, which has {prompt_length} tokens already; "
            "raise it, or give max_new_tokens"
        )
    return int(count) - prompt_length


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
