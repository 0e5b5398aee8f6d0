"""Validation and tokenization of requests: every request passes here, and only here.

A server maps `ContextLengthError` and `TokenIdError` to its own error format.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypedDict, cast

import numpy as np
from ed_infra.errors import ConfigError, refuse_keywords
from ed_models.modalities.items import EncoderItems

from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import AdapterTable
from ed_esurge.core.commands import Add, DecoderStart, EncoderInput, find_runs
from ed_esurge.embedded_prompts import EmbeddedPrompts, check_params_of_embeds
from ed_esurge.grammars.store import Grammar, Grammars
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs
from ed_esurge.tokenizer import Tokenizer, bad_word_ids, tokenize_text


class ContextLengthError(ConfigError):
    """A request does not fit the context, and the options forbid the required change.

    Attributes:
        prompt_tokens: number of prompt tokens.
        max_tokens: number of requested tokens; None = no number was requested.
        max_model_len: maximum length of prompt plus completion.
    """

    def __init__(
        self, message: str, prompt_tokens: int, max_tokens: int | None, max_model_len: int
    ) -> None:
        super().__init__(message)
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens
        self.max_model_len = max_model_len


class TokenIdError(ConfigError):
    """A token id is outside the vocabulary.

    Attributes:
        field: name of the field with the id.
        token: the id.
        vocab_size: size of the vocabulary.
    """

    def __init__(self, field: str, token: int, vocab_size: int) -> None:
        super().__init__(
            f"{field} has token id {token}, outside the vocabulary of {vocab_size}: use ids of "
            f"0 to {vocab_size - 1} and the tokenizer of the model, or add rows to the model "
            "(resize_token_embeddings)"
        )
        self.field, self.token, self.vocab_size = field, token, vocab_size


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that `check_prompt` has accepted. The engine does not check it again.

    Attributes:
        token_ids: token ids after truncation, at least one.
        max_tokens: maximum number of tokens that can be generated.
        removed: number of tokens that truncation has removed.
        text: text of the prompt; None for a prompt of token ids.
    """

    token_ids: list[int]
    max_tokens: int
    removed: int = 0
    text: str | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


PromptInput = str | Sequence[int] | CheckedPrompt
RequestParams = SamplingParams | PoolingParams


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Check that token ids are in the vocabulary.

    Args:
        field: name of the field, for the error.

    Raises:
        TokenIdError: an id is outside the vocabulary.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise TokenIdError(field, wrong, vocab_size)


