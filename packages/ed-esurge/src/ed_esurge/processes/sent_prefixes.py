"""The prefixes that a server has sent to a replica."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

#: Maximum number of remembered pages of a replica; the least recently used are forgotten.
MAX_PAGES = 2**16


class SentPrefixes:
    """Remembers the keys of the prompt pages of a replica, to estimate its cached prefixes."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def count_prefix_pages(self, keys: Sequence[bytes]) -> int:
        """Return the number of pages at the beginning of a prompt that the replica has received.

        Args:
            keys: keys of the full pages, see `ed_esurge.core.prefix_cache.prompt_keys`.
        """
        return next((count for count, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Sequence[bytes]) -> None:
        """Remember the pages of a prompt."""
        for key in reversed(keys):  # the later pages of a prompt are forgotten first
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_PAGES:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget all pages, after a change of the weights or a reset of the cache."""
        self._keys.clear()
