"""Which page holds which prefix, on the device or in host memory: a chain of hashes, one link per
full page."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from ed_esurge.core.host_pages import HostPages
from ed_esurge.core.request import Request


class PrefixCache:
    """Knows pages whose keys and values belong to the beginning of a prompt.

    The key of a page is a 128-bit BLAKE2 digest of the key of the page before it (of the first
    page: the request's salt) and the token ids in it, so it stands for the whole prefix; only full
    pages have one. A page stays known until the pool gives it to somebody else.

    Args:
        page_size: tokens of a page.
        needed: group -> pages before a position that a query there reads; None = all.
        host_places: pages of each group that host memory holds.

    Attributes:
        host: group -> what lies there.
    """

    def __init__(
        self, page_size: int, needed: Mapping[str, int | None], host_places: int = 0
    ) -> None:
        self.page_size = page_size
        self.needed = dict(needed)
        self._page_of: dict[str, dict[bytes, int]] = {group: {} for group in needed}
        self._key_of: dict[str, dict[int, bytes]] = {group: {} for group in needed}
        self.host = {group: HostPages(host_places) for group in needed}
        self.queries = self.hits = 0
        """Prompt tokens looked up, and those that the device had, since the start."""
        self.host_queries = self.host_hits = 0
        """The others, and those of them that host memory had."""

    @property
    def host_usage(self) -> float:
        """Used part of host memory, of the group that uses most; 0 … 1."""
        return max(len(host) / max(host.places, 1) for host in self.host.values())

    def knows(self, group: str, page: int) -> bool:
        """Whether the contents of a page may be of use again."""
        return page in self._key_of[group]

    def match(self, request: Request) -> dict[str, list[int | bytes | None]]:
        """Group -> pages of the longest known prefix of a request's tokens.

        All groups have as many; a key stands for a page that lies in host memory, None for one that
        nobody will read, behind a window. At least one token is left to compute: its hidden state
        is what the request waits for.
        """
        most = (request.num_tokens - 1) // self.page_size
        self._extend_keys(request, most)
        keys = request.page_keys[:most]
        best = self.known(keys)
        matched: dict[str, list[int | bytes | None]] = {}
        for group, pages in self._page_of.items():
            needed = self.needed[group]
            first = 0 if needed is None else max(best - needed, 0)
            matched[group] = [*(None,) * first, *(pages.get(key, key) for key in keys[first:best])]
        return matched

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's first pages need not be computed.

        Args:
            keys: of its full pages, from the first.
        """
        best, run = 0, dict.fromkeys(self.needed, 0)  # run: known pages up to here, in a row
        for count, key in enumerate(keys, 1):
            for group, pages in self._page_of.items():
                known = key in pages or key in self.host[group]
                run[group] = run[group] + 1 if known else 0
            if all(run[g] >= min(count, n or count) for g, n in self.needed.items() if n != 0):
                best = count
            elif any(run[g] < count for g, n in self.needed.items() if n is None):
                break
        return best

    def put(self, group: str, key: bytes, page: int) -> None:
        """Let a page be known under a key that no other page has."""
        self._page_of[group][key] = page
        self._key_of[group][page] = key

    def insert(self, request: Request, since: int, until: int) -> None:
        """Make the pages known that the request fills from position `since` to before `until`."""
        first, full = since // self.page_size, until // self.page_size
        if first == full:
            return
        self._extend_keys(request, full)
        for group, pages in self._page_of.items():
            known, held = self._key_of[group], request.pages[group]
            for index in range(first, full):
                key, page = request.page_keys[index], held[index]
                # Two sequences may compute the same prefix at once: the first one's page is known.
                if key not in pages and page not in known:
                    self.put(group, key, page)

    def count(self, looked_up: int, known: int, brought: int) -> None:
        """Note the fate of a prompt: its tokens, those that were known, and how many of the latter
        came from host memory."""
        self.queries += looked_up
        self.hits += known - brought
        self.host_queries += looked_up - (known - brought)
        self.host_hits += brought

    def forget(self, group: str, page: int) -> None:
        """Drop a page, because its contents will be overwritten; host memory may keep them."""
        key = self._key_of[group].pop(page, None)
        if key is not None:
            del self._page_of[group][key]
            self.host[group].save(key, page)

    def clear(self) -> None:
        """Drop all pages (other weights)."""
        for table in (*self._page_of.values(), *self._key_of.values()):
            table.clear()
        for host in self.host.values():
            host.clear()

    def _extend_keys(self, request: Request, count: int) -> None:
        keys = request.page_keys
        while len(keys) < count:
            start = len(keys) * self.page_size
            tokens = request.tokens(start, start + self.page_size)
            keys.append(page_key(keys[-1] if keys else request.salt, tokens))


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page, after the key of the page before it (or the request's salt)."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def prompt_keys(tokens: Sequence[int], salt: bytes, page_size: int) -> list[bytes]:
    """The keys of the pages of a prompt that may be known: all but what its last token needs."""
    keys: list[bytes] = []
    for end in range(page_size, len(tokens), page_size):
        keys.append(page_key(keys[-1] if keys else salt, tokens[end - page_size : end]))
    return keys
