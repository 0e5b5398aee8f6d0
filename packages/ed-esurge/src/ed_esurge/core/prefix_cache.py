"""Which page holds which prefix: a chain of hashes, one link per full page."""

from __future__ import annotations

import hashlib
from array import array

from ed_esurge.core.page_pool import PagePool
from ed_esurge.core.request import Request


class PrefixCache:
    """Finds pages whose keys and values belong to the beginning of a prompt.

    The key of a page is a 128-bit BLAKE2 digest of the key of the page before it and the token ids
    in it, so it stands for the whole prefix; only full pages have one. A page stays known until
    the pool gives it to somebody else.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.queries = 0
        self.hits = 0
        """Prompt tokens looked up, and found, since the start."""

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def __len__(self) -> int:
        return len(self._key_of)

    def match(self, request: Request, pool: PagePool) -> list[int]:
        """Hold and return the pages of the longest known prefix of a request's tokens.

        At least one token is left to compute: its logits are what the request waits for.
        """
        self._extend_keys(request, (request.num_tokens - 1) // self.page_size)
        pages: list[int] = []
        for key in request.page_keys[: (request.num_tokens - 1) // self.page_size]:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        pool.hold(pages)
        return pages

    def insert(self, request: Request, since: int, until: int) -> None:
        """Make the pages known that the request fills from position `since` to before `until`."""
        first, full = since // self.page_size, until // self.page_size
        if first == full:
            return
        self._extend_keys(request, full)
        for index in range(first, full):
            key, page = request.page_keys[index], request.pages[index]
            # Two sequences may compute the same prefix at once: the first one's page is known.
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key] = page
                self._key_of[page] = key

    def forget(self, page: int) -> None:
        """Drop a page, because its contents will be overwritten."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def clear(self) -> None:
        """Drop all pages (other weights)."""
        self._page_of.clear()
        self._key_of.clear()

    def _extend_keys(self, request: Request, count: int) -> None:
        keys = request.page_keys
        while len(keys) < count:
            start = len(keys) * self.page_size
            tokens = array("q", request.tokens(start, start + self.page_size))
            before = keys[-1] if keys else b""
            keys.append(hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest())
