"""What the sampler's state should say of a request: biases, masks and token counts.

The state's rows live on the device; a row is written when a request gets its slot and when its
masks change, and otherwise counts its tokens by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ed_esurge.core.request import Request

Row = tuple[np.int32, np.ndarray, np.ndarray]


class RowKeeper:
    """Knows what each row holds.

    Args:
        vocab_size: v.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # slot -> arrival number (ids may be used again), tokens counted, banned tokens
        self._held: dict[int, tuple[int, int, frozenset[int]]] = {}

    def forget(self) -> None:
        """The device's rows are gone."""
        self._held.clear()

    def applies(self, request: Request) -> bool:
        """Whether the request's logits are adjusted at all."""
        params = request.params
        return bool(
            params.penalized
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.min_tokens
            or request.bad_token_ids
        )

    def update(self, request: Request) -> Row | None:
        """`(slot, bias [v], seen [v])` if the request's row must be written before this step."""
        assert request.slot is not None, "a running request has a slot"
        banned = self._banned(request)
        now = (request.arrival, len(request.output), banned)
        if self._held.get(request.slot) == now:
            return None
        self._held[request.slot] = now
        return np.int32(request.slot), self._bias(request, banned), self._seen(request)

    def sampled(self, request: Request) -> None:
        """The device is counting one more token of this request."""
        assert request.slot is not None, "a running request has a slot"
        arrival, count, banned = self._held[request.slot]
        self._held[request.slot] = (arrival, count + 1, banned)

    def _banned(self, request: Request) -> frozenset[int]:
        """Tokens that may not come next, as far as that changes from step to step."""
        banned: set[int] = set()
        if len(request.output) < request.params.min_tokens:
            banned.update(request.stop_ids())
        for word in request.bad_token_ids:
            head = len(word) - 1
            if head == 0 or ends_with(request.output, word[:-1]):
                banned.add(word[-1])
        return frozenset(banned)

    def _bias(self, request: Request, banned: frozenset[int]) -> np.ndarray:
        allowed = request.params.allowed_token_ids
        bias = np.zeros(self.vocab_size, np.float32)
        if allowed is not None:
            bias[:] = -np.inf
            bias[list(allowed)] = 0
        for token, value in request.params.logit_bias.items():
            bias[token] += value
        bias[list(banned)] = -np.inf
        return bias

    def _seen(self, request: Request) -> np.ndarray:
        seen = 2 * np.bincount(
            np.asarray(request.output, np.int64), minlength=self.vocab_size
        ).astype(np.int32)
        seen[np.unique(request.prompt)] += 1
        return seen


def ends_with(tokens: Sequence[int], tail: Sequence[int]) -> bool:
    """Whether `tokens` ends with `tail`."""
    return list(tokens[len(tokens) - len(tail) :]) == list(tail) and len(tokens) >= len(tail)
