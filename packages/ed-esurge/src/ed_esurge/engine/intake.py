"""From a user's prompt and options to sequences that the scheduler can take."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any, cast

from ed_infra.errors import ConfigError

from ed_esurge.completion import Completion, Group
from ed_esurge.config import EngineConfig
from ed_esurge.context import fit
from ed_esurge.core.request import Request
from ed_esurge.outputs import RequestMetrics
from ed_esurge.sampling import SamplingParams
from ed_esurge.tokenizer import bad_word_ids, encode

Prompt = str | Sequence[int]


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and not isinstance(many[0], str) and not hasattr(many[0], "__len__"):
        return [cast("Sequence[int]", many)]
    return many


class Intake:
    """Checks requests and makes groups of them; touches nothing that runs, so any thread may.

    Args:
        eos_token_ids: tokens that end a completion.
        max_model_len, vocab_size, max_logprobs: the engine's limits.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Any,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        vocab_size: int,
        max_logprobs: int,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.eos_token_ids = eos_token_ids
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.max_logprobs = max_logprobs

    def group(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int
    ) -> Group:
        """Make the sequences of a request. Their arrival numbers and seeds come with `number`.

        Raises:
            ConfigError: the request can never run as it is.
        """
        self._check(params)
        text = prompt if isinstance(prompt, str) else None
        ids = (
            encode(self.tokenizer, prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        )
        self._check_tokens("the prompt", ids)
        ids, max_tokens = fit(ids, params.max_tokens, self.config, self.max_model_len)
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        if params.min_tokens > max_tokens:
            raise ConfigError(
                f"min_tokens {params.min_tokens} is above the {max_tokens} tokens that fit after "
                f"this prompt: lower it"
            )
        ends = eos.union(params.stop_token_ids)
        if params.min_tokens and ends.issuperset(params.allowed_token_ids or [-1]):
            raise ConfigError(
                "allowed_token_ids are all end or stop tokens, which min_tokens forbids: allow "
                "another, or drop min_tokens"
            )
        words = bad_word_ids(self.tokenizer, params.bad_words) if params.bad_words else ()
        stops = (*params.stop, *self.config.extra_stops) if self._gives_text(params) else ()
        metrics = RequestMetrics(arrival_time=time.monotonic())
        group = Group(request_id, params, text, ids, metrics)
        for index in range(params.n):
            # One of n computes the prompt's log-probabilities; the others share its pages.
            own = params if index == 0 else params.replace(prompt_logprobs=None)
            request = Request(
                f"{request_id}#{index}",
                ids,
                own,
                eos_token_ids=eos,
                max_tokens=max_tokens,
                priority=priority,
                bad_token_ids=words,
            )
            completion = Completion(request, index, self.tokenizer, stops)
            group.completions[request.request_id] = completion
        return group

    def number(self, group: Group, arrival: int) -> int:
        """Give a group's sequences their arrival numbers and seeds; returns the next number."""
        seed = group.params.seed
        source = f"{self.config.seed}:{arrival}" if seed is None else str(seed)
        for index, completion in enumerate(group.completions.values()):
            completion.request.arrival = arrival + index
            digest = hashlib.blake2b(f"{source}/{index}".encode(), digest_size=4).digest()
            completion.request.seed = int.from_bytes(digest, "big")
        return arrival + len(group.completions)

    def _gives_text(self, params: SamplingParams) -> bool:
        return self.tokenizer is not None and params.detokenize

    def _check(self, params: SamplingParams) -> None:
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
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"{name} has token id {token}, outside the vocabulary of {self.vocab_size}"
                )
