"""Chunks of the streams of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ed_esurge.server.http.json_parts import encode_json


class Chunks:
    """Writes the chunks of one stream.

    Args:
        kind: value of `object` (`text_completion`, `chat.completion.chunk`).
        usage: whether the client requested token counts. Every chunk has a `usage` field then.
        so_far: returns the token counts so far, for each chunk; None = only the last chunk has
            token counts.
    """

    def __init__(
        self,
        kind: str,
        request_id: str,
        model: str,
        created: int,
        *,
        usage: bool,
        so_far: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        fields = {"id": request_id, "object": kind, "created": created, "model": model}
        self._head = "data: " + encode_json(fields)[:-1] + ',"choices":['
        self._tail = ',"usage":null}\n\n' if usage else "}\n\n"
        self._so_far = so_far

    def choice(
        self, index: int, payload: str, logprobs: object, finish: str | None, extra: str = ""
    ) -> str:
        """Return a chunk with one choice.

        Args:
            payload: JSON fields of the choice: `"text":"…"` or `"delta":{…}`.
            extra: JSON fields of the chunk: `,"prompt_token_ids":[…]`.
        """
        scores = "null" if logprobs is None else encode_json(logprobs)
        return self.written_choice(index, payload, scores, finish, extra)

    def written_choice(
        self, index: int, payload: str, scores: str, finish: str | None, extra: str = ""
    ) -> str:
        """Return a chunk with one choice, whose log-probabilities are JSON text."""
        reason = "null" if finish is None else f'"{finish}"'
        tail = self._tail
        if self._so_far is not None:
            tail = f',"usage":{encode_json(self._so_far())}}}\n\n'
        return (
            f'{self._head}{{"index":{index},{payload},"logprobs":{scores},'
            f'"finish_reason":{reason}}}]{extra}{tail}'
        )

    def usage(self, usage: dict[str, Any]) -> str:
        """Return the last chunk of a stream with `include_usage`: no choices, all token counts."""
        return f'{self._head}],"usage":{encode_json(usage)}}}\n\n'
