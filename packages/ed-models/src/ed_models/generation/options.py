"""The options of `generate` and their sources.

The first source that sets an option has precedence: the arguments of the call, the
`generation_config` of the call, the checkpoint's generation_config.json and config.json (special
tokens, and `OF_ENCODER_DECODERS`), the default. Each option is an entry in one of two tables:
`PROCESSORS` for options that change logits, and `SETTINGS` for the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import CheckpointError, ConfigError, did_you_mean

from ed_models.generation.processors import PROCESSORS
from ed_models.generation.settings import LOGPROBS_MODES, SETTINGS, SPECIAL, Beams, Drafts
from ed_models.generation.stop_strings import StopStrings, TokenDecoder
from ed_models.generation.token_choice import TokenChoice
from ed_models.generation.values import validate_token_ids

if TYPE_CHECKING:
    from transformers import GenerationConfig

FILE_NAME = "generation_config.json"
DEFAULT_NEW_TOKENS = 128
#: Options of a checkpoint's files that also apply to an encoder-decoder: models were trained for
#: them, such as the language of a translation, or the padding token that Marian never generates.
OF_ENCODER_DECODERS = (
    *("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"),
    *("suppress_tokens", "begin_suppress_tokens"),
)
# Entries of a GenerationConfig that do not affect the generated tokens.
_NEUTRAL = {"transformers_version", "_from_model_config"}
_KNOWN = (*SETTINGS, *PROCESSORS)


@dataclass(frozen=True)
class GenerationOptions:
    """Resolved options of one call.

    Attributes:
        max_new_tokens: at least 1.
        eos_token_id: tokens that end a row; may be empty.
        pad_token_id: token that fills rows after their end.
        decoder_start_token_id: first token of a decoder that reads an encoder.
        pad_is_known: whether a source names the padding token; otherwise `pad_token_id` is the
            first end-of-sequence token, or 0.
        choice: the method of choosing tokens.
        stops: strings that end a row.
        num_return_sequences: number of output rows per prompt.
        beams: settings of beam search; None = no beam search.
        drafts: settings of assisted generation; None = no drafting.
        outputs: values kept of each step: a subset of "scores", "logits" and "logprobs"; with
            "logprobs", also the name of their mode (`settings.LOGPROBS_MODES`).
    """

    max_new_tokens: int
    eos_token_id: tuple[int, ...]
    pad_token_id: int
    pad_is_known: bool
    choice: TokenChoice
    decoder_start_token_id: int | None = None
    stops: StopStrings | None = None
    num_return_sequences: int = 1
    beams: Beams | None = None
    drafts: Drafts | None = None
    outputs: frozenset[str] = frozenset()

    @classmethod
    def resolve(
        cls,
        *,
        arguments: Mapping[str, object],
        generation_config: GenerationConfig | Mapping[str, object] | None,
        checkpoint: str | None,
        model_config: EasyDeLBaseConfig,
        prompt_length: int,
        encoder_decoder: bool = False,
        tokenizer: TokenDecoder | None = None,
        assisted: bool = False,
    ) -> GenerationOptions:
        """Merge the sources and validate the result.

        Args:
            arguments: options of the call. None means that the option is not set, except for
                `eos_token_id`: None disables the end-of-sequence token, as in transformers.
            generation_config: options with the names of `transformers.GenerationConfig`.
            checkpoint: text of generation_config.json, or None.
            model_config: the last source of special tokens, and the vocabulary size.
            prompt_length: number of prompt tokens, subtracted from `max_length` and `min_length`.
            encoder_decoder: whether the model reads an encoder: then the checkpoint's
                `OF_ENCODER_DECODERS` apply, too.
            tokenizer: the tokenizer of the stop strings.
            assisted: whether the call has an assistant model.

        Raises:
            ConfigError: an option is unknown, unsupported, out of range or without effect.
        """
        endless = "eos_token_id" in arguments and arguments["eos_token_id"] is None
        arguments = {name: value for name, value in arguments.items() if value is not None}
        _refuse_unknown("generate got", arguments)
        options = _entries(generation_config) | arguments
        settings = {
            name: setting.read(name, options[name])
            for name, setting in SETTINGS.items()
            if name in options
        }
        on = {n for n, v in settings.items() if isinstance(v, int) and v != SETTINGS[n].off}
        on |= {"assistant_model"} if assisted else set()
        do_sample = settings.get("do_sample", False)
        stored = json.loads(checkpoint) if checkpoint else {}

        def special(name: str) -> tuple[int, ...]:
            for source in (options, stored):
                if source.get(name) is not None:
                    return validate_token_ids(name, source[name])
            return validate_token_ids(name, special_token(model_config, name))

        eos = () if endless else special("eos_token_id")
        pad = [token for token in special("pad_token_id") if token >= 0]
        start = special("decoder_start_token_id")
        if encoder_decoder and not start:
            start = special("bos_token_id")
        stops = None
        if tokenizer is not None and "stop_strings" not in options:
            raise ConfigError("tokenizer has no effect without stop_strings; omit it")
        if "stop_strings" in options:
            stops = StopStrings.read("stop_strings", options["stop_strings"], tokenizer)
        _refuse_idle(arguments, on, ends=bool(eos))
        new_tokens = _new_tokens(settings, prompt_length)
        values: dict[str, Any] = {n: options[n] for n in PROCESSORS if n in options}
        for name in OF_ENCODER_DECODERS if encoder_decoder else ():
            value = stored.get(name)
            value = special_token(model_config, name) if value is None else value
            if name.endswith("suppress_tokens") and isinstance(value, list):
                # Files of Whisper may exclude tokens that a smaller vocabulary does not have.
                size = get_vocab_size(model_config) or 2**31
                value = [token for token in value if token < size]
            if name not in values and value not in (None, []):
                values[name] = value
        values["top_k"] = values.get("top_k") or None  # Hugging Face writes 0 for "no limit"
        if not eos:
            values = {n: v for n, v in values.items() if not PROCESSORS[n].needs_end}
        elif settings.get("min_length", 0) > prompt_length:
            fewest = settings["min_length"] - prompt_length
            values["min_new_tokens"] = max(fewest, int(values.get("min_new_tokens") or 0))
        choice = TokenChoice(do_sample=do_sample, **values)
        _check_choice(choice, new_tokens, model_config)
        if {"forced_bos_token_id", "begin_suppress_tokens"} <= options.keys():
            raise ConfigError(
                "forced_bos_token_id determines the first token, so begin_suppress_tokens has no "
                "effect; omit one of them"
            )
        outputs = frozenset(n for n in ("scores", "logits", "logprobs") if f"output_{n}" in on)
        if "logprobs" in outputs:
            outputs |= {settings.get("logprobs_mode", LOGPROBS_MODES[0])}
        resolved = cls(
            max_new_tokens=new_tokens,
            eos_token_id=eos,
            pad_token_id=[*pad, *eos, 0][0],
            pad_is_known=bool(pad),
            decoder_start_token_id=next(iter(start), None),
            choice=choice,
            stops=stops,
            num_return_sequences=settings.get("num_return_sequences", 1),
            beams=_beams(settings),
            drafts=_drafts(settings, assisted),
            outputs=outputs,
        )
        _refuse_together(resolved)
        return resolved


def read_generation_settings(directory: Path) -> str | None:
    """Return the text of a checkpoint's generation_config.json, or None if the file is missing.

    Raises:
        CheckpointError: the file is not a JSON object, or its special tokens are not token ids.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    text = path.read_text(errors="replace")
    try:
        settings = json.loads(text)
        if not isinstance(settings, dict):
            raise ConfigError("it is not a JSON object")
        for name in SPECIAL:
            validate_token_ids(name, settings.get(name))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be used: {error}; correct it, or delete it, and the special tokens of "
            "config.json are used"
        ) from error
    return text


