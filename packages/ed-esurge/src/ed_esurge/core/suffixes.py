"""Suffix decoding: proposals from the request's own text, and from the texts of earlier requests.

The last tokens of a request are searched in its own prompt and output, and in a pool of finished
requests. The longest equal context wins. Its continuations vote for each next token, and the number
of proposals grows with the length of the context (Oliaro et al. 2024,
https://arxiv.org/abs/2411.04975). The names of the options are vLLM's.

Requests with another `cache_salt` or another adapter have a pool of their own, so that response
times reveal nothing about them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.proposals import DraftKind, Proposer
from ed_esurge.core.request import Request

#: Shortest context that is searched, in tokens.
SHORTEST_CONTEXT = 2
#: Number of latest occurrences of a context that are compared.
OCCURRENCES = 16
#: Maximum number of tokens of the pool, which needs about 250 bytes for each.
POOL_TOKENS = 2**18

#: A text, and a position in the text.
TextPlace = tuple[Sequence[int], int]


class PlaceTable:
    """The latest positions after each context of `SHORTEST_CONTEXT` tokens, over several texts."""

    def __init__(self) -> None:
        self._places: dict[tuple[bytes | int, ...], list[TextPlace]] = {}

    def index(self, tokens: Sequence[int], start: int, salt: bytes = b"") -> None:
        """Add the positions of a text from `start` on."""
        for place in range(max(start, SHORTEST_CONTEXT), len(tokens)):
            places = self._places.setdefault((salt, *tokens[place - SHORTEST_CONTEXT : place]), [])
            places.append((tokens, place))
            del places[:-OCCURRENCES]

    def remove(self, tokens: Sequence[int], salt: bytes) -> None:
        """Remove a text."""
        for place in range(SHORTEST_CONTEXT, len(tokens)):
            context = (salt, *tokens[place - SHORTEST_CONTEXT : place])
            places = [one for one in self._places.pop(context, ()) if one[0] is not tokens]
            if places:
                self._places[context] = places

    def find(self, tokens: Sequence[int], salt: bytes = b"") -> Sequence[TextPlace]:
        """Return the positions after the last tokens of a text."""
        return self._places.get((salt, *tokens[len(tokens) - SHORTEST_CONTEXT :]), ())


class SuffixDecoding(Proposer):
    """Proposes the most frequent continuations of the longest context that occurred before.

    Args:
        config: options with `method: suffix`.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config.num_speculative_tokens, adapts=config.adaptive_length)
        self._config = config
        self._open: dict[str, tuple[list[int], PlaceTable]] = {}
        self._pool, self._pooled = PlaceTable(), deque[tuple[list[int], bytes]]()
        self._num_pooled_tokens = 0

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See `Proposer`."""
        text, places = self._open.setdefault(request.request_id, ([], PlaceTable()))
        start = len(text)
        text += request.tokens(start, request.num_tokens)
        places.index(text, start)
        if len(text) < SHORTEST_CONTEXT:
            return ()
        longest, matches = SHORTEST_CONTEXT - 1, list[TextPlace]()
        for tokens, place in (*places.find(text), *self._pool.find(text, request.salt)):
            length = self._count_equal(text, tokens, place)
            if length > longest:
                longest, matches = length, []
            if length == longest:
                matches.append((tokens, place))
        most = min(most, int(self._config.suffix_decoding_max_spec_factor * longest))
        return self._vote(text, matches, most)

    def _count_equal(self, text: Sequence[int], tokens: Sequence[int], place: int) -> int:
        """Return the number of equal tokens before the end of a text and before a place."""
        end, length = len(text), SHORTEST_CONTEXT
        most = min(self._config.suffix_decoding_max_tree_depth, place, end)
        while length < most and tokens[place - length - 1] == text[end - length - 1]:
            length += 1
        return length

    def _vote(self, text: Sequence[int], matches: Sequence[TextPlace], most: int) -> list[int]:
        """Return at most `most` tokens: each is the most frequent continuation of the others."""
        proposed: list[int] = []

        def read(tokens: Sequence[int], at: int) -> int | None:
            if at < len(tokens):
                return tokens[at]
            # The continuation may include the proposals themselves, as in a repetition.
            at -= len(tokens)
            return proposed[at] if tokens is text and at < len(proposed) else None

        probability = 1.0
        while matches and len(proposed) < most:
            following = [read(*place) for place in matches]
            votes = Counter(token for token in following if token is not None)
            if not votes:
                break
            token, count = votes.most_common(1)[0]
            probability *= count / votes.total()
            if probability < self._config.suffix_decoding_min_token_prob:
                break
            proposed.append(token)
            pairs = zip(matches, following, strict=True)
            matches = [
                (tokens, at + 1) for (tokens, at), next_token in pairs if next_token == token
            ]
        return proposed

    def forget(self, request: Request) -> None:
        """See `Proposer`. The output becomes part of the pool, with the tokens before it."""
        self._open.pop(request.request_id, None)
        size = self._config.suffix_decoding_max_cached_requests
        if not request.output or not size:
            return
        first = max(len(request.prompt) - self._config.suffix_decoding_max_tree_depth, 0)
        text = [*request.tokens(first, request.num_tokens)]
        self._pool.index(text, 0, request.salt)
        self._pooled.append((text, request.salt))
        self._num_pooled_tokens += len(text)
        while len(self._pooled) > size or self._num_pooled_tokens > POOL_TOKENS:
            oldest, salt = self._pooled.popleft()
            self._pool.remove(oldest, salt)
            self._num_pooled_tokens -= len(oldest)


SUFFIX_KIND = DraftKind(SuffixDecoding)
