"""The memory of answers: a bound before a request is admitted, and a count while it is answered.

The bytes include the objects from which the text of an answer is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from ed_esurge.server.http.admission import Reservation
from ed_esurge.server.http.errors import APIError

#: Bytes of a generated token: its id and its text.
TOKEN_BYTES = 64
#: Bytes of a log-probability: the object of the engine, and its entry and text in the answer.
SCORE_BYTES, SCORE_TEXT_BYTES = 136, 120
#: Bytes of a log-probability in an answer that stores entries until its end.
STORED_SCORE_BYTES = 1024
#: Bytes of the text of a token id, and of a number of a vector with its value in the array.
ID_BYTES, NUMBER_BYTES = 12, 32
#: Bytes of the text of a token in a list of texts.
STRING_BYTES = 24
#: Bytes of an entry of a vector or a score, without its numbers.
VECTOR_BYTES = 512
#: Bytes of an answer that the limit of concurrent requests bounds.
FREE_BYTES = 2**16


@dataclass(frozen=True)
class AnswerCost:
    """The bytes of an answer that contains generated tokens.

    Attributes:
        prompt: bytes for the prompts.
        token: bytes of each generated token.
        choices: number of completions of the request.
    """

    prompt: int
    token: int
    choices: int

    def bytes(self, tokens: int) -> int:
        """Return the bytes of the answer with a number of tokens in each completion."""
        return self.prompt + self.choices * tokens * self.token


def score_count(top: int | None) -> int:
    """Return the number of log-probabilities of a token with `top` alternatives; 0 for None."""
    return 0 if top is None else top + 1


class AnswerSize:
    """The bytes of one answer, which count as bytes in flight until the request ends.

    Args:
        request: the request.
        most: maximum number of bytes.
        reservation: the reserved bytes of the request.

    Attributes:
        bytes: bytes so far.
    """

    def __init__(self, request: Request, most: int, reservation: Reservation) -> None:
        self._scope, self.bytes, self.most = request.scope, 0, most
        self._reserved = FREE_BYTES
        self._reservation = reservation

    def check(self, size: int, param: str, remedy: str) -> None:
        """Check the bound of an answer before the request is admitted.

        Args:
            size: bound of the bytes.
            param: field of the request that determines the size.
            remedy: what the client can change.

        Raises:
            APIError: 400.
        """
        if size > self.most:
            raise APIError(
                f"the answer would need up to {size} bytes of memory, and the limit of this server "
                f"is {self.most} (max_answer_bytes): {remedy}",
                param=param,
                code="answer_too_large",
            )

    def fit_tokens(self, cost: AnswerCost, requested: int | None, room: int, param: str) -> int:
        """Return the number of tokens of each completion.

        Args:
            requested: number of tokens that the client requested; None = as many as fit.
            room: number of tokens that the context allows.
            param: field of the number of tokens.

        Raises:
            APIError: 400, the answer would be too large.
        """
        if requested is None:
            remaining_bytes = self.most - cost.prompt
            room = max(1, min(room, remaining_bytes // (cost.choices * cost.token)))
        self.check(
            cost.bytes(room),
            param,
            f"request fewer tokens, choices, prompts or log-probabilities (the answer has up to "
            f"{cost.choices} completions of {room} tokens)",
        )
        return room

    def raise_to(self, total: int) -> None:
        """Count the bytes of a complete answer. Raises APIError: see `add`."""
        self.add(max(0, total - self.bytes))

    def add(self, count: int) -> None:
        """Count further bytes of the answer.

        Raises:
            APIError: 503, too many bytes are in flight.
        """
        self.bytes += count
        if self.bytes > self._reserved:
            # Few large steps, so that the budget is not changed for every token.
            target = self.bytes + FREE_BYTES
            self._reservation.add(self._scope, target - self._reserved)
            self._reserved = target
