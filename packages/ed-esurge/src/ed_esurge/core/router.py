"""Routing of requests to replicas."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: Assumed length of a completion in tokens before any completion has finished.
USUAL_OUTPUT = 128.0


class ReplicaRouter:
    """Routes each request to the replica with the least work, measured in tokens.

    The work of a replica is a sum over its requests: the uncached prompt tokens, and for each
    completion the smaller of `max_tokens` and the average length. A request goes to the replica
    with the least work including the new request. It thus goes to the replica with its prefix,
    unless that replica has more additional work than the prefix saves. Ties go to the least
    recently chosen replica.

    Args:
        replicas: number of replicas.
    """

    def __init__(self, replicas: int) -> None:
        self._work = [0.0] * replicas
        self._chosen = list(range(replicas))  # order of the last choices
        self._placed: dict[str, tuple[int, float, int]] = {}  # id -> replica, tokens, completions
        self._usual = USUAL_OUTPUT

    def choose(
        self, prompt: int, cached_tokens: Sequence[int], among: Collection[int] | None = None
    ) -> int:
        """Return the replica for a new request.

        Args:
            prompt: number of prompt tokens.
            cached_tokens: number of prompt tokens in the prefix cache of each replica.
            among: the replicas that accept requests, at least one; None = all.
        """
        costs = [work + prompt - hit for work, hit in zip(self._work, cached_tokens, strict=True)]
        replicas = range(len(costs)) if among is None else among
        return min(replicas, key=lambda index: (costs[index], self._chosen[index]))

    def place(self, request_id: str, replica: int, new: int, completions: int, most: int) -> None:
        """Add the work of a request to a replica.

        Args:
            request_id: id of the request.
            replica: index of the replica.
            new: number of uncached prompt tokens.
            completions: number of completions.
            most: maximum number of tokens per completion.
        """
        tokens = new + completions * min(most, self._usual)
        self._placed[request_id] = replica, tokens, completions
        self._work[replica] += tokens
        self._chosen[replica] = max(self._chosen) + 1

    def find(self, request_id: str) -> int | None:
        """Return the replica of a request, or None if the request has ended or is unknown."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed[0]

    def finish_request(self, request_id: str, generated: int) -> None:
        """Subtract the work of a finished request from its replica.

        Args:
            request_id: id of the request.
            generated: number of generated tokens over all completions.
        """
        completions = self.remove(request_id)
        if completions:
            self._usual += (generated / completions - self._usual) / 16

    def remove(self, request_id: str) -> int:
        """Subtract the work of an unfinished request, and return its number of completions."""
        replica, work, completions = self._placed.pop(request_id)
        self._work[replica] -= work
        return completions
