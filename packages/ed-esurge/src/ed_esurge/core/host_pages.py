"""Index of the pages in host memory, which the prefix cache evicted from the device.

Each group of layers has one index. The runner stores the contents of the pages
(`ed_esurge.runner.host_pages`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class HostPages:
    """LRU index of pages in host memory.

    `saves` and `loads` list the copies that are required before the next step. All saves come
    before all loads, because an evicted device page may receive another prefix in the same step.

    Args:
        places: number of places for pages.

    Attributes:
        saves: place -> device page to copy to the place.
        loads: device page -> place to copy from.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.saves: dict[int, int] = {}
        self.loads: dict[int, int] = {}
        self._place_of: OrderedDict[bytes, int] = OrderedDict()
        self._blank = list(range(places - 1, -1, -1))

    def __contains__(self, key: bytes) -> bool:
        return key in self._place_of

    def __len__(self) -> int:
        return len(self._place_of)

    def save(self, key: bytes, page: int) -> None:
        """Save a page that will be overwritten, if a place is available."""
        if self.loads.pop(page, None) is not None:
            return  # the page was not copied to the device yet
        if key in self._place_of:
            self._place_of.move_to_end(key)
            return
        place = self._blank.pop() if self._blank else self._oldest()
        if place is not None:
            self._place_of[key] = place
            self.saves[place] = page

    def take(self, keys: Sequence[bytes]) -> list[int]:
        """Return the places of pages, and reserve them until `load` or `put_back`."""
        return [self._place_of.pop(key) for key in keys]

    def put_back(self, keys: Sequence[bytes], places: Sequence[int]) -> None:
        """Return the places of `take` to the index, as the most recently used."""
        self._place_of.update(zip(keys, places, strict=True))

    def load(self, keys: Sequence[bytes], places: Sequence[int], pages: Sequence[int]) -> None:
        """Copy the pages of `take` to the device. They also remain in host memory."""
        self.put_back(keys, places)
        self.loads.update(zip(pages, places, strict=True))

    def restore(self, key: bytes) -> int | None:
        """Return a free place for a stored page, as the most recently used; None without one."""
        if key in self._place_of or not self._blank:
            return None
        place = self._place_of[key] = self._blank.pop()
        return place

    def discard(self, key: bytes) -> None:
        """Remove a page of `restore`, whose content cannot be read."""
        self._blank.append(self._place_of.pop(key))

    def get_places(self) -> dict[bytes, int]:
        """Return key -> place of the pages whose content is in host memory."""
        return {key: place for key, place in self._place_of.items() if place not in self.saves}

    def forget_moves(self) -> None:
        """Clear `saves` and `loads` after the copies."""
        self.saves, self.loads = {}, {}

    def clear(self) -> None:
        """Remove all pages, after a change of the weights."""
        self.forget_moves()
        self._place_of.clear()
        self._blank = list(range(self.places - 1, -1, -1))

    def _oldest(self) -> int | None:
        """Evict the least recently used page and return its place. Return None if all pages are
        about to be read."""
        reading = {*self.loads.values()}
        key = next((key for key, place in self._place_of.items() if place not in reading), None)
        return None if key is None else self._place_of.pop(key)
