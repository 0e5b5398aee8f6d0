"""Which of several replicas a request goes to."""

from __future__ import annotations

from collections.abc import Sequence

#: Tokens of a completion, before any has ended.
USUAL_OUTPUT = 128.0


class Router:
    """Sends each request where it is done first, counted in tokens.

    The work of a replica is a sum over its requests: the tokens of the prompt that its prefix cache
    did not know, and for each completion `max_tokens` or the usual length, whichever is less. A
    request goes where the work is least once its own is added: to its prefix, then, until that
    replica has more to do than the prefix saves. Among equals the one chosen longest ago is next.

    Args:
        replicas: how many there are.
    """

    def __init__(self, replicas: int) -> None:
        self._work = [0.0] * replicas
        self._chosen = list(range(replicas))  # when, by count
        self._placed: dict[str, tuple[int, float, int]] = {}  # where, its tokens, completions
        self._usual = USUAL_OUTPUT

    def choose(self, prompt: int, known: Sequence[int]) -> int:
        """The replica of a new request.

        Args:
            prompt: tokens of its prompt.
            known: of these, how many each replica's prefix cache has.
        """
        costs = [work + prompt - hit for work, hit in zip(self._work, known, strict=True)]
        return min(range(len(costs)), key=lambda index: (costs[index], self._chosen[index]))

    def place(self, request_id: str, replica: int, new: int, completions: int, most: int) -> None:
        """Count a request to a replica.

        Args:
            new: tokens of its prompt to compute.
            completions: how many it wants.
            most: tokens of each.
        """
        tokens = new + completions * min(most, self._usual)
        self._placed[request_id] = replica, tokens, completions
        self._work[replica] += tokens
        self._chosen[replica] = max(self._chosen) + 1

    def find(self, request_id: str) -> int | None:
        """Where a request is; None if it has ended, or never came."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed[0]

    def ended(self, request_id: str, generated: int) -> None:
        """Take a request off its replica.

        Args:
            generated: tokens of all its completions.
        """
        replica, work, completions = self._placed.pop(request_id)
        self._work[replica] -= work
        if completions:
            self._usual += (generated / completions - self._usual) / 16
