"""Validation and tokenization of requests."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any, TypedDict, cast

from ed_infra.errors import ConfigError

from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import AdapterTable
from ed_esurge.core.commands import Add
from ed_esurge.fitting import fit
from ed_esurge.grammars.store import Grammar, Grammars
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs
from ed_esurge.tokenizer import Tokenizer, bad_word_ids, encode

Prompt = str | Sequence[int]
Params = SamplingParams | PoolingParams


class RequestOptions(TypedDict, total=False):
    """Options of a queued request.

    Attributes:
        priority: priority under the `priority` policy; smaller is scheduled first.
        cache_salt: salt of the prefix cache. Only requests with equal salts share pages, so that
            response times reveal nothing about the prompts of other users.
        lora_name: name of the loaded LoRA adapter; None = the base model.
    """

    priority: int
    cache_salt: str | None
    lora_name: str | None


def as_prompts(prompts: Any) -> list[Prompt]:
    """Return one prompt or several prompts as a list."""
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and not isinstance(many[0], str) and not hasattr(many[0], "__len__"):
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
            keys and values for the same tokens.
        grammars: compiler of structured outputs; None = structured outputs are not supported.
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
        prompt_class: Callable[[int], int] = lambda length: 0,
        grammars: Grammars | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.eos_token_ids = eos_token_ids
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.max_logprobs = max_logprobs
        # Reading the rotary settings of a configuration dominates the time of `prepare`.
        self.prompt_class = lru_cache(4096)(prompt_class)
        self.grammars = grammars
        self.adapters = adapters or AdapterTable(0)
        # A client request with many prompts repeats the same words for each prompt.
        self._words = lru_cache(64)(partial(bad_word_ids, tokenizer))

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> Add:
        """Create the command that queues a request.

        Raises:
            ConfigError: the request is invalid or exceeds a limit of the engine.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
            raise ConfigError(
                f"priority {priority!r} is not a whole number of 32 bits: 0 is usual, smaller first"
            )
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise ConfigError(f"cache_salt {cache_salt!r} is no text: give one, or None")
        adapter = 0 if lora_name is None else self.adapters.find(lora_name).number
        sampling = params if isinstance(params, SamplingParams) else None
        if sampling is not None:
            self._check(sampling)
        text = prompt if isinstance(prompt, str) else None
        ids = (
            encode(self.tokenizer, prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        )
        self._check_tokens("the prompt", ids)
        asked = 0 if sampling is None else sampling.max_tokens
        ids, max_tokens = fit(ids, asked, self.config, self.max_model_len)
        options: dict[str, Any] = {} if sampling is None else self._sampling(sampling, max_tokens)
        return Add(
            request_id,
            ids,
            params,
            max_tokens,
            priority=priority,
            prompt=text,
            salt=salt(adapter, self.prompt_class(len(ids)), cache_salt),
            adapter=adapter,
            arrival_time=time.monotonic(),
            **options,
        )

    def _sampling(self, params: SamplingParams, max_tokens: int) -> dict[str, Any]:
        """Return the fields of `Add` for a request that samples."""
        if params.min_tokens > max_tokens:
            raise ConfigError(
                f"min_tokens {params.min_tokens} is above the {max_tokens} tokens that fit after "
                f"this prompt: lower it"
            )
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        ends = eos.union(params.stop_token_ids)
        if params.min_tokens and ends.issuperset(params.allowed_token_ids or [-1]):
            raise ConfigError(
                "allowed_token_ids are all end or stop tokens, which min_tokens forbids: allow "
                "another, or drop min_tokens"
            )
        words = self._words(params.bad_words) if params.bad_words else ()
        gives_text = self.tokenizer is not None and params.detokenize
        return {
            "eos_token_ids": eos,
            # A word with a token outside the vocabulary is never generated.
            "bad_token_ids": tuple(word for word in words if max(word) < self.vocab_size),
            "stops": (*params.stop, *self.config.extra_stops) if gives_text else (),
        }

    def compile_structured(self, wanted: StructuredOutputs) -> Future[Grammar]:
        """Compile the grammar of a structured output; see `Grammars.submit`.

        Raises:
            ConfigError: there is no fast tokenizer, or too many grammars are queued.
        """
        if self.grammars is None:
            raise ConfigError("structured output needs a tokenizer: give one to eSurge")
        return self.grammars.submit(wanted)

    def _check(self, params: SamplingParams) -> None:
        if params.structured_outputs is not None:
            self.compile_structured(params.structured_outputs).result()
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > self.max_logprobs:
                raise ConfigError(
                    f"{name} {asked} is above the engine's max_logprobs {self.max_logprobs}: "
                    "ask for fewer, or build the engine with more"
                )
        if params.stop and self.tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer: give one to eSurge, or use stop_token_ids"
            )
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            self._check_tokens(name, list(getattr(params, name) or ()))

    def _check_tokens(self, name: str, ids: list[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise ConfigError(
                f"{name} has token id {wrong}, outside the vocabulary of {self.vocab_size}"
            )


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


def seed_of(params: Params, engine_seed: int, arrival: int) -> int | None:
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


def seeds_of(params: Params, seed: int | None) -> list[int]:
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