def check_params_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Check the token ids of sampling options. Raises TokenIdError: see `check_token_ids`."""
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        check_token_ids(name, list(getattr(params, name) or ()), vocab_size)


def check_prompt(
    token_ids: list[int],
    max_tokens: int | None,
    config: EngineConfig,
    *,
    max_model_len: int,
    vocab_size: int,
    encoder_decoder: bool = False,
) -> CheckedPrompt:
    """Check the token ids of a prompt, and fit the prompt and `max_tokens` to the context.

    Args:
        token_ids: the prompt.
        max_tokens: see `fit`.
        config: the engine's options.
        max_model_len, vocab_size: the engine's limits.
        encoder_decoder: see `fit`.

    Raises:
        TokenIdError: a token id is outside the vocabulary.
        ContextLengthError: see `fit`.
        ConfigError: the prompt is empty.
    """
    check_token_ids("the prompt", token_ids, vocab_size)
    used, most = fit(token_ids, max_tokens, config, max_model_len, encoder_decoder=encoder_decoder)
    return CheckedPrompt(used, most, removed=len(token_ids) - len(used))


def fit(
    prompt: list[int],
    max_tokens: int | None,
    config: EngineConfig,
    max_model_len: int,
    *,
    encoder_decoder: bool = False,
) -> tuple[list[int], int]:
    """Truncate the prompt and reduce `max_tokens` according to the options, so that both fit.

    Args:
        prompt: token ids.
        max_tokens: requested number of tokens; None is the free part of the context, 0 needs no
            room after the prompt.
        config: the engine's options.
        max_model_len: maximum length of prompt plus completion.
        encoder_decoder: whether the model is an encoder-decoder, whose encoder reads the prompt and
            whose decoder generates the completion. Each of them has `max_model_len` positions.

    Returns:
        the prompt to use, and the number of tokens to generate: at least 1, or 0 if requested.

    Raises:
        ContextLengthError: the request does not fit, and the options forbid the required change.
        ConfigError: the prompt is empty.
    """
    if not prompt:
        raise ConfigError("the prompt is empty (no tokens): send at least one token")
    room = 0 if max_tokens == 0 else max(1, config.reserve_tokens or 1)
    may_cut = config.auto_truncate_prompt and not config.strict_context
    if may_cut and not config.prefer_preserve_prompt and max_tokens is not None:
        room = max(room, min(max_tokens, max_model_len - 1))
    least = 1 if max_tokens is None else max_tokens
    if encoder_decoder:
        room = least = 0
    longest = max_model_len - room
    if len(prompt) > longest and len(prompt) + least > max_model_len:
        if not may_cut:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, but max_model_len={max_model_len} allows "
                f"{longest} in addition to {room} generated tokens: shorten the prompt, or set "
                "auto_truncate_prompt (without strict_context)",
                len(prompt),
                max_tokens,
                max_model_len,
            )
        prompt = truncate(prompt, longest, config.truncate_mode)
    free = max_model_len - (DECODER_PREFIX if encoder_decoder else len(prompt))
    if max_tokens is None:
        return prompt, free
    if max_tokens > free:
        if config.strict_context or not config.auto_cap_new_tokens:
            raise ContextLengthError(
                f"max_tokens={max_tokens} after a prompt of {len(prompt)} tokens exceeds "
                f"max_model_len={max_model_len}: request at most {free}, or set "
                "auto_cap_new_tokens (without strict_context)",
                len(prompt),
                max_tokens,
                max_model_len,
            )
        max_tokens = free
    return prompt, max_tokens


#: Most tokens of a decoder before its completion: the start token, and a forced token.
DECODER_PREFIX = 2
#: Number of lists of `dry_sequence_breakers` whose tokens are kept.
MAX_BREAKER_SETS = 16


def truncate(prompt: list[int], length: int, mode: str) -> list[int]:
    """Remove the left, the right or the middle part of a prompt."""
    if mode == "left":
        return prompt[-length:]
    if mode == "right":
        return prompt[:length]
    head = length - length // 2
    return prompt[:head] + prompt[len(prompt) - length // 2 :]


class RequestOptions(TypedDict, total=False):
    """Options of a queued request.

    Attributes:
        priority: priority under the `priority` policy; smaller is scheduled first.
        cache_salt: salt of the prefix cache. Only requests with equal salts share pages, so that
            response times reveal nothing about the prompts of other users.
        lora_name: name of the loaded LoRA adapter; None = the base model.
        encoder_inputs: inputs of the model's encoder, such as images, in the order of their
            placeholder tokens.
    """

    priority: int
    cache_salt: str | None
    lora_name: str | None
    encoder_inputs: Sequence[EncoderInput]


def check_request_keywords(options: Mapping[str, object]) -> None:
    """Check the options of a queued request.

    Raises:
        KeywordError: an option is unknown; the message names `SamplingParams` for its options.
    """
    known_options = RequestOptions.__annotations__
    if not known_options.keys() >= options.keys():
        sampling = {
            name: f"it is an option of the sampling: use SamplingParams({name}=...)"
            for name in SamplingParams.model_fields
        }
        refuse_keywords("a request", options, known_options, sampling)


def list_prompts(prompts: Any) -> list[PromptInput]:
    """Return one prompt or several prompts as a list."""
    if isinstance(prompts, str | CheckedPrompt):
        return [prompts]
    many = list(prompts)
    if many and not isinstance(many[0], str | CheckedPrompt) and not hasattr(many[0], "__len__"):
        return [cast("Sequence[int]", many)]
    return many


class Intake:
    """Validates requests. Thread-safe, because it does not change the state of the engine.

    Args:
        config: the engine's options.
        tokenizer: the engine's tokenizer; None accepts token ids only.
        eos_token_ids: tokens that end a completion.
        max_model_len, vocab_size, max_logprobs: the engine's limits.
        prompt_class: function from prompt length to class. Prompts of the same class have the same
            keys and values for the same tokens; None = one class.
        samples: whether the model generates tokens; False accepts `PoolingParams` only.
        grammars: compiler of structured outputs; None = structured outputs are not supported.
        items: the items of the model's encoder; None = no encoder.
        most_together: maximum number of adjacent placeholder tokens of items, which a step computes
            together; None = a step may compute some of them.
        decoder: first tokens of an encoder-decoder's decoder, and the rules of its tokens. Prompts
            are then inputs of the encoder; None for other models.
        adapters: table of the loaded adapters; None = adapters are not supported.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        vocab_size: int,
        max_logprobs: int,
        prompt_class: Callable[[int], int] | None = None,
        samples: bool = True,
        grammars: Grammars | None = None,
        items: EncoderItems | None = None,
        most_together: int | None = None,
        decoder: DecoderStart | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.eos_token_ids = eos_token_ids
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.max_logprobs = max_logprobs
        # Reading the rotary settings of a configuration dominates the time of `prepare`.
        self.prompt_class = lru_cache(4096)(prompt_class or (lambda length: 0))
        self._samples = samples
        self._breakers: dict[tuple[str, ...], tuple[int, ...]] = {}
        self.grammars = grammars
        self.items = items
        self._most_together, self._decoder = most_together, decoder
        self.adapters = adapters or AdapterTable(0)
        # A client request with many prompts repeats the same words for each prompt.
        self._words = lru_cache(64)(partial(bad_word_ids, tokenizer))

    def prepare(
        self,
        request_id: str,
        prompt: PromptInput,
        params: RequestParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        encoder_inputs: Sequence[EncoderInput] = (),
    ) -> Add:
        """Create the command that queues a request.

        Raises:
            ConfigError: the request is invalid or exceeds a limit of the engine.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
            raise ConfigError(
                f"priority={priority!r} is invalid: it must be a whole number of 32 bits. The "
                "default is 0; smaller numbers are scheduled first"
            )
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise ConfigError(f"cache_salt={cache_salt!r} is invalid: it must be a string or None")
        adapter = 0 if lora_name is None else self.adapters.find(lora_name).number
        sampling = params if isinstance(params, SamplingParams) else None
        if sampling is not None:
            if not self._samples:
                raise ConfigError(
                    "the model returns one vector per prompt and generates no tokens: use embed() "
                    "or PoolingParams"
                )
            self._check(sampling)
        elif self._samples and isinstance(params, PoolingParams):
            for name in ("prompt_length", "second_text_start", "task"):
                if getattr(params, name):
                    raise ConfigError(
                        f"{name}={getattr(params, name)} requires an embedding model or a "
                        "classifier: omit the option"
                    )
        checked = self.check_prompt(prompt, 0 if sampling is None else sampling.max_tokens)
        ids, max_tokens = checked.token_ids, checked.max_tokens
        self._check_encoder_inputs(encoder_inputs, checked)
        if encoder_inputs and sampling is not None and isinstance(self.items, EmbeddedPrompts):
            check_params_of_embeds(sampling)
        if encoder_inputs and sampling is not None and sampling.use_beam_search:
            raise ConfigError(
                "beam search does not support encoder_inputs: omit the images or use_beam_search"
            )
        if self._decoder is not None:
            if sampling is None or sampling.prompt_logprobs is not None:
                raise ConfigError(
                    "an encoder-decoder has no pooled vector and no prompt_logprobs: its decoder "
                    "does not read the prompt"
                )
            arrays = {"input_ids": np.asarray(ids, np.int32)}
            encoder_inputs = (EncoderInput.of(arrays, 0, len(ids)),)
            ids = self._decoder.prefix(sampling.forced_bos_token_id)
        elif sampling is not None and sampling.forced_bos_token_id is not None:
            raise ConfigError(
                f"forced_bos_token_id={sampling.forced_bos_token_id} requires an encoder-decoder: "
                "omit the option"
            )
        options: dict[str, Any] = {} if sampling is None else self._sampling(sampling, max_tokens)
        if sampling is not None and sampling.repetition_of_sequences is not None:
            params = self._with_breakers(sampling)
        return Add(
            request_id,
            ids,
            params,
            max_tokens,
            priority=priority,
            prompt=checked.text,
            salt=salt(adapter, self.prompt_class(len(ids)), cache_salt),
            adapter=adapter,
            arrival_time=time.monotonic(),
            encoder_inputs=tuple(encoder_inputs),
            positions=self._positions(len(ids), encoder_inputs),
            **options,
        )

    def check_prompt(self, prompt: PromptInput, max_tokens: int | None) -> CheckedPrompt:
        """Tokenize and check a prompt; see the function `check_prompt`.

        Args:
            prompt: text, token ids, or a prompt that was checked before.
            max_tokens: requested number of tokens; None = the free part of the context.
        """
        if isinstance(prompt, CheckedPrompt):
            most = prompt.max_tokens if max_tokens is None else min(max_tokens, prompt.max_tokens)
            return replace(prompt, max_tokens=most)
        text = prompt if isinstance(prompt, str) else None
        ids = (
            tokenize_text(self.tokenizer, prompt)
            if isinstance(prompt, str)
            else [int(t) for t in prompt]
        )
        limits: dict[str, Any] = {"max_model_len": self.max_model_len}
        limits |= {"vocab_size": self.vocab_size, "encoder_decoder": self._decoder is not None}
        return replace(check_prompt(ids, max_tokens, self.config, **limits), text=text)

    def _positions(self, count: int, items: Sequence[EncoderInput]) -> np.ndarray | None:
        return None if self.items is None else self.items.positions(count, items)

    def _check_encoder_inputs(self, items: Sequence[EncoderInput], checked: CheckedPrompt) -> None:
        """Check that the placeholder tokens of the items are in the prompt, in order."""
        if not items:
            return
        if checked.removed:
            raise ContextLengthError(
                f"the prompt is {checked.removed} tokens too long, and prompts with encoder inputs "
                "(images, embeddings) are not truncated: send fewer inputs or less text",
                len(checked) + checked.removed,
                checked.max_tokens,
                self.max_model_len,
            )
        free = 0
        for number, item in enumerate(items):
            names = () if self.items is None else self.items.names
            unknown = sorted(set(item.arrays) - set(names))
            if self.items is None or unknown:
                accepted = ", ".join(names) or "none: the model has no encoder"
                name = min(unknown or item.arrays)
                raise ConfigError(
                    f"encoder_inputs[{number}] has the array {name!r}; accepted arrays: {accepted}"
                )
            if item.start < free or item.length < 1:
                raise ConfigError(
                    f"encoder_inputs[{number}] has {item.length} placeholder tokens at position "
                    f"{item.start}: they must begin at {free} or later"
                )
            if item.length > self.items.longest:
                raise ConfigError(
                    f"encoder_inputs[{number}] has {item.length} placeholder tokens, more than the "
                    f"{self.items.longest} encoder positions of an item: send a smaller image"
                )
            problem = self.items.check(item)
            if problem is None and item.gaps != self.items.gaps(item.arrays):
                problem = (
                    f"the placeholder tokens from {item.start} to before {item.stop} have other "
                    "tokens between them than the processor of the checkpoint writes: use its text"
                )
            if problem:
                raise ConfigError(f"encoder_inputs[{number}]: {problem}")
            free = item.stop
        longest = self._most_together
        if longest is not None:
            for first, last in find_runs(items):
                if last - first > longest:
                    raise ConfigError(
                        f"adjacent encoder_inputs have {last - first} placeholder tokens at "
                        f"position {first}, which attend to each other, but a step computes at "
                        f"most {longest}: raise max_num_batched_tokens, or separate the inputs"
                    )
        if free > len(checked.token_ids):
            raise ConfigError(
                f"the placeholder tokens of encoder inputs end at position {free}, but the prompt "
                f"has {len(checked.token_ids)} tokens: pass the tokens and the positions that the "
                "processor writes"
            )

    def _sampling(self, params: SamplingParams, max_tokens: int) -> dict[str, Any]:
        """Return the fields of `Add` for a request that samples."""
        if params.min_tokens > max_tokens:
            raise ConfigError(
                f"min_tokens={params.min_tokens} exceeds the {max_tokens} tokens that fit after "
                "this prompt: request fewer"
            )
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        ends = eos.union(params.stop_token_ids)
        if params.min_tokens and ends.issuperset(params.allowed_token_ids or [-1]):
            raise ConfigError(
                "allowed_token_ids has end and stop tokens only, which min_tokens forbids: allow "
                "another token, or omit min_tokens"
            )
        words = self._words(params.bad_words) if params.bad_words else ()
        checkpoint_words: list[tuple[int, ...]] = []
        if self._decoder is not None:
            ends_alone = {(token,) for token in self.eos_token_ids}
            checkpoint_words = [
                word for word in self._decoder.bad_words_ids if word not in ends_alone
            ]
        gives_text = self.tokenizer is not None and params.detokenize
        return {
            "eos_token_ids": eos,
            # A word with a token outside the vocabulary is never generated.
            "rules": None if self._decoder is None else self._decoder.rules,
            "bad_token_ids": (
                *checkpoint_words,
                *(word for word in words if max(word) < self.vocab_size),
            ),
            "stops": (*params.stop, *self.config.extra_stops) if gives_text else (),
        }

    def _with_breakers(self, params: SamplingParams) -> SamplingParams:
        """Return options of DRY with the ids of the tokens at which repetitions end."""
        if params.dry_breaker_token_ids is not None:
            return params
        words = params.dry_sequence_breakers
        if not words or self.tokenizer is None:
            return params.replace(dry_breaker_token_ids=())
        if words not in self._breakers:
            if len(self._breakers) >= MAX_BREAKER_SETS:
                self._breakers.clear()
            texts = [self.tokenizer.decode([token]) for token in range(self.vocab_size)]
            breaker_ids = (
                token for token, text in enumerate(texts) if any(w in text for w in words)
            )
            self._breakers[words] = tuple(breaker_ids)
        return params.replace(dry_breaker_token_ids=self._breakers[words])

    def compile_structured(self, structured_outputs: StructuredOutputs) -> Future[Grammar]:
        """Compile the grammar of a structured output; see `Grammars.submit`.

        Raises:
            ConfigError: there is no fast tokenizer, or too many grammars are queued.
        """
        if self.grammars is None:
            raise ConfigError("structured outputs require a tokenizer: pass one to eSurge")
        return self.grammars.submit(structured_outputs)

    def _check(self, params: SamplingParams) -> None:
        if params.structured_outputs is not None:
            self.compile_structured(params.structured_outputs).result()
        for name in ("logprobs", "prompt_logprobs"):
            num_logprobs = getattr(params, name)
            if num_logprobs is not None and num_logprobs > self.max_logprobs:
                raise ConfigError(
                    f"{name}={num_logprobs} exceeds the engine's max_logprobs={self.max_logprobs}: "
                    "request fewer, or create the engine with a larger max_logprobs"
                )
        if params.use_beam_search and 2 * params.n > self.max_logprobs:
            raise ConfigError(
                f"{params.n} beams need {2 * params.n} log-probabilities for each token, and the "
                f"engine returns at most {self.max_logprobs} (max_logprobs): request fewer beams"
            )
        if params.stop and self.tokenizer is None:
            raise ConfigError(
                "stop strings require a tokenizer: pass one to eSurge, or use stop_token_ids"
            )
        check_params_token_ids(params, self.vocab_size)
        if params.forced_bos_token_id is not None:
            check_token_ids("forced_bos_token_id", [params.forced_bos_token_id], self.vocab_size)


def salt(adapter: int, prompt_class: int, cache_salt: str | None) -> bytes:
    """Return the prefix of a request's prefix-cache keys. Only equal salts share pages.

    Args:
        adapter: number of the LoRA adapter; 0 = none.
        prompt_class: class of the prompt length. Prompts of different classes have different keys
            and values for the same tokens.
        cache_salt: salt of the user.
    """
    if not adapter and not prompt_class and cache_salt is None:
        return b""
    source = repr((adapter, prompt_class, cache_salt)).encode()
    return hashlib.blake2b(source, digest_size=16).digest()


def derive_seed(params: RequestParams, engine_seed: int, arrival: int) -> int | None:
    """Return the seed of a request, or None if the request does not sample.

    Args:
        params: options of the request.
        engine_seed, arrival: source of the seed of a request without one.
    """
    if isinstance(params, PoolingParams):
        return None
    if params.seed is not None:
        return params.seed
    digest = hashlib.blake2b(f"{engine_seed}:{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # fits the signed 64-bit seed of SamplingParams


def get_seeds(params: RequestParams, seed: int | None) -> list[int]:
    """Return the 32-bit seed of each sequence of a request.

    Args:
        params: options of the request.
        seed: seed of the request.
    """
    if isinstance(params, PoolingParams):
        return [0]
    digests = (
        hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
        for index in range(params.n)
    )
    return [int.from_bytes(digest, "big") for digest in digests]
