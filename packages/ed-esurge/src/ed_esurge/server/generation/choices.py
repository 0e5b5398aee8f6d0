"""Deltas of the engine put together into whole choices, for answers without streaming."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from ed_esurge.outputs import RequestOutput
from ed_esurge.server.http.errors import APIError


class Tally:
    """Token counts of one answer, over its prompts and choices.

    Args:
        truncated_tokens: prompt tokens that were cut off.
    """

    def __init__(self, prompts: list[list[int]], truncated_tokens: int = 0) -> None:
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.truncated_tokens = truncated_tokens
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}

    def observe(self, place: int, delta: RequestOutput) -> None:
        """Count a delta of prompt number `place`."""
        self._cached[place] = delta.metrics.num_cached_tokens
        for out in delta.outputs:
            self.completion_tokens += len(out.token_ids)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return sum(self._cached.values())


async def collect(
    stream: AsyncGenerator[tuple[int, RequestOutput]], count: int, tally: Tally
) -> list[RequestOutput]:
    """Gather the deltas of `count` requests into one whole output each, in order."""
    whole: list[RequestOutput | None] = [None] * count
    async for place, delta in stream:
        tally.observe(place, delta)
        have = whole[place]
        if have is None:
            whole[place] = delta
        else:
            have.add(delta)
    return [output for output in whole if output is not None]


def finish_reason(reason: str | None) -> str:
    """The reason as OpenAI knows it.

    Raises:
        APIError: 503, when the completion did not come to an end of its own.
    """
    if reason not in ("stop", "length"):
        raise APIError(f"the engine ended the completion ({reason})", status=503)
    return reason
