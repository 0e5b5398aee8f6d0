"""Requests in a log, for a replay in another process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ed_infra.errors import ConfigError

from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import SamplingParams

#: Longest text of a logged request, in characters.
MAX_LENGTH = 2**26


@dataclass(frozen=True)
class LoggedRequest:
    """What a replay of a request needs, and the completions that the request had.

    Attributes:
        prompt_token_ids: the prompt after truncation.
        seed: the seed of the output.
        sampling_params: the sampling options of the request.
        completions: tokens of each completion.
        logprobs: log-probability of each token; empty if the request did not ask for them.
    """

    prompt_token_ids: list[int]
    seed: int | None
    sampling_params: SamplingParams
    completions: list[list[int]]
    logprobs: list[list[float]]

    @classmethod
    def of(cls, output: RequestOutput, sampling_params: SamplingParams) -> LoggedRequest:
        """Return the entry of a complete output."""
        return cls(
            list(output.prompt_token_ids),
            output.seed,
            sampling_params,
            [list(one.token_ids) for one in output.outputs],
            [
                [entry[t].logprob for t, entry in zip(one.token_ids, one.logprobs, strict=True)]
                for one in output.outputs
                if one.logprobs is not None
            ],
        )

    def to_json(self) -> str:
        """Return one line of JSON. Numbers keep all bits."""
        values = {
            "prompt_token_ids": self.prompt_token_ids,
            "seed": self.seed,
            "sampling_params": self.sampling_params.model_dump(exclude_unset=True, mode="json"),
            "completions": self.completions,
            "logprobs": self.logprobs,
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> LoggedRequest:
        """Read a line of `to_json`.

        Raises:
            ConfigError: the text is no logged request, or an option is unknown.
        """
        if len(text) > MAX_LENGTH:
            raise ConfigError(
                f"a logged request has {len(text)} characters, and at most {MAX_LENGTH} are read"
            )
        try:
            values = json.loads(text)
            params = SamplingParams(**values["sampling_params"])
            prompt, seed = values["prompt_token_ids"], values["seed"]
            completions, logprobs = values["completions"], values["logprobs"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"no logged request: {error}"[:400]) from error
        return cls(prompt, seed, params, completions, logprobs)

    def equals(self, output: RequestOutput) -> bool:
        """Return whether another output has the same tokens, and log-probabilities to the bit."""
        logged_output = LoggedRequest.of(output, self.sampling_params)
        return _same(self.completions, logged_output.completions) and _same(
            self.logprobs, logged_output.logprobs
        )


def _same(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> bool:
    return [list(row) for row in one] == [list(row) for row in other]
