"""The options of `generate` that do not change logits: allowed values and required options.

The options that change logits are in `ed_models.generation.processors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from ed_infra.errors import ConfigError

from ed_models.generation.values import build_integer_reader, check_number, flag

EarlyStopping = Literal["never"] | bool
#: Special tokens: of the call, else of the checkpoint.
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
#: Log-probabilities of the model, or of the distribution that tokens are drawn from (vLLM's names);
#: or of the scores before temperature and filters of draws.
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "constrained_logprobs")
_STATIC = {"static": True}


def _early_stopping(name: str, value: object) -> EarlyStopping:
    if isinstance(value, bool):
        return value
    if value == "never":
        return "never"
    raise ConfigError(f"{name} is {value!r}; it must be True, False or 'never'")


def _logprobs_mode(name: str, value: object) -> str:
    if value not in LOGPROBS_MODES:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(LOGPROBS_MODES)}")
    return str(value)


def _always(reason: str) -> Callable[[str, object], bool]:
    """Return a reader of an option whose only supported value is True."""

    def read(name: str, value: object) -> bool:
        if value is not True:
            raise ConfigError(f"{name} is {value!r}; it must be True, or left out: {reason}")
        return True

    return read


@dataclass(frozen=True)
class Setting:
    """An option that does not change logits.

    Attributes:
        read: `(name, value) -> value`, which validates the value. Raises ConfigError.
        needs: the option without which this option has no effect.
        off: the value that disables the options that need this option.
    """

    read: Callable[[str, object], Any]
    needs: str | None = None
    off: object = False


def _as_it_is(name: str, value: object) -> object:
    return value


_OUTPUT = Setting(flag)
SETTINGS: Mapping[str, Setting] = {
    "max_new_tokens": Setting(build_integer_reader(1)),
    "max_length": Setting(build_integer_reader(1)),
    "min_length": Setting(build_integer_reader(0)),
    "do_sample": Setting(flag),
    "num_return_sequences": Setting(build_integer_reader(1, 1024)),
    "num_beams": Setting(build_integer_reader(1, 1024), off=1),
    "length_penalty": Setting(
        check_number(lambda x: -100 <= x <= 100, "between -100 and 100"), "num_beams"
    ),
    "early_stopping": Setting(_early_stopping, "num_beams"),
    "num_beam_groups": Setting(build_integer_reader(1, 1024), "num_beams", off=1),
    "diversity_penalty": Setting(
        check_number(lambda x: 0 <= x < 1e6, "at least 0"), "num_beam_groups"
    ),
    "prompt_lookup_num_tokens": Setting(build_integer_reader(1, 64)),
    "max_matching_ngram_size": Setting(build_integer_reader(1, 64), "prompt_lookup_num_tokens"),
    "num_assistant_tokens": Setting(build_integer_reader(1, 64), "assistant_model"),
    "stop_strings": Setting(_as_it_is),  # read with the tokenizer
    "output_scores": _OUTPUT,
    "output_logits": _OUTPUT,
    "output_logprobs": _OUTPUT,
    "logprobs_mode": Setting(_logprobs_mode, "output_logprobs", off=LOGPROBS_MODES[0]),
    "return_dict_in_generate": Setting(
        _always("generate returns a GenerateOutput; the tokens are its sequences")
    ),
    "use_cache": Setting(_always("a model without its cache computes every token again")),
    **{name: Setting(_as_it_is) for name in SPECIAL},  # read below, from several places
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Beams:
    """Beam search with `size` beams per row in `groups`. The other names are those of a
    GenerationConfig. The two penalties are the leaves of this pytree."""

    size: int = field(metadata=_STATIC)
    groups: int = field(default=1, metadata=_STATIC)
    early_stopping: EarlyStopping = field(default=False, metadata=_STATIC)
    length_penalty: float = 1.0
    diversity_penalty: float = 0.0


@dataclass(frozen=True)
class Drafts:
    """Assisted generation with `num_tokens` drafted tokens per step. The draft comes from an
    assistant, or from a lookup of up to `ngram` latest tokens in the same row."""

    num_tokens: int
    ngram: int | None = None
