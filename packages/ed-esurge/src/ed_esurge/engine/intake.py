"""From a user's prompt and options to a request that fits the engine."""

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
    """How a request is queued.

    Attributes:
        priority: smaller goes first, under the `priority` policy.
        cache_salt: pages of the prefix cache are shared among equal salts only, so that the time of
            an answer does not tell what others asked.
        lora_name: the loaded LoRA adapter that it uses; None = the model itself.
    """

    priority: int
    cache_salt: str | None
    lora_name: str | None


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and not isinstance(many[0], str) and not hasattr(many[0], "__len__"):
        return [cast("Sequence[int]", many)]
    return many


class Intake:
    """Checks requests; touches nothing that runs, so any thread may.

    Args:
        eos_token_ids: tokens that end a completion.
        max_model_len, vocab_size, max_logprobs: the engine's limits.
        prompt_class: which prompts have the same keys and values for the same tokens, by length.
        grammars: compiles structured outputs; None: there are none.
        adapters: the loaded ones; None = there are never any.
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
        # Reading the rotary settings out of a configuration takes longer than all the rest.
        self.prompt_class = lru_cache(4096)(prompt_class)
        self.grammars = grammars
        self.adapters = adapters or AdapterTable(0)
        # A request of many prompts brings the same words with each.
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
        """Make the command that queues a request.

        Raises:
            ConfigError: the request can never run as it is.
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
        """Fields of `Add` for a request that samples."""
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
            # A word with a token that the model does not know is never generated.
            "bad_token_ids": tuple(word for word in words if max(word) < self.vocab_size),
            "stops": (*params.stop, *self.config.extra_stops) if gives_text else (),
        }

    def compile_structured(self, wanted: StructuredOutputs) -> Future[Grammar]:
        """Compile the grammar of a structured output; see `Grammars.submit`.

        Raises:
            ConfigError: there is no fast tokenizer, or too many grammars wait.
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
    """What the prefix-cache keys of a request begin with: pages are shared within one salt only.

    Args:
        adapter: number of the LoRA adapter; 0 = none.
        prompt_class: prompts of different classes have different keys for the same tokens.
        cache_salt: the user's.
    """
    if not adapter and not prompt_class and cache_salt is None:
        return b""
    source = repr((adapter, prompt_class, cache_salt)).encode()
    return hashlib.blake2b(source, digest_size=16).digest()


def seed_of(params: Params, engine_seed: int, arrival: int) -> int | None:
    """The seed of a request; None where nothing is sampled.

    Args:
        engine_seed, arrival: they make the seed of a request that brings none.
    """
    if isinstance(params, PoolingParams):
        return None
    if params.seed is not None:
        return params.seed
    digest = hashlib.blake2b(f"{engine_seed}:{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # as SamplingParams takes it


def seeds_of(params: Params, seed: int | None) -> list[int]:
    """32-bit seeds of a request's sequences, one for each.

    Args:
        seed: the request's.
    """
    if isinstance(params, PoolingParams):
        return [0]
    digests = (
        hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
        for index in range(params.n)
    )
    return [int.from_bytes(digest, "big") for digest in digests]
