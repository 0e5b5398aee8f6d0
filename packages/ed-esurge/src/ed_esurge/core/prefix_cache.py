"""Prefix cache: maps prompt prefixes to pages on the device or in host memory.

The keys are a chain of hashes with one link per full page.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Container, Mapping, Sequence

from ed_esurge.core.commands import EncoderInput
from ed_esurge.core.host_pages import HostPages
from ed_esurge.core.request import Request


class PrefixCache:
    """Maps keys of prompt prefixes to pages.

    The key of a page is a 128-bit BLAKE2 digest of the previous page's key (the request's salt for
    the first page) and the token ids of the page. A key thus identifies the whole prefix. Only full
    pages have a key. A page remains cached until the pool reuses the page.

    Args:
        page_size: number of tokens in a page.
        needed: group -> number of previous pages that a query reads; None = all.
        host_places: number of pages of each group in host memory.
        states: keys of the prefixes whose recurrent state is stored; None = the model has no
            recurrent layers.

    Attributes:
        host: group -> its pages in host memory.
    """

    def __init__(
        self,
        page_size: int,
        needed: Mapping[str, int | None],
        host_places: int = 0,
        states: Container[bytes] | None = None,
    ) -> None:
        self.page_size, self._states = page_size, states
        self.needed = dict(needed)
        self._page_of: dict[str, dict[bytes, int]] = {group: {} for group in needed}
        self._key_of: dict[str, dict[int, bytes]] = {group: {} for group in needed}
        self.host = {group: HostPages(host_places) for group in needed}
        self.queries = self.hits = 0
        """Prompt tokens looked up, and those found on the device, since the start."""
        self.host_queries = self.host_hits = 0
        """Prompt tokens not found on the device, and those of them found in host memory."""

    @property
    def host_usage(self) -> float:
        """Used fraction of host memory in the fullest group; 0 … 1."""
        return max((len(host) / max(host.places, 1) for host in self.host.values()), default=0.0)

    def knows(self, group: str, page: int) -> bool:
        """Return whether a page is cached."""
        return page in self._key_of[group]

    def get_pages(self, group: str) -> dict[bytes, int]:
        """Return key -> page of the cached pages on the device whose content is there."""
        loads = self.host[group].loads
        return {key: page for key, page in self._page_of[group].items() if page not in loads}

    def match(self, request: Request) -> tuple[int, dict[str, list[int | bytes | None]]]:
        """Return the longest cached prefix of a request's tokens: the number of its pages, and
        group -> pages.

        All groups have the same number of entries. An entry is a page number, a key for a page in
        host memory, or None for a page behind a window, which is never read. The match excludes at
        least one token, because the request needs the hidden state of its last token.
        """
        most = (request.num_tokens - 1) // self.page_size
        extend_page_keys(request, most, self.page_size)
        keys = request.page_keys[:most]
        best = self.count_prefix_pages(keys)
        matched: dict[str, list[int | bytes | None]] = {}
        for group, pages in self._page_of.items():
            needed = self.needed[group]
            first = 0 if needed is None else max(best - needed, 0)
            matched[group] = [*(None,) * first, *(pages.get(key, key) for key in keys[first:best])]
        return best, matched

    def count_prefix_pages(self, keys: Sequence[bytes]) -> int:
        """Return the number of cached pages at the beginning of a prompt. The recurrent state after
        the last of them is cached, too.

        Args:
            keys: keys of the full pages, from the first.
        """
        best, run = 0, dict.fromkeys(self.needed, 0)  # run: known pages up to here, in a row
        for count, key in enumerate(keys, 1):
            for group, pages in self._page_of.items():
                is_cached = key in pages or key in self.host[group]
                run[group] = run[group] + 1 if is_cached else 0
            if all(run[g] >= min(count, n or count) for g, n in self.needed.items() if n != 0):
                best = count if self._states is None or key in self._states else best
            elif any(run[g] < count for g, n in self.needed.items() if n is None):
                break
        return best

    def put(self, group: str, key: bytes, page: int) -> None:
        """Cache a page under a key that no other page has."""
        self._page_of[group][key] = page
        self._key_of[group][page] = key

    def insert(self, request: Request, since: int, stop: int) -> None:
        """Cache the pages that the request fills from position `since` to before `stop`."""
        first, full = since // self.page_size, stop // self.page_size
        if first == full:
            return
        extend_page_keys(request, full, self.page_size)
        for group, pages in self._page_of.items():
            keys_by_page, request_pages = self._key_of[group], request.pages[group]
            for index in range(first, full):
                key, page = request.page_keys[index], request_pages[index]
                # If two sequences compute the same prefix concurrently, the first page is cached.
                if key not in pages and page not in keys_by_page:
                    self.put(group, key, page)

    def count(self, looked_up: int, cached_tokens: int, brought: int) -> None:
        """Update the statistics for a prompt.

        Args:
            looked_up: number of prompt tokens.
            cached_tokens: number of cached prompt tokens.
            brought: number of cached tokens that were copied from host memory.
        """
        self.queries += looked_up
        self.hits += cached_tokens - brought
        self.host_queries += looked_up - (cached_tokens - brought)
        self.host_hits += brought

    def forget(self, group: str, page: int) -> bytes | None:
        """Remove a page that will be overwritten, and return its key. Its contents may be saved to
        host memory."""
        key = self._key_of[group].pop(page, None)
        if key is not None:
            del self._page_of[group][key]
            self.host[group].save(key, page)
        return key

    def clear(self) -> None:
        """Remove all pages, after a change of the weights."""
        for table in (*self._page_of.values(), *self._key_of.values()):
            table.clear()
        for host in self.host.values():
            host.clear()


def extend_page_keys(request: Request, count: int, page_size: int) -> None:
    """Compute the keys of the first `count` full pages of a request, if they are missing."""
    keys = request.page_keys
    while len(keys) < count:
        start = len(keys) * page_size
        tokens = request.tokens(start, start + page_size)
        items = item_keys(request.encoder_inputs, start, start + page_size)
        keys.append(page_key(keys[-1] if keys else request.salt, tokens, items))


def page_key(previous_key: bytes, tokens: Sequence[int], items: bytes = b"") -> bytes:
    """Return the key of a full page.

    Args:
        previous_key: key of the previous page, or the request's salt.
        tokens: token ids of the page.
        items: `item_keys` of the page.
    """
    content = previous_key + array("q", tokens).tobytes() + items
    return hashlib.blake2b(content, digest_size=16).digest()


def item_keys(items: Sequence[EncoderInput], start: int, stop: int) -> bytes:
    """Return the keys and offsets of the items with placeholder tokens at `start` … `stop - 1`.

    Equal token ids with different images thus have different page keys.
    """
    return b"".join(
        item.key + (item.start - start).to_bytes(8, "big", signed=True)
        for item in items
        if item.start < stop and item.stop > start
    )


def prompt_keys(
    tokens: Sequence[int], salt: bytes, page_size: int, items: Sequence[EncoderInput] = ()
) -> list[bytes]:
    """Return the keys of the full pages of a prompt, excluding the page of its last token."""
    keys: list[bytes] = []
    for end in range(page_size, len(tokens), page_size):
        start, previous_key = end - page_size, keys[-1] if keys else salt
        keys.append(page_key(previous_key, tokens[start:end], item_keys(items, start, end)))
    return keys
