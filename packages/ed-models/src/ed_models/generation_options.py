"""What `generate` was asked for, and where each answer comes from.

For every option the first that says something counts: the call's arguments, the
`generation_config` given to it, the checkpoint's generation_config.json and config.json (special
tokens only), the default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ed_infra.errors import ConfigError, did_you_mean

from ed_models.sampling import Sampling

DEFAULT_NEW_TOKENS = 128
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # only where tokens are drawn
_KNOWN = (
    "max_new_tokens",
    "max_length",
    "do_sample",
    *_SAMPLING,
    "repetition_penalty",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
)
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
        sampling: how tokens are chosen.
    """

    max_new_tokens: int
    eos_token_id: tuple[int, ...]
    pad_token_id: int
    pad_is_known: bool
    sampling: Sampling

    @classmethod
    def resolve(
        cls,
        *,
        given: Mapping[str, Any],
        generation_config: Any,
        checkpoint: str | None,
        model_config: Any,
        prompt_length: int,
    ) -> GenerationOptions:
        """Merge the sources.

        Args:
            given: the call's arguments; None means not given.
            generation_config: a `transformers.GenerationConfig`, a mapping, or None.
            checkpoint: text of generation_config.json, or None.
            model_config: gives special tokens where nothing else does.
            prompt_length: turns a `max_length` into new tokens.

        Raises:
            ConfigError: an option is unknown, unsupported, out of range or without effect.
        """
        given = {name: value for name, value in given.items() if value is not None}
        configured = _entries(generation_config)
        options = configured | given
        do_sample = bool(options.get("do_sample", False))
        idle = [name for name in _SAMPLING if name in given and not do_sample]
        if idle:
            raise ConfigError(
                f"{', '.join(idle)} has no effect while the likeliest token is taken; "
                "pass do_sample=True, or leave it out"
            )
        stored = json.loads(checkpoint) if checkpoint else {}

        def special(name: str) -> Any:
            for source in (options, stored):
                if source.get(name) is not None:
                    return source[name]
            return getattr(model_config, name, None)

        eos = special("eos_token_id")
        eos = eos if isinstance(eos, list | tuple) else [eos]
        eos = tuple(int(e) for e in eos if e is not None)
        pad = special("pad_token_id")
        pad = None if pad is None or pad < 0 else int(pad)
        sampling = {k: options[k] for k in (*_SAMPLING, "repetition_penalty") if k in options}
        if not sampling.get("top_k", 1):  # Hugging Face writes 0 for "no limit"
            sampling["top_k"] = None
        return cls(
            max_new_tokens=_new_tokens(options, prompt_length),
            eos_token_id=eos,
            pad_token_id=pad if pad is not None else (eos[0] if eos else 0),
            pad_is_known=pad is not None,
            # Greedy decoding compiles once, whatever a configuration says about drawing.
            sampling=Sampling(do_sample=True, **sampling)
            if do_sample
            else Sampling(repetition_penalty=sampling.get("repetition_penalty", 1.0)),
        )


def special_tokens(model_config: Any) -> dict[str, Any]:
    """The generation_config.json of a model that came without one."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {name: getattr(model_config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _entries(generation_config: Any) -> dict[str, Any]:
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


def _new_tokens(options: Mapping[str, Any], prompt_length: int) -> int:
    count = options.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if "max_length" in options and "max_new_tokens" not in options:
        count = options["max_length"] - prompt_length
        if count < 1:
            raise ConfigError(
                f"max_length={options['max_length']} counts the prompt, which has {prompt_length} "
                "tokens already; raise it, or give max_new_tokens"
            )
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"max_new_tokens is {count!r}; it must be a whole number of at least 1")
    return count