def write_generation_settings(
    directory: Path, text: str | None, model_config: EasyDeLBaseConfig
) -> None:
    """Write generation_config.json: `text`, or by default the special tokens of a model."""
    if text is None:
        tokens = {name: special_token(model_config, name) for name in SPECIAL}
        tokens = {name: value for name, value in tokens.items() if value is not None}
        text = json.dumps(tokens, indent=2, sort_keys=True) + "\n"
    (directory / FILE_NAME).write_text(text)


def special_token(model_config: EasyDeLBaseConfig, name: str) -> object:
    """Return a special token of a configuration, or of its language model's configuration."""
    value = getattr(model_config, name, None)
    return getattr(_text_config(model_config), name, None) if value is None else value


def get_vocab_size(config: EasyDeLBaseConfig, *, encoder: bool = False) -> int | None:
    """Return the number of tokens of a model; of the encoder's if encoder and decoder differ.

    Args:
        config: the configuration; tests pass plain objects.
        encoder: whether the tokens are those of the encoder of an encoder-decoder.
    """
    if encoder:
        return getattr(config, "vocab_size", None)
    decoder_vocab_size = getattr(config, "decoder_vocab_size", None)
    return decoder_vocab_size or getattr(_text_config(config), "vocab_size", None)


def _text_config(config: EasyDeLBaseConfig) -> Any:
    """Return the configuration of the language model; tests pass plain objects."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


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
    _refuse_unknown("generation_config has", entries)
    return entries


def _refuse_unknown(subject: str, entries: Mapping[str, object]) -> None:
    for name, value in entries.items():
        if name not in _KNOWN:
            raise ConfigError(
                f"{subject} {name}={value!r}, which generate does not support"
                f"{did_you_mean(name, _KNOWN)} (supported: {', '.join(sorted(_KNOWN))})"
            )


def _refuse_idle(arguments: Iterable[str], on: set[str], *, ends: bool) -> None:
    """Reject arguments without effect. A configuration may contain them for use by other calls."""
    drawing = [n for n in arguments if n in PROCESSORS and PROCESSORS[n].drawing]
    if drawing and "do_sample" not in on:
        raise ConfigError(
            f"{', '.join(drawing)} has no effect in greedy decoding; "
            "pass do_sample=True, or omit it"
        )
    for name in arguments:
        needs_end = name == "min_length" or (name in PROCESSORS and PROCESSORS[name].needs_end)
        if needs_end and not ends:
            raise ConfigError(
                f"{name} has no effect on rows that no token ends; pass eos_token_id, or omit it"
            )
        needs = SETTINGS[name].needs if name in SETTINGS else None
        if needs is not None and needs not in on:
            raise ConfigError(f"{name} has no effect without {needs}; pass {needs}, or omit {name}")


def _new_tokens(settings: Mapping[str, Any], prompt_length: int) -> int:
    if "max_new_tokens" in settings:
        return settings["max_new_tokens"]
    count = settings.get("max_length", prompt_length + DEFAULT_NEW_TOKENS)
    if count <= prompt_length:
        raise ConfigError(
            f"max_length={count} counts the prompt, which has {prompt_length} tokens already; "
            "raise it, or pass max_new_tokens"
        )
    return count - prompt_length


def _check_choice(choice: TokenChoice, new_tokens: int, config: EasyDeLBaseConfig) -> None:
    size = get_vocab_size(config) or 2**31
    for name, value in choice.values.items():
        arrays = jax.tree.leaves(value) if PROCESSORS[name].token_ids else []
        ids = [x for x in arrays if x.dtype.kind == "i"]
        largest = max((int(x.max(initial=-1)) for x in ids), default=-1)
        if largest >= size:
            raise ConfigError(
                f"{name} has token {largest}, but the model's vocabulary has {size} tokens; was "
                "the tokenizer made for another model?"
            )
    fewest = choice.min_new_tokens
    if fewest is not None and fewest > new_tokens:
        raise ConfigError(
            f"a row must have at least {fewest} new tokens (min_new_tokens, min_length), but at "
            f"most {new_tokens} (max_new_tokens, max_length); lower the one or raise the other"
        )


def _beams(settings: Mapping[str, Any]) -> Beams | None:
    size, groups = settings.get("num_beams", 1), settings.get("num_beam_groups", 1)
    if size == 1:
        return None
    if size % groups:
        raise ConfigError(
            f"num_beams={size} beams do not divide into num_beam_groups={groups}; choose a divisor"
        )
    names = ("length_penalty", "early_stopping", "diversity_penalty")
    return Beams(size, groups, **{n: settings[n] for n in names if n in settings})


def _drafts(settings: Mapping[str, Any], assisted: bool) -> Drafts | None:
    lookup = settings.get("prompt_lookup_num_tokens")
    if assisted and lookup:
        raise ConfigError(
            "assistant_model and prompt_lookup_num_tokens are two ways to draft; choose one"
        )
    if lookup:
        return Drafts(lookup, settings.get("max_matching_ngram_size", 2))
    return Drafts(settings.get("num_assistant_tokens", 5)) if assisted else None


def _refuse_together(options: GenerationOptions) -> None:
    """Reject incompatible options."""
    beams, count = options.beams, options.num_return_sequences
    sampled = options.choice.do_sample
    refusals = (
        (
            beams is None and not sampled and count > 1,
            f"num_return_sequences={count} would be {count} times the same row; pass "
            "do_sample=True or num_beams",
        ),
        (
            beams is not None and count > beams.size,
            f"num_return_sequences={count} is larger than num_beams; raise num_beams",
        ),
        (
            beams is not None and options.drafts is not None,
            "beam search cannot use drafts; omit num_beams, or assistant_model and "
            "prompt_lookup_num_tokens",
        ),
        (
            beams is not None and beams.groups > 1 and sampled,
            "groups of beams differ by diversity_penalty, not by sampling; omit do_sample or "
            "num_beam_groups",
        ),
        (
            beams is not None and "logprobs" in options.outputs,
            "output_logprobs does not support beams; sequences_scores and "
            "compute_transition_scores return the log-probabilities of beams",
        ),
        (
            options.drafts is not None and bool(options.outputs),
            "output_scores, output_logits and output_logprobs need one token per step; omit them, "
            "or assistant_model and prompt_lookup_num_tokens",
        ),
    )
    for applies, refusal in refusals:
        if applies:
            raise ConfigError(refusal)
