"""One sequence that the scheduler moves from its prompt to its last token."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from ed_esurge.outputs import FinishReason
from ed_esurge.sampling import SamplingParams


class Status(enum.Enum):
    """Where a request is: in the queue (new or preempted), in the running set, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A sequence: tokens, the pages that hold their keys and values, and how it ended.

    A user's request with `n` completions is `n` of these.

    Attributes:
        request_id: unique in the engine.
        prompt: token ids, at least one.
        params: how to sample.
        eos_token_ids: ids that end it (empty with `ignore_eos`).
        max_tokens: most tokens to generate; prompt + max_tokens fits the context.
        priority: smaller goes first under the `priority` policy.
        arrival: number of the request in order of arrival: the scheduler's tie-break.
        seed: 32-bit seed of its sampling keys.
        bad_token_ids: token sequences that may not be generated.
        output: generated token ids.
        num_computed: how many of `prompt + output` have keys and values in `pages`.
        pages: page numbers, in order of position.
        page_keys: prefix-cache keys of the full pages, as far as they were computed.
        slot: row of the sampler's state while running.
        num_cached: prompt tokens found in the prefix cache at the first admission.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    max_tokens: int = 16
    priority: int = 0
    arrival: int = 0
    seed: int = 0
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    slot: int | None = None
    num_cached: int | None = None
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.request_id!r} has an empty prompt: give one token")

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of the positions `start` … `stop - 1`, over prompt and output."""
        edge = len(self.prompt)
        if stop <= edge:
            return self.prompt[start:stop]
        if start >= edge:
            return self.output[start - edge : stop - edge]
        return self.prompt[start:] + self.output[: stop - edge]

    def append(self, token: int) -> None:
        """Take a sampled token, and set `finish_reason` if the request ends with it."""
        self.output.append(token)
        if len(self.output) >= self.params.min_tokens:
            if token in self.eos_token_ids:
                self.finish_reason = "stop"
                return
            if token in self.params.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token
                return
        if len(self.output) >= self.max_tokens:
            self.finish_reason = "length"

    def stop_ids(self) -> Collection[int]:
        """Ids that may not be sampled before `min_tokens` tokens."""
        return self.eos_token_ids.union(self.params.stop_token_ids)
